"""Watching the losses and tables that a training step uses: what values they take.

A loss tells how many classes there are wherever the head stands, which labels it ignores, and
whether it averages with weights that depend on the others' labels.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

IGNORED_LABEL = -100  # torch's default ignore_index
RETURN_LOSSES = 'return {"loss": losses.mean(), "losses": losses} with losses of shape [n]'


class LossWatch(TorchFunctionMode):
    """Within: notes calls of torch's losses and embeddings.

    It raises where a value is out of range: on a GPU, torch would end the process.

    Attributes:
        num_classes: of every cross-entropy.
        num_rows: of every embedding table.
        padding: the tables' padding indices.
        ignored: every ``ignore_index`` other than torch's default.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_classes: set[int] = set()
        self.num_rows: set[int] = set()
        self.padding: set[int] = set()
        self.ignored: set[int] = set()
        self._weighted: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Look at the arguments, then call."""
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            self._see_loss(**_arguments(func, args, kwargs))
        elif func is F.embedding:
            self._see_table(**_arguments(func, args, kwargs))
        elif func is F.binary_cross_entropy:
            _check("Probability", _arguments(func, args, kwargs)["input"], 0, 1)
        return func(*args, **kwargs)

    def couplings(self, num_records: int) -> list[str]:
        """A sentence for each loss that averages records with weights of their labels.

        With a call for each record, every mean is over one record, and all is well.
        """
        if len(self._weighted) >= num_records:
            return []
        return [
            f"Cross-entropy with {what} divides by a sum over the batch's labels, so that one "
            f'label changes every example\'s gradient: use reduction="none" and {RETURN_LOSSES}.'
            for what in dict.fromkeys(self._weighted)
        ]

    def _see_loss(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        reduction: str,
        **_: Any,
    ) -> None:
        classes = input.shape[min(1, input.ndim - 1)]
        self.num_classes.add(classes)
        if target.is_floating_point():  # probabilities: the mean is over records
            return
        _check("Label", target[target != ignore_index], 0, classes - 1)
        if ignore_index != IGNORED_LABEL:
            self.ignored.add(ignore_index)
        if reduction != "mean":
            return
        if weight is not None and not bool((weight == weight[0]).all()):
            self._weighted.append("class weights")
        if ignore_index != IGNORED_LABEL:
            self._weighted.append(f"ignore_index={ignore_index}")

    def _see_table(self, input: Tensor, weight: Tensor, padding_idx: int | None, **_: Any) -> None:
        self.num_rows.add(len(weight))
        if padding_idx is not None:
            self.padding.add(padding_idx % len(weight))
        _check("Index", input, 0, len(weight) - 1)


def _arguments(func: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _check(what: str, values: Tensor, low: int, high: int) -> None:
    if not bool(((values >= low) & (values <= high)).all()):
        raise IndexError(f"{what} outside [{low}, {high}]")


def ignored_places(batch: Any, num_records: int) -> list[int]:
    """Records of a batch with an ignored label, in a tensor that has one number a record."""
    return [
        place
        for leaf in tree_leaves(batch)
        if isinstance(leaf, Tensor) and leaf.shape == (num_records,)
        for place in (leaf == IGNORED_LABEL).nonzero().flatten().tolist()
    ]
