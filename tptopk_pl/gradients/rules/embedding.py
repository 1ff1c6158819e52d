"""Embeddings: a record's gradient adds each output gradient to the row of its token.

Legend: ``n`` records of ``T`` tokens; a table of ``V`` rows of width ``w``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tptopk_pl.gradients.contributions import Options, Selection, blockwise
from tptopk_pl.gradients.gram import Gram
from tptopk_pl.gradients.options import ROWS_PER_SIGNAL
from tptopk_pl.gradients.rules._rule import Gradients, Rule


@dataclass(frozen=True)
class _Lookup:
    """The gradients of ``n`` records, a sum over tokens (see gram.Positions).

    Attributes:
        tokens: int64 ``[n, T]``.
        g: ``[n, T, w]``, zero for tokens that have no gradient.
        num_rows: ``V``.
    """

    tokens: Tensor
    g: Tensor
    num_rows: int

    def __len__(self) -> int:
        return len(self.g)

    @property
    def device(self) -> torch.device:
        return self.g.device

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    def elements_per_record(self) -> int:
        return self.num_rows * self.g.shape[2]

    def pairs_per_record(self) -> int:
        return max(self.tokens.shape[1] ** 2, self.g.shape[1:].numel())

    def select(self, records: Tensor | slice) -> _Lookup:
        return replace(self, tokens=self.tokens[records], g=self.g[records])

    def dense(self) -> Tensor:
        offsets = self.num_rows * torch.arange(len(self), device=self.device)
        return self._table((self.tokens + offsets[:, None]), self.g, len(self)).view(len(self), -1)

    def total(self, factors: Tensor) -> Tensor:
        weighted = self.g * factors.to(self.g.dtype)[:, None, None]
        return self._table(self.tokens, weighted, 1).flatten()

    def inner_products(self, present: Tensor) -> tuple[Tensor, Tensor]:
        b = len(present)
        tokens = self.tokens.view(b, -1)
        g = self.g.masked_fill(~present.view(-1, 1, 1), 0).view(b, tokens.shape[1], -1)
        g = g.double()
        same = tokens[:, :, None] == tokens[:, None, :]
        return same.to(g.dtype)[:, None], (g @ g.transpose(1, 2))[:, None]

    def _table(self, rows: Tensor, g: Tensor, num_tables: int) -> Tensor:
        table = g.new_zeros(num_tables * self.num_rows, g.shape[-1])
        return table.index_add_(0, rows.flatten(), g.flatten(0, 1))


def _gradients(layer: nn.Embedding, x: Tensor, g: Tensor) -> Gradients:
    tokens, g = x.reshape(len(x), -1), g.reshape(len(x), -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        g = g.masked_fill((tokens == layer.padding_idx)[:, :, None], 0)

    def dense(tokens: Tensor, g: Tensor) -> Tensor:
        return _Lookup(tokens, g, layer.num_embeddings).dense()

    def weight(selection: Selection) -> Options:
        numel = layer.weight.numel()
        rows = {"rows": lambda: blockwise(selection, dense, (tokens, g), numel)}
        if selection.index is not None:
            return rows
        gram = {"gram": lambda: Gram(_Lookup(tokens, g, layer.num_embeddings))}
        return gram if numel > ROWS_PER_SIGNAL * g.shape[1:].numel() else {**gram, **rows}

    return {"weight": weight}


EMBEDDING = Rule(nn.Embedding, lambda layer: 1, _gradients)
