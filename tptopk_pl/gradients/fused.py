"""The active coordinates' gradients in one fused loop, made by ``torch.compile``.

Coordinate (o, p) of a record's gradient is the dot product of row o of the small signal with window
p of the large one (see :class:`~tptopk_pl.gradients.correlation.Correlation`). With few active
coordinates these dot products cost less than the dense gradient, and in a fused loop (C++ on a CPU,
Triton on an accelerator) they need no unfolded copy of the input. Where no such loop can be made, a
sparse product takes its place.

Legend: ``n`` records, ``k`` active coordinates; ``*S``, ``*L`` extents of the two signals.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from math import prod
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor

from tptopk_pl.gradients.contributions import Rows, Selection, block_size
from tptopk_pl.gradients.correlation import Correlation
from tptopk_pl.gradients.sparse import sparse_rows

_logger = logging.getLogger("tptopk_pl")

# On a CPU the innermost loop is to fill vector registers: it runs over positions if a row has this
# many of them, else over as many records.
_VECTOR = 16

# Each loop takes seconds to make: inputs of ever new sizes must not go on making them.
_MAX_LOOPS = 32

_failed = False


class _TooManyLoopsError(Exception):
    """Inputs come in ever new sizes."""


def fused_rows(correlation: Correlation, selection: Selection) -> Rows:
    """Rows ``[n, k]`` of a correlation's gradient."""
    global _failed
    if not _failed and len(correlation) > 0 and selection.num_active > 1:
        try:
            return Rows(_fused(correlation, selection))
        except torch.OutOfMemoryError:
            raise
        except _TooManyLoopsError:
            pass
        except Exception as error:
            _failed = True
            reason = str(error).strip().splitlines() or [type(error).__name__]
            _logger.warning(
                "torch.compile cannot make the loops that are fastest for few coordinates (%s): "
                "phase 2 goes on without them.",
                reason[0],
            )
    return sparse_rows(correlation, selection)


def _fused(correlation: Correlation, selection: Selection) -> Tensor:
    n, small, extents = len(correlation), correlation.small, tuple(correlation.reach())
    row, offset = selection.derived(("places", extents), correlation.places)
    torch._dynamo.mark_dynamic(row, 0)
    torch._dynamo.mark_dynamic(offset, 0)
    steps = [stride * prod(extents[i + 1 :]) for i, stride in enumerate(correlation.stride)]
    over_records = small.device.type == "cpu" and small.shape[-1] < _VECTOR
    run = _over_records if over_records else _over_positions
    # In blocks, so that the padded copies are made in memory that is at hand.
    elements = correlation.large.shape[1] * prod(extents)
    size = _VECTOR if over_records else block_size(elements, small.device)
    rows = small.new_empty(n, len(row))
    for start in range(0, n, size):
        block = slice(start, min(start + size, n))
        part = correlation.select(block)
        rows[block] = run(part.padded().contiguous(), part.small.contiguous(), row, offset, steps)
    return rows


def _over_positions(
    large: Tensor, small: Tensor, row: Tensor, offset: Tensor, steps: list[int]
) -> Tensor:
    """``large`` ``[n, C, *L]``, ``small`` ``[n, c, *S]`` to ``[n, k]``."""
    n, size, extents = len(large), large[0].numel(), small.shape[2:]
    if n == 1:  # the compiler takes a 1 for a constant
        large, small = torch.cat([large, large]), torch.cat([small, small])
    shape = (len(large), size - _last(extents, steps), *extents)
    windows = large.as_strided(shape, (size, 1, *steps))
    torch._dynamo.mark_dynamic(small, 0)
    torch._dynamo.mark_dynamic(windows, 0)
    loop = _loop(_positions, small.shape[1:], large.shape[1:], *steps, small.dtype)
    return loop(small, windows, row, offset)[:n]


def _over_records(
    large: Tensor, small: Tensor, row: Tensor, offset: Tensor, steps: list[int]
) -> Tensor:
    """The same for up to as many records as fill a vector."""
    n, size, extents = len(large), large[0].numel(), small.shape[2:]
    fill = (0, _VECTOR - n)
    large_last = F.pad(large.flatten(1).T, fill).contiguous()
    small_last = F.pad(small.movedim(0, -1), fill).contiguous()
    shape = (size - _last(extents, steps), *extents, _VECTOR)
    windows = large_last.as_strided(shape, (_VECTOR, *(_VECTOR * step for step in steps), 1))
    loop = _loop(_records, small.shape[1:], large.shape[1:], *steps, small.dtype)
    return loop(small_last, windows, row, offset).T[:n]


def _last(extents: Sequence[int], steps: Sequence[int]) -> int:
    """Offset of a window's last element from its first."""
    return sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))


def _positions(small: Tensor, windows: Tensor, row: Tensor, offset: Tensor) -> Tensor:
    """``[n, c, *S]`` and ``[n, offsets, *S]`` to ``[n, k]``."""
    return (small[:, row] * windows[:, offset]).sum(tuple(range(2, small.ndim)))


def _records(small: Tensor, windows: Tensor, row: Tensor, offset: Tensor) -> Tensor:
    """``[c, *S, n]`` and ``[offsets, *S, n]`` to ``[k, n]``."""
    return (small[row] * windows[offset]).sum(tuple(range(1, small.ndim - 1)))


@cache
def _loop(expression: FunctionType, *geometry: Hashable) -> Callable[..., Tensor]:
    """``expression`` compiled for signals of one geometry and any number of coordinates.

    The compiler counts recompilations by code object, so each geometry gets a copy of its own.
    """
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        raise ValueError("it is switched off in the environment")
    if _loop.cache_info().currsize >= _MAX_LOOPS:
        raise _TooManyLoopsError
    own = FunctionType(expression.__code__.replace(), expression.__globals__)
    # No pool of processes for one small loop.
    return torch.compile(own, fullgraph=True, options={"compile_threads": 1})
