"""What would break the guarantee or silently change the method, each with the edit that helps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import LBFGS, Optimizer, SparseAdam
from torchmetrics import Metric

from tptopk_pl.gradients import layer_refusals

PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_CALLBACKS: dict[type[Callback], str] = {
    LearningRateFinder: "trains on private data without accounting",
    BatchSizeFinder: "trains on private data without accounting",
    GradientAccumulationScheduler: "splits logical batches; use physical_batch_size",
    BaseFinetuning: "changes the trained parameters in mid-run; freeze them before the fit",
    ModelPruning: "changes parameters from outside the mechanism",
    StochasticWeightAveraging: "replaces the learning rates; use EMAWeightAveraging",
}


def raise_if_any(found: Sequence[str]) -> None:
    """Raise all refusals as one message.

    Raises:
        MisconfigurationException: if there are any.
    """
    if found:
        lines = "".join(f"\n  - {sentence}" for sentence in found)
        raise MisconfigurationException(f"This run would not be private as configured:{lines}")


def of_trainer(trainer: Trainer, module: LightningModule) -> list[str]:
    """Refusals that the Trainer's options, its callbacks and the module's hooks give cause for."""
    found = []
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        found.append(
            f"Strategy {type(trainer.strategy).__name__} hides per-example gradients: use a "
            "single device or strategy='ddp'."
        )
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        found.append(
            "This strategy trains in child processes, whose accounting would be lost: use "
            "strategy='ddp'."
        )
    if getattr(trainer.strategy, "_ddp_kwargs", {}).get("static_graph"):
        found.append("static_graph=True all-reduces raw gradients: remove it.")
    if trainer.accumulate_grad_batches != 1:
        found.append(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} would release several "
            "noisy gradients as one: remove it and set expected_batch_size and "
            "physical_batch_size."
        )
    if trainer.gradient_clip_val:
        found.append(
            f"gradient_clip_val={trainer.gradient_clip_val} would clip the noised gradient, not "
            "those of the units: remove it, max_grad_norm does this."
        )
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        found.append("overfit_batches replaces Poisson sampling by a fixed subset: remove it.")
    if trainer.precision not in PRECISIONS:
        found.append(
            f"precision={trainer.precision!r} is not supported (float16 scales gradients and skips "
            f"steps by the data): use one of {', '.join(PRECISIONS)}."
        )
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        found += [
            f"{type(callback).__name__} {why}: remove it."
            for kind, why in _CALLBACKS.items()
            if isinstance(callback, kind)
        ]
    return found + _of_hooks(module)


def _of_hooks(module: LightningModule) -> list[str]:
    found = []
    if not module.automatic_optimization:
        found.append("Manual optimization is not supported: leave automatic_optimization=True.")
    if is_overridden("backward", module):
        found.append("The module overrides backward, which would not be called: remove it.")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        found.append("training_step takes dataloader_iter: take (batch, batch_idx) instead.")
    return found


def of_layers(module: nn.Module) -> list[str]:
    """Refusals of layers whose output for one example depends on the others, or on past ones."""
    found = []
    mixing = []
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, _InstanceNorm):
            if layer.track_running_stats:
                found.append(
                    f"{name} ({kind}) keeps running statistics of raw data: construct it with "
                    "track_running_stats=False."
                )
        elif isinstance(layer, _BatchNorm):
            mixing.append(f"{name} ({kind})")
        if isinstance(layer, Metric) and any(layer._persistent.values()):
            found.append(
                f"{name} ({kind}) would carry sums over raw data into checkpoints: leave its "
                "states non-persistent."
            )
        if hasattr(layer, "_orig_mod") or getattr(layer, "_compiled_call_impl", None) is not None:
            found.append(f"{name or 'The module'} is compiled: pass the plain module.")
    if getattr(module, "_compiler_ctx", None) is not None:
        found.append("The LightningModule is compiled: pass the plain module.")
    if mixing:
        more = f" and {len(mixing) - 3} more" if len(mixing) > 3 else ""
        found.insert(
            0,
            f"BatchNorm mixes the examples of a batch, in {', '.join(mixing[:3])}{more}: convert "
            "the network with opacus.validators.ModuleValidator.fix(network), which puts GroupNorm "
            "there (behind a linear layer put nn.LayerNorm); a frozen torchvision network keeps "
            "its statistics if it is built with norm_layer=torchvision.ops.FrozenBatchNorm2d.",
        )
    return found


def of_parameters(module: nn.Module, trained: Mapping[str, nn.Parameter]) -> list[str]:
    """Refusals of parameters whose gradients by record are not to be had, or not in this way."""
    reported = {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, _BatchNorm | _InstanceNorm)  # by of_layers
        for parameter in layer.parameters(recurse=False)
    }
    rest = {name: p for name, p in trained.items() if id(p) not in reported}
    return layer_refusals(module, rest)


def of_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> list[str]:
    """Refusals of optimizers that would see other than one released gradient a step."""
    if len(optimizers) != 1:
        return [f"Expected one optimizer, got {len(optimizers)}: return one."]
    optimizer = optimizers[0]
    found = []
    if isinstance(optimizer, LBFGS):
        found.append("LBFGS evaluates a batch several times: use a first-order optimizer.")
    if isinstance(optimizer, SparseAdam):
        found.append("SparseAdam takes sparse gradients, released ones are dense: use Adam.")
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        found.append(
            f"{type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so frozen "
            "coordinates could not be held: call it."
        )
    own = {id(parameter) for parameter in module.parameters()}
    strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if strangers:
        found.append(
            f"{strangers} parameters of the optimizer are not in the LightningModule: make the "
            "module that holds them a submodule."
        )
    return found
