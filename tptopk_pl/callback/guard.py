"""What must not change, or be seen, while a step runs on raw data."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
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
        self._trained = trained_parameters(module, optimizer).keys()

    def before_step(self) -> None:
        """Remember what a step must not write to: it would carry raw data out."""
        self._constants = self._versions()

    def after_step(self) -> None:
        """Drop raw gradients, which parameters that are not trained may have by now.

        Raises:
            MisconfigurationException: if the step wrote to a buffer or a parameter, or if other
                parameters than at the start are trained.
        """
        self.drop_gradients()
        if trained_parameters(self._module, self._optimizer).keys() != self._trained:
            raise MisconfigurationException(
                "Parameters were frozen, unfrozen or given to the optimizer in mid-run: do this "
                "before the fit."
            )
        now = self._versions()
        if changed := [name for name, at in now.items() if self._constants.get(name) != at]:
            raise MisconfigurationException(
                f"training_step writes to {', '.join(changed)}, which would carry raw data into "
                "checkpoints: make them constants."
            )

    def drop_gradients(self) -> None:
        """Whatever ``zero_grad`` does or leaves."""
        for parameter in self._module.parameters():
            parameter.grad = None

    def _versions(self) -> dict[str, int]:
        tensors = [*self._module.named_buffers(), *self._module.named_parameters()]
        return {name: tensor._version for name, tensor in tensors}
