"""Embeddings: a record's gradient adds each output gradient to the row of its token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tptopk_pl.gradients.contributions import Contribution, Selection, blockwise
from tptopk_pl.gradients.rules._rule import Gradients, Rule


def _gradients(layer: nn.Embedding, x: Tensor, g: Tensor) -> Gradients:
    num_tokens, width = layer.weight.shape

    def dense(tokens: Tensor, g: Tensor) -> Tensor:
        """``tokens`` ``[b, T]``, ``g`` ``[b, T, width]`` to ``[b, num_tokens·width]``."""
        if layer.padding_idx is not None:
            g = g.masked_fill((tokens == layer.padding_idx)[:, :, None], 0)
        offsets = num_tokens * torch.arange(len(tokens), device=tokens.device)
        table = g.new_zeros(len(tokens) * num_tokens, width)
        table.index_add_(0, (tokens + offsets[:, None]).flatten(), g.flatten(0, 1))
        return table.view(len(tokens), -1)

    def weight(selection: Selection) -> Contribution:
        tensors = (x.reshape(len(x), -1), g.reshape(len(x), -1, width))
        return blockwise(selection, dense, tensors, layer.weight.numel())

    return {"weight": weight}


EMBEDDING = Rule(nn.Embedding, lambda layer: 1, _gradients)
