"""Metrics of validation and test steps, against numbers worked by hand."""

import math
from typing import Any

import pytest
import torch
from torchmetrics import MeanSquaredError, MetricCollection

from tptopk_pl.metrics import StepMetrics

# Three classes, six records; predicted classes 0 0 1 2 2 1.
SCORES = torch.tensor(
    [
        [0.8, 0.1, 0.1],
        [0.6, 0.3, 0.1],
        [0.1, 0.7, 0.2],
        [0.2, 0.2, 0.6],
        [0.3, 0.2, 0.5],
        [0.3, 0.4, 0.3],
    ]
)
CLASSES = torch.tensor([0, 1, 1, 2, 2, 2])


def values_of(*batches: dict[str, Any]) -> dict[str, float]:
    metrics = StepMetrics("classification")
    for batch in batches:
        metrics.update(batch)
    return {name: float(value) for name, value in metrics.compute_and_reset().items()}


def test_binary_scores() -> None:
    """Positives .9 .4, negatives .6 .2 .1.

    At threshold 0.5: .9 found, .4 missed, .6 wrong: accuracy 3/5, recall 1/2.
    AUC: of the 6 pairs only (.4, .6) is in the wrong order: 5/6.
    Precision at each positive found, in order: 1/1 and 2/3: mean 5/6.
    """
    preds = torch.tensor([0.9, 0.4, 0.6, 0.2, 0.1])
    target = torch.tensor([1, 1, 0, 0, 0])
    assert values_of({"preds": preds, "target": target}) == pytest.approx(
        {"accuracy": 3 / 5, "recall": 1 / 2, "auroc": 5 / 6, "average_precision": 5 / 6}
    )


def test_scores_of_several_classes_over_several_batches() -> None:
    """Right: records 0, 2, 3, 4: accuracy 4/6. Recalls 1/1, 1/2, 2/3: mean 13/18.

    AUC of class 0: its .8 above all: 1. Class 1: .3 .7 against .1 .2 .2 .4: 7 of 8 pairs.
    Class 2: .6 .5 .3 against .1 .1 .2: all 9. Mean (1 + 7/8 + 1)/3.
    Average precision of class 1: .7 found at 1/1, then .4, .3 (two of three): 1/2 + 1/2 · 2/3.
    """
    halves = [{"preds": SCORES[part], "target": CLASSES[part]} for part in ([0, 3, 4], [1, 2, 5])]
    assert values_of(*halves) == pytest.approx(
        {
            "accuracy": 4 / 6,
            "recall": 13 / 18,
            "auroc": (1 + 7 / 8 + 1) / 3,
            "average_precision": (1 + 5 / 6 + 1) / 3,
        }
    )


def test_compute_starts_anew() -> None:
    metrics = StepMetrics("classification")
    metrics.update({"preds": SCORES, "target": (CLASSES + 1) % 3})
    metrics.compute_and_reset()
    metrics.update({"preds": torch.eye(3), "target": torch.arange(3)})
    assert float(metrics.compute_and_reset()["accuracy"]) == 1.0


def test_a_collection_of_the_users_own() -> None:
    metrics = StepMetrics(MetricCollection({"mse": MeanSquaredError()}))
    metrics.update({"preds": torch.ones(2, requires_grad=True), "target": torch.zeros(2), "x": 1})
    assert float(metrics.compute_and_reset()["mse"]) == 1.0


def test_nothing_seen_is_nothing_measured() -> None:
    assert StepMetrics("classification").compute_and_reset() == {}


@pytest.mark.parametrize("outputs", [None, torch.zeros(1), {"preds": SCORES}, {"loss": 0.0}])
def test_steps_that_return_no_predictions_are_refused_with_the_edit(outputs: Any) -> None:
    with pytest.raises(ValueError, match=r'return \{"preds": \.\.\., "target": \.\.\.\}'):
        StepMetrics("classification").update(outputs)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"metrics='classify' in \{classification\}"):
        StepMetrics("classify")


@pytest.mark.filterwarnings("ignore:No positive samples:UserWarning")
@pytest.mark.filterwarnings("ignore:No negative samples in targets:UserWarning")
@pytest.mark.filterwarnings("ignore:Average precision score for one or more classes was `nan`")
def test_a_class_without_records_does_not_lower_the_area() -> None:
    """Perfect scores of classes 0 and 1 of three; with records of one class there is no area."""
    perfect = {"preds": torch.eye(3)[:2], "target": torch.arange(2)}
    assert values_of(perfect)["auroc"] == 1.0
    assert math.isnan(values_of({"preds": torch.eye(3)[:1], "target": torch.arange(1)})["auroc"])


@pytest.mark.parametrize(
    "batch",
    [
        {"preds": torch.rand(4, 1), "target": torch.ones(4, dtype=torch.int64)},
        {"preds": torch.tensor([0, 1, 2]), "target": torch.tensor([0, 1, 2])},
        {"preds": torch.rand(3, 2), "target": torch.tensor([0, 1, 2])},
        {"preds": torch.rand(3, 2), "target": torch.rand(3)},
        {"preds": torch.rand(3, 2, 2), "target": torch.tensor([0, 1, 1])},
    ],
    ids=["one column", "class ids", "few columns", "float targets", "three dimensions"],
)
def test_outputs_that_do_not_fit_are_named(batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"metrics='classification' cannot use preds \("):
        values_of(batch)
