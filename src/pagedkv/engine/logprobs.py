"""Log-probabilities of sampled tokens, and of the likeliest ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, by the model's own logits.

    Attributes:
        token_id: the sampled token.
        logprob: natural logarithm of its probability.
        top: (token id, log-probability) of the likeliest tokens, the likeliest first; of equal ones the lower id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """For each rows[i] of logits float32 [B, V]: tokens[i], and the counts[i] likeliest tokens.

    A row's figures depend on that row alone.
    """
    found = []
    for row, token, count in zip(rows, tokens, counts, strict=True):
        logprobs = torch.log_softmax(logits[row], dim=-1)
        top: tuple[tuple[int, float], ...] = ()
        if count:
            least = logprobs.topk(count).values[-1]
            ids = torch.nonzero(logprobs >= least).squeeze(1)  # ascending: a stable sort keeps lower ids first
            ids = ids[torch.sort(logprobs[ids], descending=True, stable=True).indices[:count]]
            top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
        found.append(TokenLogprobs(token, float(logprobs[token]), top))
    return found
