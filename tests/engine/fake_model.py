"""A model without weights: the next token is a function of the last one and its position. Speaks bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedkv.spec import LayerSpec, ModelSpec

EOS = 256
VOCAB = 257


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = _bytes_to_letters()
    vocab = {letters[byte]: byte for byte in range(256)}
    assert sorted(vocab) == alphabet
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def _bytes_to_letters() -> list[str]:
    """GPT-2's letters for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 256
    for byte in range(256):
        if byte in printable:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(extra)
            extra += 1
    return [letters[byte] for byte in range(256)]


def next_token(token: int, position: int) -> int:
    """A lower-case letter that depends on the token and where it stands."""
    return 97 + (token * 7 + position * 3) % 26


@dataclass
class FakeModel:
    """What the engine needs of a LoadedModel."""

    name: str = "fake"
    spec: ModelSpec = field(default_factory=lambda: ModelSpec("fake", (LayerSpec(1, 1, 32, 32),), 4096, VOCAB))
    tokenizer: Any = field(default_factory=byte_tokenizer)
    eos_token_ids: frozenset[int] = frozenset({EOS})
    dtype: torch.dtype = torch.float32
    script: dict[int, int] = field(default_factory=dict)
    fault: Any = None
    """Called with each forward's tokens; may raise, or return logits to answer with."""

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, store: Any, plan: Any
    ) -> torch.Tensor:
        logits = torch.zeros(len(logit_rows), VOCAB)
        for i, row in enumerate(logit_rows.tolist()):
            position = int(positions[row])
            logits[i, self.script.get(position, next_token(int(tokens[row]), position))] = 5.0
        if self.fault is not None:
            self.fault(tokens, logits)
        return logits


def expected_text(prompt: str, count: int) -> str:
    """What the fake model says after an ASCII prompt."""
    last, out = prompt.encode()[-1], ""
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        last = next_token(last, position)
        out += chr(last)
    return out
