"""Who is measured: plain SGD, Opacus in two ways, and this library in each of its phases.

All train the same network on the same loss and optimizer; the private ones clip to 1 and add noise
of multiplier 1, in batches of exactly B records.
"""

import re

import torch
from lightning.pytorch import LightningModule
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from benchmarks.networks import NUM_CLASSES, Workload
from models import ClassificationModule
from tptopk_pl import TwoPhaseSupportCallback
from tptopk_pl.rng import Stream

CONTENDERS = ("sgd", "opacus_hooks", "opacus_ghost", "phase1", "phase2_10", "phase2_1")
WARMUP_STEPS = 2  # of phase 2's contenders
_PHASE2 = re.compile(r"phase2_(\d+(?:\.\d+)?)")
_LR = 0.01
_NOISE_MULTIPLIER = _MAX_GRAD_NORM = 1.0


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """``num_steps * batch_size`` records of which only a batch is held: record i is ``i % B``."""

    def __init__(self, workload: Workload, batch_size: int, num_steps: int) -> None:
        self._inputs = workload.inputs(batch_size)
        self._targets = torch.randint(NUM_CLASSES, (batch_size,))
        self._length = num_steps * batch_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        held = index % len(self._targets)
        return self._inputs[held], self._targets[held]


class OpacusHooks(ClassificationModule):
    """Opacus that holds the gradient of every record."""

    def __init__(self, network: nn.Module, batch_size: int) -> None:
        super().__init__(GradSampleModule(network), _LR)
        self._batch_size = batch_size

    def configure_optimizers(self) -> Optimizer:
        """The same SGD in Opacus' wrapper."""
        return DPOptimizer(
            super().configure_optimizers(),
            noise_multiplier=_NOISE_MULTIPLIER,
            max_grad_norm=_MAX_GRAD_NORM,
            expected_batch_size=self._batch_size,
        )


class OpacusGhost(ClassificationModule):
    """Opacus that computes norms first, and the clipped sum in a second backward pass."""

    def __init__(self, network: nn.Module, batch_size: int) -> None:
        wrapped = GradSampleModuleFastGradientClipping(network, max_grad_norm=_MAX_GRAD_NORM)
        super().__init__(wrapped, _LR)
        self._batch_size = batch_size
        self.automatic_optimization = False  # its backward pass is two

    def configure_optimizers(self) -> Optimizer:
        """The same SGD in Opacus' wrapper, and the loss that goes with it."""
        optimizer = DPOptimizerFastGradientClipping(
            super().configure_optimizers(),
            noise_multiplier=_NOISE_MULTIPLIER,
            max_grad_norm=_MAX_GRAD_NORM,
            expected_batch_size=self._batch_size,
        )
        self._criterion = DPLossFastGradientClipping(self.network, optimizer, nn.CrossEntropyLoss())
        return optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """One step by hand."""
        inputs, targets = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self._criterion(self(inputs), targets).backward()
        optimizer.step()


def checked(name: str) -> str:
    """The name, if it is one of `CONTENDERS` or ``phase2_<per cent of the coordinates>``.

    Raises:
        ValueError: if it is neither.
    """
    if name in CONTENDERS or _PHASE2.fullmatch(name):
        return name
    raise ValueError(
        f"Expected contender={name!r} in {{{', '.join(CONTENDERS)}, phase2_<per cent>}}."
    )


def build(
    name: str, network: nn.Module, batch_size: int, num_steps: int
) -> tuple[LightningModule, TwoPhaseSupportCallback | None]:
    """The module to fit, and the callback if the contender is this library.

    Args:
        name: of the contender.
        network: what to train.
        batch_size: B.
        num_steps: T.

    Raises:
        ValueError: if there is no such contender.
    """
    if name == "opacus_hooks":
        return OpacusHooks(network, batch_size), None
    if name == "opacus_ghost":
        return OpacusGhost(network, batch_size), None
    module = ClassificationModule(network, _LR)
    if name == "sgd":
        return module, None
    if name == "phase1":
        return module, _callback(batch_size, warmup_steps=num_steps)
    match = _PHASE2.fullmatch(checked(name))
    assert match is not None
    ratio = float(match[1]) / 100
    return module, _callback(batch_size, warmup_steps=WARMUP_STEPS, active_ratio=ratio)


def _callback(batch_size: int, **options: float) -> TwoPhaseSupportCallback:
    return TwoPhaseSupportCallback(
        noise_multiplier=_NOISE_MULTIPLIER,
        target_delta=1e-5,
        expected_batch_size=batch_size,
        physical_batch_size=batch_size,
        max_grad_norm=_MAX_GRAD_NORM,
        **options,
    )


def loader(workload: Workload, batch_size: int, num_steps: int) -> DataLoader:
    """An epoch of all steps, in shuffled batches."""
    dataset = Repeated(workload, batch_size, num_steps)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def fix_batch_sizes() -> None:
    """Give every Poisson draw of this process its mean size, so that all step on B records.

    A draw costs what it costs: only the number that it drew is replaced.
    """
    binomial = Stream.binomial

    def mean(self: Stream, trials: int, probability: float) -> int:
        binomial(self, trials, probability)
        return round(trials * probability)

    Stream.binomial = mean  # type: ignore[method-assign]
