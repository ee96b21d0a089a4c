"""Continue a few prompts at once. Run it: `python examples/generate.py`."""

from __future__ import annotations

from pagedkv import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time, a lighthouse keeper", "Water boils at"]


def main() -> None:
    """Load the embedded model and print what it says."""
    llm = LLM(kv_memory="64MiB", max_seq_len=512, report=print)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
