"""What the callback refuses before the first step, in one message, and what it lets run."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from toys import Plain, loader, private, records, trainer
from tptopk_pl.callback.refusals import of_optimizers, of_trainer


def refusal(module: Any = None, data: Any = None, callback: Any = None, **options: Any) -> str:
    callback = callback or private()
    others = options.pop("callbacks", [])
    with pytest.raises((MisconfigurationException, ValueError)) as caught:
        trainer(callback, *others, **options).fit(
            module or Plain(), loader() if data is None else data
        )
    assert callback.step == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gradient_clip_val": 0.5}, "gradient_clip_val=0.5"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"callbacks": [LearningRateFinder()]}, "LearningRateFinder"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, "GradientAccumulationScheduler"),
        ({"module": Plain(schedule=False), "max_epochs": -1}, "max_epochs or max_steps"),
    ],
)
def test_trainer_options(options: dict[str, Any], name: str) -> None:
    """Each would be a silent no-op, or break the accounting."""
    assert name in refusal(**options)


def test_refusals_that_lightning_would_preempt_on_the_cpu() -> None:
    """A float16 scaler skips steps by the data; a batch size finder trains uncounted."""
    fitted = trainer(BatchSizeFinder())
    fitted.strategy.precision_plugin.precision = "16-mixed"
    found = "".join(of_trainer(fitted, Plain()))
    assert "16-mixed" in found
    assert "BatchSizeFinder" in found


def test_all_refusals_come_in_one_message() -> None:
    """An edit for each."""
    module = Plain()
    module.network[1] = nn.BatchNorm2d(4)
    module.automatic_optimization = False
    weighted = loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 120, 120))
    message = refusal(module, weighted, overfit_batches=4, callbacks=[LearningRateFinder()])
    words = "network.1", "ModuleValidator.fix", "overfit_batches", "Finder", "Manual", "Weighted"
    for name in words:
        assert name in message


def test_batch_norm_names_the_conversion_that_works() -> None:
    """The printed line converts the network."""
    module = Plain()
    module.network[1] = nn.BatchNorm2d(4)
    message = refusal(module)
    assert "network.1 (BatchNorm2d)" in message
    assert "ModuleValidator.fix" in message
    module.network = ModuleValidator.fix(module.network)
    callback = private()
    trainer(callback).fit(module, loader())
    assert callback.step == 20


def test_batch_norm_is_refused_without_parameters_too() -> None:
    """It mixes examples all the same."""
    module = Plain()
    module.network[1] = nn.BatchNorm2d(4, affine=False)
    assert "network.1 (BatchNorm2d)" in refusal(module)


def test_strategies_whose_accounting_would_be_lost_are_refused() -> None:
    """Children of a spawn take the callback's state with them."""
    for name in ("ddp_spawn", "ddp_fork"):
        fitted = trainer(strategy=name, devices=2)
        assert "child processes" in "".join(of_trainer(fitted, Plain()))


def test_data_that_are_empty_or_name_units_by_a_method() -> None:
    """One line each."""
    assert "data set is empty" in refusal(data=loader(records(n=0), shuffle=False))

    class Method(TensorDataset):
        def privacy_units(self) -> list[int]:
            return [0]

    assert "privacy_units is a method" in refusal(data=loader(Method(*records().tensors)))


def test_running_statistics_are_refused() -> None:
    """In a buffer of a known layer, or of one's own."""
    module = Plain()
    module.network[1] = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    assert "track_running_stats=False" in refusal(module)

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
            return x

    module = Plain()
    module.network[1] = Running()
    assert "Buffer network.1.mean" in refusal(module)
    module = Plain()
    module.accuracy.persistent(True)
    assert "accuracy (BinaryAccuracy)" in refusal(module)


class Scale(nn.Module):
    """A leaf of one's own: it has a forward, so its parameter is in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_bare_parameters_are_refused_by_name() -> None:
    """On the LightningModule itself, or beside submodules."""

    class Bare(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(2))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.network(images) + self.token

    assert "token" in refusal(Bare())
    module = Plain()
    module.network[1] = Scale()
    callback = private()
    trainer(callback).fit(module, loader())
    assert callback.step == 20


def test_functional_use_of_a_weight_is_refused_by_name() -> None:
    """Its gradient would silently be lost."""

    class Functional(Plain):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores = self.network(images)
            return scores + F.linear(scores, self.network[4].weight[:, :2])

    assert "network.4.weight" in refusal(Functional())


def test_several_optimizers_lbfgs_and_strangers() -> None:
    """One first-order optimizer over the module's own parameters."""

    class Stranger(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)

    both = [torch.optim.SGD(Plain().parameters(), lr=0.1)] * 2
    assert "one optimizer, got 2" in of_optimizers(both, Plain())[0]
    assert "LBFGS" in refusal(Plain("LBFGS", schedule=False))
    assert "SparseAdam" in refusal(Plain("SparseAdam", schedule=False))
    assert "1 parameters of the optimizer" in refusal(Stranger())


def test_an_optimizer_that_evaluates_twice_is_stopped() -> None:
    """The second evaluation would release the batch again."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    class Sharp(Plain):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="several times"):
        trainer(private()).fit(Sharp(), loader())


def test_samplers_are_refused() -> None:
    """The rate would not be the one that is accounted for."""
    weighted = WeightedRandomSampler([1.0] * 120, 120)
    assert "WeightedRandomSampler" in refusal(data=loader(shuffle=False, sampler=weighted))
    batches = [[i, i + 1] for i in range(0, 120, 2)]
    assert "batch_sampler" in refusal(data=DataLoader(records(), batch_sampler=batches))
    assert "one training DataLoader" in refusal(data={"a": loader(), "b": loader()})


def test_a_monitor_of_a_training_value_is_refused() -> None:
    """It would make the choice of checkpoint a function of raw training data."""
    for watcher in (
        ModelCheckpoint(monitor="train_loss_epoch"),
        EarlyStopping(monitor="train_acc"),
    ):
        message = refusal(callbacks=[watcher], enable_checkpointing=True)
        assert watcher.monitor in message  # type: ignore[operator]
        assert "validation metric" in message

    class Plateau(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"},
            }

    assert "ReduceLROnPlateau monitors 'train_loss'" in refusal(Plateau())


def test_layers_of_several_kinds_are_refused_in_one_message() -> None:
    """What the engine cannot serve beside BatchNorm, which is named once, and a Trainer option."""
    module = Plain()
    module.norm = nn.BatchNorm2d(4)
    module.recurrent = nn.LSTM(4, 2)
    message = refusal(module, gradient_clip_val=1.0)
    assert message.count("BatchNorm mixes") == 1 and message.count("ModuleValidator.fix") == 1
    assert "opacus.layers.DPLSTM" in message
    assert "gradient_clip_val" in message
    del module.norm
    assert "opacus.layers.DPLSTM" in refusal(module)


def test_what_works(tmp_path: Any) -> None:
    """Callbacks on released values and validation metrics; a logger that is not TensorBoard."""
    callback = private(metrics="classification")
    fitted = trainer(
        callback,
        ModelCheckpoint(tmp_path / "best", monitor="val_loss"),
        EarlyStopping(monitor="val_loss", patience=50),
        LearningRateMonitor(),
        EMAWeightAveraging(decay=0.9),
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        max_epochs=3,
        limit_train_batches=5,
        val_check_interval=2,
    )
    fitted.fit(Plain(), loader())
    assert callback.step == 15
    assert {"val/auroc", "val/recall", "val/accuracy", "privacy/epsilon"} <= set(
        fitted.callback_metrics
    )
    header = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().split()[0]
    assert "privacy/epsilon" in header
    assert "privacy/phase" in header
    assert "train" not in header


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"active_ratio": 1.5}, "Expected active_ratio=1.5 in (0, 1]."),
        ({"active_ratio": 0}, "active_ratio=0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm=inf"),
        ({"method": "tptopk"}, "method="),
        ({"selector": "best"}, "selector="),
        ({"noise_multiplier": None}, "exactly one of"),
        ({"noise_multiplier": -0.1}, "noise_multiplier=-0.1"),
        ({"noise_multiplier": None, "target_epsilon": 0.0}, "target_epsilon=0.0"),
        ({"target_delta": 1.0}, "target_delta=1.0"),
        ({"warmup_fraction": 0.0}, "warmup_fraction=0.0"),
        ({"warmup_steps": 0}, "warmup_steps=0"),
        ({"expected_batch_size": 0}, "expected_batch_size=0"),
        ({"physical_batch_size": 2.5}, "physical_batch_size=2.5"),
        ({"noise_multiplier_ratio": 0.0}, "noise_multiplier_ratio=0.0"),
        ({"phase2_lr_factor": -2.0}, "phase2_lr_factor=-2.0"),
        ({"metrics": "everything"}, "metrics="),
    ],
)
def test_keywords_are_checked_at_once(kwargs: dict[str, Any], message: str) -> None:
    """The field, the value, and what is allowed; before any data are loaded."""
    with pytest.raises(ValueError) as caught:
        private(**kwargs)
    assert message in str(caught.value)


def test_values_that_only_the_data_can_refute() -> None:
    """B > N, a warm-up as long as the run, a support of no coordinate."""
    assert "expected_batch_size=121" in refusal(callback=private(expected_batch_size=121))
    assert "warmup_steps=50" in refusal(callback=private(warmup_steps=50))
    assert "active_ratio=0.001" in refusal(callback=private(active_ratio=0.001))
