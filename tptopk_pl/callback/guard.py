"""What must not change, or be seen, while a step runs on raw data."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer


def trained_parameters(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters by name that require a gradient and that the optimizer holds."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) in held
    }


class Guard:
    """Compares a module before and after each step.

    Args:
        module: the module under training.
        optimizer: the one optimizer.
    """

    def __init__(self, module: LightningModule, optimizer: Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._trainer = module.trainer
        self._trained = trained_parameters(module, optimizer).keys()

    def before_step(self) -> None:
        """Remember what a step must not write to: it would carry raw data out."""
        self._constants = self._lasting()
        self._should_stop = self._trainer.should_stop
        self._settings = [_plain(group) for group in self._optimizer.param_groups]

    def after_step(self) -> None:
        """Drop raw gradients, which parameters that are not trained may have by now.

        What the step did to learning rates and ``should_stop`` is undone: it saw raw losses.

        Raises:
            MisconfigurationException: if the step wrote to a buffer or a parameter, or if other
                parameters than at the start are trained.
        """
        self.drop_gradients()
        self.undo_steering()
        if trained_parameters(self._module, self._optimizer).keys() != self._trained:
            raise MisconfigurationException(
                "Parameters were frozen, unfrozen or given to the optimizer in mid-run: do this "
                "before the fit."
            )
        before, now = self._constants, self._lasting()
        changed = [
            name
            for name, (tensor, at) in now.items()
            if name not in before or before[name][0] is not tensor or before[name][1] != at
        ]
        if changed:
            raise MisconfigurationException(
                f"training_step writes to {', '.join(changed)}, which would carry raw data into "
                "checkpoints: make them constants."
            )

    def undo_steering(self) -> None:
        """Put ``should_stop`` and the parameter groups' settings back."""
        self._trainer.should_stop = self._should_stop
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=False):
            group.update(settings)

    def drop_gradients(self) -> None:
        """Whatever ``zero_grad`` does or leaves."""
        for parameter in self._module.parameters():
            parameter.grad = None

    def _lasting(self) -> dict[str, tuple[Tensor, int]]:
        """What a checkpoint would hold, and how often it was written to."""
        lasting = self._module.state_dict(keep_vars=True).items()
        return {name: (t, t._version) for name, t in lasting if isinstance(t, Tensor)}


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a parameter group; a tensor would be shared, and is left alone."""
    return {name: v for name, v in group.items() if isinstance(v, bool | int | float | tuple)}
