"""The ways in which a weight's gradients by record can be had; which is fastest is measured.

They differ in time and memory, never beyond rounding in what they give. The first of each mapping
is taken unmeasured.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from tptopk_pl.gradients.contributions import Options, Rows, Selection, blocks
from tptopk_pl.gradients.correlation import Correlation
from tptopk_pl.gradients.fused import fused_rows
from tptopk_pl.gradients.gram import Gram
from tptopk_pl.gradients.outer import Outer, SparseOuter
from tptopk_pl.gradients.sparse import sparse_rows

# Ways that cost this many times the other's arithmetic are not even tried.
_HOPELESS = 8

# Rows of all coordinates may take this many times the memory of the signals they are made of.
ROWS_PER_SIGNAL = 4


def outer_options(g: Tensor, x: Tensor, selection: Selection) -> Options:
    """Of a linear layer without steps: ``g`` ``[n, out]``, ``x`` ``[n, in]``."""
    if selection.index is None:
        return {"outer": lambda: Outer(g, x, selection)}
    return {
        "masked": lambda: Outer(g, x, selection),
        "sparse": lambda: SparseOuter(g, x, selection),
    }


def correlation_options(correlation: Correlation, selection: Selection) -> Options:
    """Of a convolution, or of a linear layer over steps."""
    if selection.index is not None:
        return {
            "rows": lambda: dense_rows(correlation, selection),
            "sparse": lambda: sparse_rows(correlation, selection),
            "fused": lambda: fused_rows(correlation, selection),
        }
    options: Options = {
        "rows": lambda: dense_rows(correlation, selection),
        "gram": lambda: Gram(correlation),
    }
    num_weights, num_positions = prod(correlation.weight_shape), correlation.num_positions
    num_rows = correlation.weight_shape[0]
    signals = num_positions * (num_weights // num_rows + num_rows)
    # Multiplications of one record: S·weights for the rows, S·S·channels for the inner products.
    ratio = num_positions * signals / (num_positions * num_weights)
    if ratio > _HOPELESS:
        return {"rows": options["rows"]}
    held = correlation.large[0].numel() + correlation.small[0].numel()
    if ratio < 1 / _HOPELESS or num_weights > ROWS_PER_SIGNAL * held:
        return {"gram": options["gram"]}
    return options


def dense_rows(correlation: Correlation, selection: Selection) -> Rows:
    """Rows ``[n, k]``, gathered from dense gradients of a block of records at a time."""
    n = len(correlation)
    rows = correlation.small.new_empty(n, selection.num_active)
    for block in blocks(n, correlation.elements_per_record(), rows.device):
        rows[block] = selection.gather(correlation.select(block).dense())
    return Rows(rows)
