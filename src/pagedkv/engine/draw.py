"""Drawing token ids from probabilities, filtered or not, for many rows at once: tensors in, ids out.

Responsible for min_p, top_k, top_p and the inverse-CDF search. Knows nothing about requests, generators or
penalties. Each row's result depends on that row alone, to the bit.
"""

from __future__ import annotations

import torch

# A filter seldom keeps more tokens than this; a row for which it does pays for a full sort.
CANDIDATES = 256
# Tokens per block of the two-level search through an unfiltered row.
BLOCK = 256


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over probs float32 [n, V] in id order at uniform float64 [n]: ids int64 [n].

    First the block, by sums, then the token inside it: two short cumulative sums in float64, not a long one.
    """
    vocab = probs.shape[1]
    size = min(BLOCK, vocab)
    sums = probs.unfold(1, size, size).sum(dim=2, dtype=torch.float64)
    rest = probs[:, sums.shape[1] * size :].sum(dim=1, keepdim=True, dtype=torch.float64)
    upto = torch.cat((sums, rest), dim=1).cumsum(dim=1)
    target = uniform * upto[:, -1]
    block = _search(upto, target, upto[:, -1])
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp_(min=0).unsqueeze(1)).squeeze(1), 0.0)
    columns = block.unsqueeze(1) * size + torch.arange(size)
    inside = probs.gather(1, columns.clamp(max=vocab - 1)).double().masked_fill_(columns >= vocab, 0.0)
    inside = inside.cumsum(dim=1)
    return block * size + _search(inside, target - before, inside[:, -1])


def _search(upto: torch.Tensor, target: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """First column of each row of cumulative sums float64 [n, m] above target [n]: int64 [n].

    When rounding puts the target at or past the total [n], the last column that adds mass up to the total.
    A column without mass is never the answer.
    """
    found = torch.searchsorted(upto, target.unsqueeze(1), right=True)
    last = torch.searchsorted(upto, total.unsqueeze(1).contiguous())
    return torch.minimum(found, last).squeeze(1)


def draw_filtered(
    logits: torch.Tensor,
    probs: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Draw from what min_p, then top_k, then top_p leave of each row, renormalised: ids int64 [n].

    Sorted by falling logit, equals by id, each filter keeps a prefix: a row's filters come down to one length.

    Args:
        logits: float32 [n, V], before temperature. They rank the tokens: probabilities may round to ties.
        probs: float32 [n, V], their softmax after temperature.
        uniform: float64 [n] in [0, 1).
        top_k: int64 [n]; below 1 or past V is off.
        top_p: float64 [n] in (0, 1].
        min_p: float64 [n] in [0, 1].
    """
    vocab = logits.shape[1]
    top_k = torch.where((top_k < 1) | (top_k > vocab), vocab, top_k)
    tokens = torch.empty(len(probs), dtype=torch.int64)
    unresolved = torch.arange(len(probs))
    if vocab > CANDIDATES:
        values, ids = logits.topk(CANDIDATES, dim=-1)
        # topk leaves equals in any order: sort by id, then stably by value.
        ids, order = ids.sort(dim=-1)
        values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
        ranked = probs.gather(1, ids).double()
        upto = ranked.cumsum(dim=1)
        keep, known = _prefix(ranked, upto, top_k, top_p, min_p, vocab)
        end = keep.clamp(max=CANDIDATES).unsqueeze(1) - 1
        # Equals of the last candidate may have been left out, so a prefix that reaches into them is not exact.
        known &= values.gather(1, end).squeeze(1) > values[:, -1]
        picked = _pick(upto, ids, end, uniform)
        tokens[known] = picked[known]
        unresolved = torch.nonzero(~known).squeeze(1)
    if unresolved.numel():
        ids = logits[unresolved].sort(dim=-1, descending=True, stable=True).indices
        ranked = probs[unresolved].gather(1, ids).double()
        upto = ranked.cumsum(dim=1)
        keep, _ = _prefix(ranked, upto, top_k[unresolved], top_p[unresolved], min_p[unresolved], vocab)
        tokens[unresolved] = _pick(upto, ids, keep.unsqueeze(1) - 1, uniform[unresolved])
    return tokens


def _prefix(
    probs: torch.Tensor,
    upto: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    vocab: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the sorted tokens the filters keep, int64 [n] >= 1, and whether that is certain, bool [n].

    `probs` and `upto` float64 [n, m] are the m largest probabilities, falling, and their cumulative sums. With
    m < vocab a prefix may end behind what is known; then the answer is not certain.
    """
    width = upto.shape[1]
    kept = (probs >= min_p.unsqueeze(1) * probs[:, :1]).sum(dim=1)
    # Where all that is known passes min_p, min_p may end anywhere behind it.
    kept = torch.minimum(torch.where(kept == width, vocab, kept), top_k)
    inside = kept <= width
    # The mass that top_p is a fraction of; a row that nothing has cut has 1, up to the rounding of softmax.
    mass = torch.where(inside, upto.gather(1, kept.clamp(max=width).unsqueeze(1) - 1).squeeze(1), 1.0)
    below = torch.searchsorted(upto, (top_p * mass).unsqueeze(1)).squeeze(1)
    keep = torch.where((top_p < 1.0) & (below < width), torch.minimum(kept, below + 1), kept)
    uncut = (kept == vocab) & (min_p == 0.0)
    return keep, (inside | uncut) & (keep <= width)


def _pick(upto: torch.Tensor, ids: torch.Tensor, end: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over the sorted tokens up to column end [n, 1], inclusive."""
    total = upto.gather(1, end).squeeze(1)
    return ids.gather(1, _search(upto, uniform * total, total).unsqueeze(1)).squeeze(1)
