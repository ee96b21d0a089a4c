"""vLLM's KVCacheManager at the same work: run in its own environment, `python -m benchmarks.vllm_cases CASE ...`.

Hashing of a prompt's blocks counts where a prompt is admitted, as it does for ours; not in `allocate`, `free` and
`churn`, where the requests are made beforehand. The hash is sha256, vLLM's default.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from functools import partial
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.block_table import BlockTable, SlotMappingMode

from benchmarks import workload
from benchmarks.workload import PAGE, POOL


class _Config:
    """Stands for vLLM's configuration, of which the registration reads nothing."""


def _hasher() -> Any:
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return get_request_block_hasher(PAGE, function)


register_all_kvcache_specs(_Config())
torch.set_num_threads(1)
SAMPLING = SamplingParams(max_tokens=1 << 30)
HASHER = _hasher()


def manager(blocks: int, caching: bool = True) -> KVCacheManager:
    """A manager of one full-attention group, as vLLM makes it for a model of 8 heads of 128."""
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config,
        max_model_len=1 << 20,
        scheduler_block_size=PAGE,
        hash_block_size=PAGE,
        enable_caching=caching,
        log_stats=False,
    )


def request(name: object, tokens: list[int], hasher: Any = HASHER) -> Request:
    """A request; with a hasher, its blocks are hashed at once."""
    return Request(
        request_id=str(name),
        prompt_token_ids=tokens,
        sampling_params=SAMPLING,
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=hasher,
    )


def settle() -> None:
    """What vLLM's engine does once it is up."""
    gc.collect()
    gc.freeze()


def decode(rows: int) -> float:
    """Seconds of the manager's part in one decode step: append, allocate, count."""
    pool = manager(rows * 48)
    requests = []
    for number, length in enumerate(workload.decode_lengths(rows)):
        one = request(number, workload.tokens(length, number))
        assert pool.allocate_slots(one, length) is not None
        one.num_computed_tokens = length
        one.status = RequestStatus.RUNNING
        requests.append(one)
    settle()

    def step() -> None:
        for one in requests:
            one.append_output_token_ids(7)
        pool.new_step_starts()
        for one in requests:
            assert pool.allocate_slots(one, 1) is not None
        for one in requests:
            one.num_computed_tokens += 1

    return workload.mean_of_windows(step)


def warm_admission(length: int, repeats: int = 40) -> float:
    """Seconds to hash, look up and allocate a prompt of which 90 % are cached."""
    first, prompts = workload.warm_prompts(length, 8)
    pool = manager(3 * length // PAGE + 100)
    seed = request("seed", first)
    assert pool.allocate_slots(seed, length) is not None
    seed.num_computed_tokens = length
    pool.free(seed)
    settle()
    turns = iter(list(enumerate(prompts * repeats)))

    def timed() -> float:
        number, prompt = next(turns)
        one = request(number, prompt, None)
        start = time.perf_counter()
        one._block_hasher = HASHER
        one.update_block_hashes()
        blocks, computed, _ = pool.get_computed_blocks(one)
        answer = pool.allocate_slots(one, length - computed, computed, blocks, full_sequence_must_fit=True)
        spent = time.perf_counter() - start
        assert answer is not None
        assert computed >= length * 9 // 10 // PAGE * PAGE
        one.num_computed_tokens = length
        pool.free(one)
        return spent

    return workload.median(timed, repeats)


def allocate_and_free(pages: int = 2048) -> tuple[float, float]:
    """Seconds to allocate so many blocks, evicting as many, and to free them."""
    pool = manager(pages + 64)
    requests = iter([request(seed, workload.tokens(pages * PAGE, seed)) for seed in range(24)])
    freed: list[float] = []
    settle()

    def timed() -> float:
        one = next(requests)
        start = time.perf_counter()
        assert pool.allocate_slots(one, pages * PAGE) is not None
        spent = time.perf_counter() - start
        start = time.perf_counter()
        pool.free(one)
        freed.append(time.perf_counter() - start)
        return spent

    return workload.median(timed, 20), statistics.median(freed[3:])


def churn() -> float:
    """Allocations and frees per second in a nearly full pool."""
    lengths = workload.churn_lengths(3000)
    requests = [request(number, workload.tokens(length, number)) for number, length in enumerate(lengths)]
    pool = manager(POOL)
    settle()

    def admit(number: int) -> None:
        one = requests[number]
        blocks, computed, _ = pool.get_computed_blocks(one)
        assert pool.allocate_slots(one, one.num_tokens - computed, computed, blocks) is not None

    return workload.churn(lengths, admit, lambda number: pool.free(requests[number]))


def rebuild_table(rows: int = 1024, width: int = 2048) -> float:
    """Seconds to write the block table that a kernel reads from the manager's blocks."""
    table = BlockTable(
        block_size=PAGE,
        max_num_reqs=rows,
        max_num_blocks_per_req=width,
        max_num_batched_tokens=8192,
        pin_memory=False,
        device=torch.device("cpu"),
        cp_kv_cache_interleave_size=1,
        slot_mapping_mode=SlotMappingMode.NONE,
    )
    pool = manager(rows * width + 64, caching=False)
    requests = [request(number, [0] * PAGE, None) for number in range(rows)]
    for one in requests:
        assert pool.allocate_slots(one, width * PAGE) is not None
    settle()

    def timed() -> float:
        start = time.perf_counter()
        for row, one in enumerate(requests):
            table.add_row(pool.get_block_ids(one.request_id)[0], row)
        table.commit_block_table(rows)
        return time.perf_counter() - start

    return workload.median(timed, 6)


def bytes_per_page() -> float:
    """Bytes of memory per block when all blocks are cached."""
    small = manager(64)
    small.free(request("warm", workload.tokens(PAGE, 0)))
    before = workload.resident_bytes()
    pool = manager(POOL)
    for seed in range(50):
        one = request(seed, workload.tokens(2000 * PAGE, seed))
        assert pool.allocate_slots(one, 2000 * PAGE) is not None
        pool.free(one)
    return (workload.resident_bytes() - before) / POOL


CASES: dict[str, workload.Case] = {
    **{f"decode {rows}": partial(decode, rows) for rows in (256, 1024, 4096)},
    **{f"warm {length}": partial(warm_admission, length) for length in (2048, 32_768)},
    "allocate": lambda: allocate_and_free()[0],
    "free": lambda: allocate_and_free()[1],
    "churn": churn,
    "table": rebuild_table,
    "memory": bytes_per_page,
}

if __name__ == "__main__":
    workload.main(CASES, sys.argv[1:])
