"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tptopk_pl.gradients.contributions import Contribution, Options, Selection

Gradients = Mapping[str, Callable[[Selection], Options]]


def only(make: Callable[[Selection], Contribution]) -> Callable[[Selection], Options]:
    """The options of a gradient that can be had in one way."""
    return lambda selection: {"rows": lambda: make(selection)}


@dataclass(frozen=True)
class Rule:
    """The gradients by record of one kind of layer.

    Attributes:
        kind: the class of ``torch.nn``.
        min_ndim: fewest dimensions of an input that has a dimension of records.
        gradients: ``(module, x, g)`` to the options by local parameter name, made only for the
            parameters that ask. ``x`` ``[n, ...]`` input, ``g`` ``[n, ...]`` output gradient.
        methods: those that must be ``kind``'s own.
    """

    kind: type[nn.Module]
    min_ndim: Callable[[Any], int]
    gradients: Callable[[Any, Tensor, Tensor], Gradients]
    methods: tuple[str, ...] = ("forward",)

    def serves(self, module: nn.Module) -> bool:
        """Whether ``module`` is of this kind and computes as this kind does."""
        return isinstance(module, self.kind) and all(
            getattr(type(module), name) is getattr(self.kind, name) and name not in vars(module)
            for name in self.methods
        )
