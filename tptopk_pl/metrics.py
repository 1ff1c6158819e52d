"""Metrics of validation and test steps, by torchmetrics.

>>> metrics = StepMetrics("classification")
>>> metrics.update({"preds": torch.eye(3), "target": torch.arange(3)})
>>> {name: round(float(value), 3) for name, value in metrics.compute_and_reset().items()}
{'accuracy': 1.0, 'auroc': 1.0, 'average_precision': 1.0, 'recall': 1.0}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryRecall,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassRecall,
)
from torchmetrics.utilities.data import dim_zero_cat

from tptopk_pl._validate import one_of


class PresentAUROC(MulticlassAUROC):
    """The mean of the areas of the classes that have records; NaN if no two have.

    torchmetrics counts a class without records as 0, which a small validation set would show.
    """

    def compute(self) -> Tensor:  # type: ignore[override]
        """A scalar."""
        areas: Tensor = super().compute()
        counts = torch.bincount(dim_zero_cat(self.target), minlength=self.num_classes)
        return areas[(counts > 0) & (counts < counts.sum())].mean()


def classification(preds: Tensor) -> MetricCollection:
    """Accuracy, recall, and the areas under the ROC and the precision-recall curve.

    The areas know no threshold: without them a high recall may be the threshold's doing alone.

    Args:
        preds: ``[n, c]`` scores of c classes (all but accuracy are means over the classes that
            have records; recall also counts as 0 one that was only predicted), or ``[n]`` scores
            of the positive class (accuracy and recall at threshold 0.5).

    Raises:
        ValueError: if they are neither.
    """
    if preds.ndim == 1 and preds.is_floating_point():
        return MetricCollection(
            {
                "accuracy": BinaryAccuracy(),
                "recall": BinaryRecall(),
                "auroc": BinaryAUROC(),
                "average_precision": BinaryAveragePrecision(),
            },
            compute_groups=False,
        )
    if preds.ndim != 2 or preds.shape[1] < 2:
        raise ValueError(
            f"metrics='classification' cannot use preds {tuple(preds.shape)} of {preds.dtype}: "
            "return scores [n, c] of c >= 2 classes, or [n] of the positive class."
        )
    classes = preds.shape[1]
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(classes, average="micro"),
            "recall": MulticlassRecall(classes, average="macro"),
            "auroc": PresentAUROC(classes, average="none"),
            "average_precision": MulticlassAveragePrecision(classes, average="macro"),
        },
        compute_groups=False,
    )


FACTORIES: dict[str, Callable[[Tensor], MetricCollection]] = {"classification": classification}


class StepMetrics:
    """A collection fed from step outputs ``{"preds", "target"}``.

    Args:
        metrics: a collection, or the name of a factory that makes one for the first predictions.

    Raises:
        ValueError: if the name is unknown.
    """

    def __init__(self, metrics: MetricCollection | str) -> None:
        if isinstance(metrics, str):
            one_of("metrics", metrics, FACTORIES)
        self._metrics = metrics
        self._name: str | None = None  # of the factory that made them

    @torch.no_grad()
    def update(self, outputs: Any) -> None:
        """Update from one step's output.

        Raises:
            ValueError: if the output has no ``preds`` and ``target``, or they are of other shapes
                or types than the named metrics take.
        """
        if not isinstance(outputs, Mapping) or not {"preds", "target"} <= outputs.keys():
            raise ValueError(
                'metrics needs validation_step and test_step to return {"preds": ..., "target": '
                f"...}}, got {type(outputs).__name__}: return them, or leave metrics out."
            )
        preds, target = outputs["preds"].detach(), outputs["target"]
        if isinstance(self._metrics, str):
            self._name = self._metrics
            self._metrics = FACTORIES[self._name](preds)
        try:
            self._metrics.to(preds.device).update(preds, target)
        except (RuntimeError, ValueError) as error:
            if self._name is None:  # the user's own metrics, and their own words
                raise
            raise ValueError(
                f"metrics={self._name!r} cannot use preds {tuple(preds.shape)} of {preds.dtype} "
                f"and target {tuple(target.shape)} of {target.dtype}: return scores [n, c], or "
                "[n] of the positive class, and integer targets [n]."
            ) from error

    def compute_and_reset(self) -> dict[str, Tensor]:
        """The values so far, by name; none if nothing was seen."""
        if isinstance(self._metrics, str):
            return {}
        values: dict[str, Tensor] = self._metrics.compute()
        self._metrics.reset()
        return values
