"""Weight gradients by record that are sums over positions: convolutions, and layers over steps.

The gradient of a record's weight correlates a *large* signal with a *small* one: for a convolution
the padded input with the output gradient, for a transposed convolution the padded output gradient
with the input, for a linear layer the input with the output gradient over its steps (a convolution
whose kernel is one point). Stride, dilation and groups mean the same in all of them.

Legend: ``n`` records; ``C``, ``c`` channels and ``*L``, ``*S`` extents of the large and the small
signal; ``S`` positions; ``*K`` the kernel's extents, ``K`` its points; ``P = C/groups·K``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

# With so few positions one product of unfolded signals is faster than a convolution's own gradient:
# 13 ms against 16 for 16 records of 512 channels at 2×2, 33 against 57 for 64 (one CPU thread).
_FEW_POSITIONS = 4


def _cut(tensor: Tensor, axis: int, part: slice) -> Tensor:
    return tensor[(slice(None),) * axis + (part,)]


@dataclass(frozen=True)
class Correlation:
    """The gradients ``Σ_s small[:, s] ⊗ window_s(large)`` of ``n`` records.

    Attributes:
        large: ``[n, C, *]``, without its zero padding.
        small: ``[n, c, *S]``.
        kernel, stride, dilation, padding: by dimension.
        groups: of channels.
    """

    large: Tensor
    small: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int = 1

    @classmethod
    def of_steps(cls, g: Tensor, x: Tensor) -> Correlation:
        """Of a linear layer over steps, from ``g`` ``[n, T, out]`` and ``x`` ``[n, T, in]``."""
        return cls(x.transpose(1, 2), g.transpose(1, 2), (1,), (1,), (1,), (0,))

    def __len__(self) -> int:
        return len(self.small)

    @property
    def device(self) -> torch.device:
        """Where the signals are."""
        return self.small.device

    @property
    def dtype(self) -> torch.dtype:
        """The signals' own."""
        return self.small.dtype

    @property
    def num_positions(self) -> int:
        """``S``."""
        return self.small.shape[2:].numel()

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``[c, C/groups, *K]``."""
        return (self.small.shape[1], self.large.shape[1] // self.groups, *self.kernel)

    def select(self, records: Tensor | slice) -> Correlation:
        """That of some records alone."""
        return replace(self, large=self.large[records], small=self.small[records])

    def padded(self) -> Tensor:
        """``[n, C, *L]``, no larger than the windows reach."""
        padded = self.large
        if any(self.padding):
            padded = F.pad(padded, [size for size in reversed(self.padding) for _ in range(2)])
        for axis, extent in enumerate(self.reach(), start=2):
            padded = padded.narrow(axis, 0, extent)
        return padded

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Small ``[n·groups, c/groups, S]`` and unfolded large ``[n·groups, P, S]``."""
        return self._by_group(self.small), self._unfolded(0)

    def dense(self) -> Tensor:
        """The gradients ``[n, numel]``.

        Windows that lie one after the other on the first axis are parts of one signal, which is
        unfolded on the other axes alone: a kernel of 3×3 costs three copies of it, not nine.
        """
        small = self._by_group(self.small)
        if self.stride[0] > 1:
            return (small @ self._unfolded(0).transpose(1, 2)).reshape(len(self), -1)
        large, length = self._unfolded(1), small.shape[2]
        starts = [point * self.dilation[0] for point in range(self.kernel[0])]
        step = self.small.shape[3:].numel()
        products = [
            small @ large[:, :, start * step : start * step + length].transpose(1, 2)
            for start in starts
        ]
        if len(products) == 1:
            return products[0].reshape(len(self), -1)
        # [n·groups, c/groups, C/groups·K'] for each point, to [n, c, C/groups, points, K'].
        by_channel = [product.unflatten(2, (self.weight_shape[1], -1)) for product in products]
        return torch.stack(by_channel, 3).reshape(len(self), -1)

    def inner_products(self, present: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`~tptopk_pl.gradients.gram.Positions`.

        Where windows overlap, their products are sums of products between points of the large
        signal, which are computed once: ``Σ_p R[s + p, t + p]`` over the points p of the kernel.
        """
        small = self._of_units(self.small, present).double()
        of_small = small.mT @ small
        if not self._windows_overlap:
            unfolded = self._of_units(self._unfolded(0), present).double()
            return of_small, unfolded.mT @ unfolded
        large = self._of_units(self.padded(), present).double()
        dims, extents = len(self.kernel), self.reach()
        r = present.shape[1]
        points = (large.mT @ large).unflatten(3, (r, *extents))
        points = points.unflatten(2, (r, *extents))
        for axis in range(dims):
            windows = [self._window(axis, point) for point in range(self.kernel[axis])]
            rows, columns = 3 + axis, 4 + dims + axis
            parts = [_cut(_cut(points, rows, window), columns, window) for window in windows]
            points = reduce(torch.add, parts)
        return of_small, points.flatten(3 + dims).flatten(2, 2 + dims)

    def total(self, factors: Tensor) -> Tensor:
        """Their sum, weighted by ``factors`` ``[n]``: ``[numel]``."""
        factors = factors.to(self.small.dtype)
        if self._over_steps:  # one product over all of them
            g, x = self.small.transpose(1, 2), self.large.transpose(1, 2)
            return ((g * factors[:, None, None]).flatten(0, 1).T @ x.flatten(0, 1)).flatten()
        if self.num_positions <= _FEW_POSITIONS and self.groups == 1:
            small, large = self.matrices()
            weighted = small * factors[:, None, None]
            return (weighted.transpose(0, 1).flatten(1) @ large.mT.flatten(0, 1)).flatten()
        dims, large, padding = len(self.kernel), self.large, self.padding
        if not self._fits():
            large, padding = self.padded(), (0,) * dims
        gradients = torch.ops.aten.convolution_backward(
            self.small * factors.view(-1, *[1] * (dims + 1)),
            large,
            self.small.new_empty(self.weight_shape),
            None,
            self.stride,
            padding,
            self.dilation,
            False,
            (0,) * dims,
            self.groups,
            (False, True, False),
        )
        gradient: Tensor = gradients[1]
        return gradient.flatten()

    @property
    def _over_steps(self) -> bool:
        same = self.kernel == (1,) and self.large.shape[2:] == self.small.shape[2:]
        return same and self.padding == (0,) and self.groups == 1

    @property
    def _windows_overlap(self) -> bool:
        """Whether there are fewer products between points than between the windows' points."""
        return prod(self.reach()) ** 2 < prod(self.kernel) * self.num_positions**2

    def _fits(self) -> bool:
        """Whether the large signal has no more windows than the small one has positions."""
        return all(
            (extent + 2 * padding - reach) < stride
            for extent, padding, reach, stride in zip(
                self.large.shape[2:], self.padding, self.reach(), self.stride, strict=True
            )
        )

    def elements_per_record(self) -> int:
        """Size of the largest temporary of :meth:`dense` for one record."""
        channels, extents = self.large.shape[1], self.reach()
        unfolded = channels * prod(self.kernel) * self.num_positions
        if self.stride[0] == 1:
            unfolded = unfolded * extents[0] // (self.small.shape[2] * self.kernel[0])
        return max(unfolded, prod(self.weight_shape))

    def pairs_per_record(self) -> int:
        """See :class:`~tptopk_pl.gradients.gram.Positions`."""
        if self._windows_overlap:
            points = prod(self.reach())
            return max(self.groups * points**2, self.large.shape[1] * points)
        unfolded = self.large.shape[1] * prod(self.kernel) * self.num_positions
        return max(self.groups * self.num_positions**2, unfolded)

    def places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where coordinates ``[k]`` of the weight read.

        Returns:
            The channel of the small signal, and the offset of the first window in the flattened
            ``[C, *L]``: each int64 ``[k]``.
        """
        num_rows, channels, *kernel = self.weight_shape
        row, rest = index // prod(self.weight_shape[1:]), index % prod(self.weight_shape[1:])
        channel, point = rest // prod(kernel), rest % prod(kernel)
        offset = row // (num_rows // self.groups) * channels + channel
        coordinates = torch.stack(torch.unravel_index(point, tuple(kernel)))
        for place, dilation, reach in zip(coordinates, self.dilation, self.reach(), strict=True):
            offset = offset * reach + place * dilation
        return row, offset

    def _by_group(self, signal: Tensor) -> Tensor:
        """``[n, channels, *]`` to ``[n·groups, channels/groups, points]``."""
        n, channels, *extents = signal.shape
        return signal.reshape(n * self.groups, channels // self.groups, prod(extents))

    def _unfolded(self, first: int) -> Tensor:
        """The large signal with its windows on the axes from ``first`` on laid out.

        Returns:
            ``[n·groups, C/groups·K', points]`` for ``K'`` points of the kernel on those axes.
        """
        dims = len(self.kernel)
        if prod(self.kernel[first:]) == prod(self.stride[first:]) == 1:
            return self._by_group(self.padded())
        windows = self.padded()
        for axis in range(first, dims):
            span = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            windows = windows.unfold(2 + axis, span, self.stride[axis])
            windows = windows[..., :: self.dilation[axis]]
        # [n, C, *points, *K'] to [n, C, *K', *points], the weight's own order.
        order = (0, 1, *range(2 + dims, windows.ndim), *range(2, 2 + dims))
        channels = self.weight_shape[1] * prod(self.kernel[first:])
        num_points = windows.shape[2 : 2 + dims].numel()
        return windows.permute(order).reshape(len(self) * self.groups, channels, num_points)

    def _of_units(self, signal: Tensor, present: Tensor) -> Tensor:
        """``[b·r, channels, *]`` to ``[b, groups, channels/groups, r·points]``, 0 if absent.

        Or from ``[b·r·groups, rows, points]``.
        """
        b, r = present.shape
        num_rows = signal[0].numel() * len(signal) // (b * r * self.groups)
        num_points = signal.shape[2:].numel()
        signal = signal.reshape(b, r, self.groups, num_rows // num_points, num_points)
        if r > 1:
            signal = signal.masked_fill(~present[:, :, None, None, None], 0)
        return signal.permute(0, 2, 3, 1, 4).flatten(3)

    def _window(self, axis: int, point: int) -> slice:
        """Where the windows' ``point`` lies on an ``axis`` of the large signal."""
        start, stride = point * self.dilation[axis], self.stride[axis]
        return slice(start, start + (self.small.shape[2 + axis] - 1) * stride + 1, stride)

    def reach(self) -> list[int]:
        """``*L``: how far the windows reach in each dimension."""
        return [
            (s - 1) * stride + (k - 1) * dilation + 1
            for s, k, stride, dilation in zip(
                self.small.shape[2:], self.kernel, self.stride, self.dilation, strict=True
            )
        ]
