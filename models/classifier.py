"""A LightningModule that classifies with any network; it knows nothing of privacy."""

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer


class ClassificationModule(LightningModule):
    """Cross-entropy classification of ``(inputs, targets)`` batches.

    `training_step` returns the loss of each record beside their mean, so that a private run need
    not ask how the mean was taken. It logs nothing: a training loss is a function of the private
    records. Hyperparameters are not stored in the checkpoint; the run's ``config.yaml`` has them.

    Args:
        network: maps inputs ``[n, ...]`` to class scores ``[n, classes]``.
        lr: learning rate of the default optimizer.
        momentum: momentum of the default optimizer.
        optimizer: makes another optimizer from the parameters, in place of the default one.
    """

    def __init__(
        self,
        network: nn.Module,
        lr: float = 0.5,
        momentum: float = 0.9,
        optimizer: OptimizerCallable | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.lr = lr
        self.momentum = momentum
        self.optimizer = optimizer

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores ``[n, classes]``."""
        return self.network(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The mean loss to minimise, and ``losses [n]`` of the records."""
        inputs, targets = batch
        losses = cross_entropy(self(inputs), targets, reduction="none")
        return {"loss": losses.mean(), "losses": losses}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Log ``val/loss`` and ``val/acc``; return scores ``[n, classes]`` and targets ``[n]``."""
        return self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Log ``test/loss``, ``test/acc``; return scores ``[n, classes]`` and targets ``[n]``."""
        return self._evaluate(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Class probabilities ``[n, classes]``."""
        return self(batch[0]).softmax(dim=1)

    def configure_optimizers(self) -> Optimizer:
        """The optimizer over all parameters."""
        if self.optimizer is not None:
            return self.optimizer(self.parameters())
        return SGD(self.parameters(), lr=self.lr, momentum=self.momentum)

    def _evaluate(self, batch: tuple[Tensor, Tensor], split: str) -> dict[str, Tensor]:
        inputs, targets = batch
        scores = self(inputs)
        self.log(f"{split}/loss", cross_entropy(scores, targets), prog_bar=True, sync_dist=True)
        accuracy = (scores.argmax(dim=1) == targets).float().mean()
        self.log(f"{split}/acc", accuracy, prog_bar=True, sync_dist=True)
        return {"preds": scores, "target": targets}
