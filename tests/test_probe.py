"""The probe for coupled examples: what it refuses, what it lets pass, what it leaves behind."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import default_collate

from toys import Plain, loader, private, records, trainer
from tptopk_pl.gradients import GradientEngine


class Loss(Plain):
    """A module with another loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return self.loss(self(images), labels)


def fit(module: Any, data: Any = None, **options: Any) -> Any:
    callback = private(**options)
    trainer(callback).fit(module, data or loader())
    return callback


WEIGHTS = torch.tensor([1.0, 3.0])
COUPLED = {
    "sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "class weights": lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS),
    "ignored label": lambda z, y: F.cross_entropy(z, y, ignore_index=1),
    "batch statistics": lambda z, y: F.cross_entropy(z - z.mean(0), y),
    "max": lambda z, y: F.cross_entropy(z, y, reduction="none").max(),
    "pairs": lambda z, y: (z @ z.T).square().mean(),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_coupled_losses_are_refused(kind: str) -> None:
    """With the way out in the message."""
    with pytest.raises(MisconfigurationException, match="One example's gradient") as caught:
        fit(Loss(COUPLED[kind]))
    assert '{"loss": losses.mean(), "losses": losses}' in str(caught.value)


def test_class_weights_with_losses_of_each_record_are_allowed() -> None:
    """The mean over records is then explicit."""

    def losses(z: Tensor, y: Tensor) -> Any:
        each = F.cross_entropy(z, y, weight=WEIGHTS, reduction="none")
        return {"loss": each.mean(), "losses": each}

    assert fit(Loss(losses)).step == 20


INDEPENDENT = {
    "mean": F.cross_entropy,
    "label smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "constant factor": lambda z, y: 3 * F.cross_entropy(z, y),
    "several terms": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(),
}


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_independent_losses_pass(kind: str) -> None:
    """And the result is worded as what it is."""
    callback = fit(Loss(INDEPENDENT[kind]))
    assert callback.step == 20
    assert callback.probe_result.refusals == []


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.5), nn.RReLU()])
def test_random_layers_pass(layer: nn.Module) -> None:
    """Their draws differ with the batch size; that is not coupling."""
    module = Plain()
    module.network[2] = layer
    assert fit(module).step == 20


def test_records_in_the_second_dimension_are_refused() -> None:
    """Clipping would cut along the wrong dimension."""

    class Sequence(Plain):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.batch_first = batch_first
            self.network = nn.Linear(6, 6)
            self.mix = nn.Linear(6, 2)

        def forward(self, images: Tensor) -> Tensor:
            tokens = images[:, 0] if self.batch_first else images[:, 0].transpose(0, 1)
            hidden = torch.tanh(self.network(tokens))
            return self.mix(hidden.mean(1 if self.batch_first else 0))

    assert fit(Sequence(True)).step == 20
    with pytest.raises((MisconfigurationException, ValueError), match="network"):
        fit(Sequence(False))


def test_mixup_in_collate_is_refused() -> None:
    """The probe goes through the loader's own collate function."""

    def mixup(batch: Any) -> Any:
        images, labels = default_collate(batch)
        return 0.5 * images + 0.5 * images.roll(1, 0), labels

    with pytest.raises(MisconfigurationException, match="other examples"):
        fit(Plain(), loader(collate_fn=mixup))


def test_batch_statistics_in_a_transfer_hook_are_refused() -> None:
    """The probe goes through the transfer hooks."""

    class Standardizing(Plain):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            images, labels = batch
            return images - images.mean(0), labels

    with pytest.raises(MisconfigurationException, match="other examples"):
        fit(Standardizing())


def test_a_step_without_loss_is_refused() -> None:
    """Skipping by the data is not private."""
    with pytest.raises(MisconfigurationException, match="without a loss"):
        fit(Loss(lambda z, y: None))
    with pytest.raises(MisconfigurationException, match=r'"losses" of shape \(4,\)'):
        fit(Loss(lambda z, y: {"loss": z.mean(), "losses": z}))


def test_a_step_that_fails_on_one_example_is_refused() -> None:
    """Otherwise the unit of every such chunk would silently be left out."""
    squeezed = Loss(lambda z, y: F.cross_entropy(z.squeeze(), y))
    with pytest.raises(MisconfigurationException, match="batch of one example"):
        fit(squeezed)


def test_the_probe_leaves_no_trace() -> None:
    """Generators, metrics, counters, lists, gradients and train modes are as before."""

    class Counting(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.count = [], 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(len(batch[0]))
            self.count += 1
            torch.rand(1), np.random.rand()
            return super().training_step(batch, batch_idx)

    def state(module: Any) -> list[Any]:
        metric = module.accuracy
        return [
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),  # type: ignore[union-attr]
            list(module.seen),
            module.count,
            metric.update_count,
            int(metric.tp),
            [p.grad for p in module.parameters()],
            [m.training for m in module.modules()],
        ]

    class Before(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.state = state(pl_module)

    class Look(Counting):
        def on_train_start(self) -> None:
            self.state = state(self)

    before, module = Before(), Look()
    module.network[2] = nn.Dropout(0.5)
    trainer(before, private()).fit(module, loader())
    assert module.state == before.state


def test_private_data_are_not_looked_at() -> None:
    """The probe's records have the shapes of the data and none of their values."""
    seen: list[Tensor] = []

    class Look(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0].detach().clone())
            return super().training_step(batch, batch_idx)

    data = records()
    data.tensors[0].fill_(7.5)
    callback = private()
    trainer(callback, max_steps=2).fit(Look(), loader(data))
    probed = [batch for batch in seen if not (batch == 7.5).all()]
    assert len(probed) >= 4
    assert not any((batch == 7.5).any() for batch in probed)


def test_wrong_engine_gradients_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's sum is compared with autograd's for every parameter."""
    original = GradientEngine.weighted_sum
    monkeypatch.setattr(
        GradientEngine,
        "weighted_sum",
        lambda self, factors: original(self, factors).index_fill(0, torch.tensor([3]), 9.0),
    )
    with pytest.raises(MisconfigurationException, match=r"network\.0\.weight"):
        fit(Plain())
