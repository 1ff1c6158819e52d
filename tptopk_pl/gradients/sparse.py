"""Supports as sparse matrices, for products that visit the active coordinates alone."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from tptopk_pl.gradients.contributions import Rows, Selection, block_size, blocks
from tptopk_pl.gradients.correlation import Correlation


def csr_pattern(
    selection: Selection, dtype: torch.dtype, copies: int = 1, groups: int = 1
) -> Tensor:
    """The mask of a parameter ``[rows, ...]`` as a sparse matrix of ones.

    Args:
        selection: of ``k`` active coordinates.
        dtype: of the ones.
        copies: how often the mask stands on the diagonal, one block for each record.
        groups: of rows, each with columns of its own.

    Returns:
        CSR ``[copies·rows, copies·groups·columns]`` with ``copies·k`` entries, each copy's in the
        order of the index.
    """
    num_rows, num_columns = selection.shape[0], selection.shape[1:].numel()

    def make(index: Tensor) -> Tensor:
        row, column = index // num_columns, index % num_columns
        column = column + row // (num_rows // groups) * num_columns
        counts = torch.bincount(row, minlength=num_rows).repeat(copies)
        shift = groups * num_columns * torch.arange(copies, device=index.device)
        return _csr(
            torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            (column + shift[:, None]).flatten(),
            torch.ones(copies * len(index), dtype=dtype, device=index.device),
            (copies * num_rows, copies * groups * num_columns),
        )

    return selection.derived(("csr", dtype, copies, groups), make)


def sparse_rows(correlation: Correlation, selection: Selection) -> Rows:
    """Rows ``[n, k]`` of a correlation's gradient, by sparse products over unfolded windows."""
    n, k, groups = len(correlation), selection.num_active, correlation.groups
    rows = correlation.small.new_empty(n, k)
    elements = max(correlation.pairs_per_record(), k)
    size = min(block_size(elements, rows.device), n)
    whole = csr_pattern(selection, rows.dtype, size, groups)
    for block in blocks(n, elements, rows.device):
        b = block.stop - block.start
        small, large = (matrix.flatten(0, 1) for matrix in correlation.select(block).matrices())
        pattern = whole if b == size else _first(whole, len(small), len(large), b * k)
        product = torch.sparse.sampled_addmm(pattern, small, large.T, beta=0.0)
        rows[block] = product.values().view(b, k)
    return Rows(rows)


def _first(pattern: Tensor, num_rows: int, num_columns: int, num_entries: int) -> Tensor:
    """The upper left corner of a block-diagonal pattern."""
    return _csr(
        pattern.crow_indices()[: num_rows + 1],
        pattern.col_indices()[:num_entries],
        pattern.values()[:num_entries],
        (num_rows, num_columns),
    )


def _csr(starts: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():  # torch says, once, that sparse CSR tensors are in beta state
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(starts, columns, values, size)
