"""A LightningModule that classifies with any network; it knows nothing of privacy."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from models.pretrained import load_public_weights


class ClassificationModule(LightningModule):
    """Cross-entropy classification of ``(inputs, targets)`` batches.

    `training_step` returns the loss of each record beside their mean, so that a private run need
    not ask how the mean was taken. It logs nothing: a training loss is a function of the private
    records. Hyperparameters are not stored in the checkpoint; the run's ``config.yaml`` has them.

    Args:
        network: maps inputs ``[n, ...]`` to class scores ``[n, classes]``.
        lr: learning rate of SGD, unless the command line names another `--optimizer`.
        momentum: momentum of SGD, likewise.
        pretrained: file of weights to begin from. They must be PUBLIC: ε says nothing of the
            records that they were trained on. The weights of a `--ckpt_path` come after.

    Attributes:
        pretrained_weights: file, SHA-256, and number of parameters loaded and new; None without.

    Raises:
        ValueError: if the weights cannot be read or are of another kind of network.
    """

    def __init__(
        self,
        network: nn.Module,
        lr: float = 0.5,
        momentum: float = 0.9,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.lr = lr
        self.momentum = momentum
        self.pretrained_weights: dict[str, Any] | None = None
        if pretrained is not None:
            self.pretrained_weights = load_public_weights(network, pretrained)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores ``[n, classes]``."""
        return self.network(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The mean loss to minimise, and ``losses [n]`` of the records."""
        inputs, targets = batch
        losses = cross_entropy(self(inputs), targets, reduction="none")
        return {"loss": losses.mean(), "losses": losses}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Log ``val/loss``; return scores ``[n, classes]`` and targets ``[n]`` for metrics."""
        return self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Log ``test/loss``; return scores ``[n, classes]`` and targets ``[n]`` for metrics."""
        return self._evaluate(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Class probabilities ``[n, classes]``."""
        return self(batch[0]).softmax(dim=1)

    def configure_optimizers(self) -> Optimizer:
        """SGD over all parameters."""
        return SGD(self.parameters(), lr=self.lr, momentum=self.momentum)

    def _evaluate(self, batch: tuple[Tensor, Tensor], split: str) -> dict[str, Tensor]:
        inputs, targets = batch
        scores = self(inputs)
        self.log(f"{split}/loss", cross_entropy(scores, targets), prog_bar=True, sync_dist=True)
        return {"preds": scores, "target": targets}
