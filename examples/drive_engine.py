"""Drive the engine by hand: add requests while others run, stream what each step brings, end one early.

Run it: `python examples/drive_engine.py`.
"""

from __future__ import annotations

from pagedkv import Engine, SamplingParams
from pagedkv.config import EngineConfig


def main() -> None:
    """Three requests: one from the start, one that joins later, one that is given up."""
    config = EngineConfig(max_seq_len=512, kv_cache_config={"max_memory": "64MiB"})
    engine = Engine.from_config(config, report=print)
    engine.add_request("A fjord is", SamplingParams(temperature=0, max_tokens=24), request_id="fjord")
    engine.add_request(
        "A very long story:", SamplingParams(temperature=0.8, seed=1, max_tokens=400), request_id="story"
    )
    steps = 0
    while engine.has_unfinished:
        for piece in engine.step():
            if piece.result is not None:
                print(f"{piece.request_id}: {piece.result.outputs[0].text!r}")
        steps += 1
        if steps == 5:
            engine.add_request("A glacier is", SamplingParams(temperature=0, max_tokens=12), request_id="glacier")
        if steps == 10:
            given_up = engine.abort("story")
            if given_up is not None:
                print(f"story, given up after {len(given_up.outputs[0].token_ids)} tokens")
    usage = engine.stats().usage
    print(f"pages: {usage.used} used, {usage.cached} cached, {usage.free} free")


if __name__ == "__main__":
    main()
