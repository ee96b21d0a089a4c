"""The memory order of a model's weights, chosen for steps of few tokens. Values and shapes stay as they are."""

from __future__ import annotations

import torch


def order_for_small_steps(model: torch.nn.Module) -> None:
    """Store each float32 linear weight [out, in] with `out` running fastest, in place, one weight at a time.

    A linear layer multiplies by the transposed weight, which this order makes a plain row-major matrix. Measured
    with MKL, that product is two to three times as fast at 4 to 32 tokens, the size of a decode step; at one token
    and from 64 on both orders are equally fast. Weights shared with an embedding keep their rows, which the embedding
    reads; other dtypes are left alone, since oneDNN reorders those in its own way.
    """
    rows_read = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        if type(module) is not torch.nn.Linear:
            continue
        weight = module.weight
        if weight.dtype == torch.float32 and weight.device.type == "cpu" and id(weight) not in rows_read:
            weight.data = weight.data.t().contiguous().t()
