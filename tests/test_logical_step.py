"""One logical step: a unit's fault adds nothing, takes nothing from others and ends nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tptopk_pl.callback.logical_step import LogicalStep, summed_loss
from tptopk_pl.gradients import GradientEngine
from tptopk_pl.mechanism import GaussianMechanism
from tptopk_pl.sampling import PoissonLoader, PoissonSampler
from tptopk_pl.units import PrivacyUnits

C = 1.0
N = 40
Step = Callable[[nn.Module, Any], Any]


def cross_entropy(net: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(net(batch[0]), batch[1])


def same(batch: Any) -> Any:
    return batch


class Setting:
    """Everything that a step needs, for one draw of all units at each step."""

    def __init__(
        self,
        dataset: Any,
        step: Step = cross_entropy,
        *,
        physical_batch_size: int = 64,
        to_device: Callable[[Any], Any] = same,
        net: nn.Module | None = None,
        units: list[int] | None = None,
        ignored: bool = False,
        **loading: Any,
    ) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3) if net is None else net
        engine = GradientEngine(self.net, dict(self.net.named_parameters()))
        engine.attach()
        self.num_active = engine.num_active
        self.mechanism = GaussianMechanism(1, None)
        sampler = PoissonSampler(
            PrivacyUnits(range(len(dataset)) if units is None else units),
            sampling_rate=1.0,
            steps_per_pass=4,
            physical_batch_size=physical_batch_size,
            key=bytes(32),
            next_step=lambda: 0,
            last_step=4,
        )
        self.loader = PoissonLoader(DataLoader(dataset, batch_size=8, **loading), sampler, 0)
        self.logical_step = LogicalStep(
            lambda: self.loader,
            engine,
            self.mechanism,
            training_step=lambda batch, batch_idx: step(self.net, batch),
            to_device=to_device,
            exclude_ignored_labels=ignored,
        )
        self.batches = iter(self.loader)

    def sum(self) -> Tensor:
        """The clipped sum of one step, ``[d]``."""
        next(self.batches)
        device = torch.device("cpu")
        self.mechanism.begin_step(
            0, noise_multiplier=0.0, max_grad_norm=C, num_active=self.num_active, device=device
        )
        self.logical_step.run(0, device)
        return self.mechanism.release()


def data(n: int = N, labels: dict[int, int] | None = None, nans: tuple[int, ...] = ()) -> Any:
    """``n`` units of six features and one of three labels."""
    features = torch.randn(n, 6, generator=torch.Generator().manual_seed(3))
    targets = torch.arange(n) % 3
    features[list(nans)] = float("nan")
    for unit, label in (labels or {}).items():
        targets[unit] = label
    return TensorDataset(features, targets)


def without(dataset: Any, *units: int) -> TensorDataset:
    kept = [unit for unit in range(len(dataset)) if unit not in units]
    return TensorDataset(*(tensor[kept] for tensor in dataset.tensors))


BAD_UNIT = 21


def none_for_nan(net: nn.Module, batch: Any) -> Any:
    loss = cross_entropy(net, batch)
    return loss if loss.isfinite() else None


def finite_losses(net: nn.Module, batch: Any) -> Any:
    losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
    losses = losses[losses.isfinite()]
    return {"loss": losses.mean(), "losses": losses}


def raising(error: Exception) -> Step:
    def step(net: nn.Module, batch: Any) -> Any:
        if batch[0].isnan().any():
            raise error
        return cross_entropy(net, batch)

    return step


def failing_transfer(batch: Any) -> Any:
    if batch[0].isnan().any():
        raise ValueError("cannot be augmented")
    return batch


NAN = data(nans=(BAD_UNIT,))
FAULTS: dict[str, tuple[Any, Step, Callable[[Any], Any]]] = {
    "label out of range": (data(labels={BAD_UNIT: 77}), cross_entropy, same),
    "NaN": (NAN, cross_entropy, same),
    "no loss for NaN": (NAN, none_for_nan, same),
    "losses of another length": (NAN, finite_losses, same),
    "an error of the Trainer's kind": (NAN, raising(MisconfigurationException("no")), same),
    "out of memory": (NAN, raising(torch.OutOfMemoryError("no")), same),
    "a transfer hook raises": (NAN, cross_entropy, failing_transfer),
}


@pytest.mark.parametrize("physical_batch_size", [64, 9, 1])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_faulty_unit_adds_nothing_and_takes_nothing(fault: Any, physical_batch_size: int) -> None:
    """Within its chunk, the first or a later one, and alone in it."""
    dataset, step, to_device = fault
    options = {"physical_batch_size": physical_batch_size, "to_device": to_device}
    total = Setting(dataset, step, **options).sum()
    rest = Setting(without(dataset, BAD_UNIT), step, **options).sum()
    assert rest.norm() > 5 * C  # so that a lost half would show
    torch.testing.assert_close(total, rest, rtol=1e-5, atol=1e-5)


def test_a_sound_unit_adds_at_most_the_clip_norm() -> None:
    """The comparison above can see a unit."""
    influence = (Setting(data()).sum() - Setting(without(data(), BAD_UNIT)).sum()).norm()
    assert 0.5 * C < influence <= C * (1 + 1e-5)


@pytest.mark.parametrize("bad", [(0, 1), (0, 7), (6, 7), tuple(range(7))])
def test_faulty_units_in_one_half_of_a_chunk(bad: tuple[int, ...]) -> None:
    dataset = data(8, labels=dict.fromkeys(bad, 77))
    total, rest = Setting(dataset).sum(), Setting(without(dataset, *bad)).sum()
    torch.testing.assert_close(total, rest, rtol=1e-5, atol=1e-5)


def test_all_of_a_small_chunk_may_fail() -> None:
    dataset = data(10, labels={8: 77, 9: 77})
    total = Setting(dataset, physical_batch_size=2).sum()
    rest = Setting(without(dataset, 8, 9), physical_batch_size=2).sum()
    torch.testing.assert_close(total, rest, rtol=1e-5, atol=1e-5)
    assert Setting(data(2, labels={0: 77, 1: 77})).sum().norm() == 0


@pytest.mark.parametrize("physical_batch_size", [8, 3, 1])
def test_many_units_that_all_fail_end_the_run(physical_batch_size: int) -> None:
    """Also in small chunks: a module that always fails must not train on noise alone."""
    dataset = data(9, labels=dict.fromkeys(range(9), 77))
    with pytest.raises(IndexError, match="77"):
        Setting(dataset, physical_batch_size=physical_batch_size).sum()


def test_failures_of_small_chunks_count_over_steps() -> None:
    setting = Setting(data(3, labels=dict.fromkeys(range(3), 77)))
    setting.sum()
    setting.sum()
    with pytest.raises(IndexError, match="77"):
        setting.sum()


def test_a_sound_chunk_between_ends_the_count() -> None:
    dataset = data(15, labels=dict.fromkeys([*range(7), *range(8, 15)], 77))
    assert Setting(dataset, physical_batch_size=1).sum().norm() > 0


def test_a_unit_that_succeeds_at_last_is_one_of_the_chunk_at_hand() -> None:
    """One of an earlier chunk, perhaps of an earlier step, was not drawn for this one."""
    seen: list[Tensor] = []

    def flaky(net: nn.Module, batch: Any) -> Any:
        seen.append(batch[0])
        if len(seen) <= 8:
            raise RuntimeError("not yet")
        return cross_entropy(net, batch)

    setting = Setting(data(8), flaky, physical_batch_size=1)
    assert 0 < setting.sum().norm() <= C
    assert len(seen) == 9
    assert seen[-1].equal(data(8).tensors[0][7:])


def test_a_failed_pass_holds_no_memory_while_its_halves_run() -> None:
    """Else a chunk that was too large fails again in halves."""
    failed: list[weakref.ref[Tensor]] = []

    def large(net: nn.Module, batch: Any) -> Any:
        assert all(activation() is None for activation in failed)
        scores = net(batch[0])
        if len(scores) > 2:
            failed.append(weakref.ref(scores))
            raise torch.OutOfMemoryError("too large")
        return F.cross_entropy(scores, batch[1])

    torch.testing.assert_close(Setting(data(8), large).sum(), Setting(data(8)).sum())
    assert len(failed) == 3


def test_a_weight_used_outside_its_layer_ends_the_run_at_once() -> None:
    """That is the module's doing, and part of the gradient is lost unclipped."""

    def penalized(net: Any, batch: Any) -> Any:
        return cross_entropy(net, batch) + net.weight.square().sum()

    with pytest.raises(MisconfigurationException, match=r"weight: used outside .* own layers"):
        Setting(data(2), penalized).sum()


class Texts(Dataset[Any]):
    """Tokens of 3 to 11 and a label; some are None."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.indices = list(range(N))
        self.bad = bad

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> Any:
        unit = self.indices[place]
        return None if unit in self.bad else torch.arange(1, 4 + unit % 9), unit % 3


class Bag(nn.Module):
    """Sums the embeddings of what is not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6, padding_idx=0)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).sum(1))


def padded(records: list[Any]) -> Any:
    texts = nn.utils.rnn.pad_sequence([text for text, _ in records], batch_first=True)
    return texts, torch.tensor([label for _, label in records])


def test_one_of_many_lengths_that_cannot_be_collated() -> None:
    bad, rest = Texts((BAD_UNIT,)), Texts()
    rest.indices.remove(BAD_UNIT)
    sums = []
    for dataset in (bad, rest):
        torch.manual_seed(0)
        sums.append(Setting(dataset, net=Bag(), collate_fn=padded).sum())
    assert sums[1].norm() > 5 * C
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


class Faulty(TensorDataset):
    """Two units cannot be read, one has a label out of range."""

    def __getitem__(self, index: Any) -> Any:
        features, label = super().__getitem__(index)
        if label == 99:
            raise OSError("truncated file")
        return features, label


@pytest.mark.parametrize("num_workers", [0, 2])
def test_faults_in_workers(num_workers: int) -> None:
    dataset = data(labels={0: 99, 30: 99, BAD_UNIT: 77})
    options = {"num_workers": num_workers, "physical_batch_size": 9}
    setting = Setting(Faulty(*dataset.tensors), **options)
    total = setting.sum()
    list(setting.batches)  # else ending the workers takes seconds
    rest = Setting(without(dataset, 0, 30, BAD_UNIT)).sum()
    torch.testing.assert_close(total, rest, rtol=1e-5, atol=1e-5)


def test_a_unit_fails_with_all_its_records_and_is_never_cut() -> None:
    dataset = data(12, labels={4: 77})
    units = [record // 3 for record in range(12)]  # units of three records
    total = Setting(dataset, units=units).sum()
    rest = Setting(without(dataset, 3, 4, 5), units=units[:9]).sum()
    torch.testing.assert_close(total, rest, rtol=1e-5, atol=1e-5)


def test_units_with_an_ignored_label_add_nothing() -> None:
    dataset = data(labels={BAD_UNIT: -100, 5: -100})
    total = Setting(dataset, ignored=True).sum()
    rest = Setting(without(dataset, BAD_UNIT, 5)).sum()
    torch.testing.assert_close(total, rest, rtol=1e-5, atol=1e-5)


def test_many_ignored_labels_are_no_failure() -> None:
    dataset = data(10, labels=dict.fromkeys(range(10), -100))
    assert Setting(dataset, ignored=True).sum().norm() == 0


def test_the_loader_in_use_is_asked_for_at_every_step() -> None:
    """The Trainer can make a new one for every epoch."""
    setting, other = Setting(data(8)), Setting(data(4))
    first = setting.sum()
    setting.loader, setting.batches = other.loader, other.batches
    torch.testing.assert_close(setting.sum(), Setting(data(4)).sum())
    assert not first.allclose(other.sum())


def test_no_batch_is_transferred_for_an_empty_draw() -> None:
    def transfer(batch: Any) -> Any:
        raise AssertionError("nothing to transfer")

    setting = Setting(data(8), to_device=transfer)
    setting.loader.poisson.sampling_rate = 0.0
    assert setting.sum().norm() == 0


def test_the_summed_loss_of_what_a_step_returned() -> None:
    losses = torch.tensor([1.0, 2.0, 6.0])
    assert summed_loss({"loss": losses.mean(), "losses": losses}, 3) == 9
    assert summed_loss({"loss": losses.mean()}, 3) == 9
    assert summed_loss(losses.mean().reshape(1), 3) == 9
    with pytest.raises(MisconfigurationException, match=r"shape \(4,\)"):
        summed_loss({"losses": losses}, 4)
    with pytest.raises(MisconfigurationException, match="without a loss"):
        summed_loss(None, 3)
