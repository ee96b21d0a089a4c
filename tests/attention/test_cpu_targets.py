"""The kernel on CPUs other than this one: each is chosen with Numba's own settings, in a process of its own."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedkv.attention.cpu.blocks import has_wide_registers
from pagedkv.spec import LayerSpec

HERE = Path(__file__).parent

EMIT = """
from pagedkv.attention.cpu import blocks, kernel
assembly = kernel.build_kernel(True, True, "emitted for inspection")._library.get_asm_str()
print(blocks.BF16_DOT, assembly.count("vdpbf16ps"), assembly.count("zmm"))
"""

ATTEND = """
import hashlib, sys
sys.path.insert(0, {here!r})
from test_cpu_targets import digest
from pagedkv.attention.cpu import blocks
print(blocks.BF16_DOT, blocks.MANY_ROWS, digest())
"""

COMPILE = """
from pagedkv.attention.cpu import kernel
print(kernel.build_kernel(True, True, "{version}").cache_hits)
"""

PLAY = """
import sys
sys.path.insert(0, {here!r})
import llvmlite.ir as ir
from pagedkv.attention.cpu import blocks
from pagedkv.attention.cpu.vectors import F32_LANES, I32_LANES, constant, fma_value

real, played = blocks.call_llvm, [0]

def play(builder, name, result, arguments):
    if name != "llvm.x86.avx512bf16.dpbf16ps.512":
        return real(builder, name, result, arguments)
    played[0] += 1
    total, x, y = arguments
    for mask, shift in ((-0x10000, 0), (0xFFFF, 16)):
        halves = [builder.and_(value, constant(I32_LANES, mask)) for value in (x, y)]
        halves = [builder.bitcast(builder.shl(value, constant(I32_LANES, shift)), F32_LANES) for value in halves]
        total = fma_value(builder, *halves, total)
    return total

blocks.BF16_DOT, blocks.call_llvm = True, play
from test_cpu_targets import digest
print(digest(), played[0])
"""


def digest() -> str:
    """A digest of all bits of outputs over both dtypes, many and few rows, a window, a softcap and sinks."""
    from attention_cases import Case  # here: only a process that attends compiles for its CPU

    found = hashlib.sha256()
    for dtype in (torch.bfloat16, torch.float32):
        case = Case(LayerSpec(6, 2, 80, 48), ((1, 90), (40, 70), (1, 1)), dtype=dtype)
        for chosen in ({}, {"window": 21, "softcap": 3.0, "sinks": torch.linspace(-1, 1, 6)}):
            output = case.attend(**chosen)
            assert float((output - case.expected(**chosen)).abs().max()) <= case.tolerance()
            found.update((output + 0.0).numpy().tobytes())
    return found.hexdigest()


def run(program: str, cache: Path, cpu: str, features: str) -> list[str]:
    """Run a program in a process that compiles for another CPU; its output in words."""
    environment = os.environ | {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(cache),
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode == -signal.SIGILL:
        pytest.skip(f"this machine cannot run what Numba compiles for {cpu}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_sapphire_rapids_gets_the_dot_product_instruction(tmp_path: Path) -> None:
    """Code for it is only looked at, so that the test needs no such machine."""
    bf16_dot, count, _ = run(EMIT, tmp_path, "sapphirerapids", "+avx512bf16")
    assert bf16_dot == "True"
    assert int(count) > 100


def test_ice_lake_gets_wide_registers_without_the_instruction(tmp_path: Path) -> None:
    bf16_dot, count, wide = run(EMIT, tmp_path, "icelake-server", "-avx512bf16")
    assert (bf16_dot, count) == ("False", "0")
    assert int(wide) > 1000


@pytest.mark.slow
def test_narrow_registers_and_emulation_give_the_same_bits(tmp_path: Path) -> None:
    """AVX2 must give what this machine gives, whatever it has: splitting a vector changes no operation on a lane."""
    program = ATTEND.format(here=str(HERE))
    bf16_dot, rows, found = run(program, tmp_path, "haswell", "-avx512f,-avx512bf16")
    assert (bf16_dot, rows) == ("False", "2")
    assert found == digest()


@pytest.mark.slow
def test_the_way_to_the_instruction_gives_the_same_bits(tmp_path: Path) -> None:
    """Packing and indexing for VDPBF16PS, the instruction itself played by the two FMAs that its manual defines."""
    cpu, features = ("icelake-server", "-avx512bf16") if has_wide_registers() else ("haswell", "-avx512f")
    found, played = run(PLAY.format(here=str(HERE)), tmp_path, cpu, features)
    assert int(played) > 0
    assert found == digest()


@pytest.mark.slow
def test_the_disk_cache_is_good_for_one_cpu_and_one_source(tmp_path: Path) -> None:
    first, second = COMPILE.format(version="first"), COMPILE.format(version="second")
    haswell, icelake = ("haswell", "-avx512f,-avx512bf16"), ("icelake-server", "-avx512bf16")
    assert run(first, tmp_path, *haswell) == ["0"]
    assert run(first, tmp_path, *haswell) == ["1"]
    assert run(first, tmp_path, *icelake) == ["0"], "code for another CPU was taken from the cache"
    assert run(second, tmp_path, *haswell) == ["0"], "code of another source was taken from the cache"
