"""Small modules and data for the tests; they know nothing of privacy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tptopk_pl import TwoPhaseSupportCallback

NUM_RECORDS = 120


def records(seed: int = 0, n: int = NUM_RECORDS) -> TensorDataset:
    """Images ``[n, 1, 6, 6]`` of two classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (n,), generator=generator)
    pattern = torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(9)).sign()
    shift = (labels[:, None, None, None] - 0.5) * pattern
    return TensorDataset(torch.randn(n, 1, 6, 6, generator=generator) + shift, labels)


def loader(dataset: Any = None, **kwargs: Any) -> DataLoader[Any]:
    """A shuffled loader of physical batches of 8."""
    kwargs = {"batch_size": 8, "shuffle": True, **kwargs}
    return DataLoader(records() if dataset is None else dataset, **kwargs)


class Numbers(Dataset[Any]):
    """Record i is ``(tensor [2] of i, i)``."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(index)), index


class Plain(LightningModule):
    """A module as found in the wild: mean loss, training metrics logged, a step scheduler."""

    def __init__(self, optimizer: str = "SGD", schedule: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(64, 2),
        )
        self.accuracy = torchmetrics.Accuracy(task="binary")
        self.make = getattr(torch.optim, optimizer)
        self.options = {"lr": 0.1, **({"momentum": 0.9} if optimizer == "SGD" else {}), **options}
        self.schedule = schedule

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        scores = self(images)
        loss = F.cross_entropy(scores, labels)
        self.accuracy(scores.argmax(1), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        scores = self(images)
        self.log("val_loss", F.cross_entropy(scores, labels))
        return {"preds": scores, "target": labels}

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(records(1, 24), shuffle=False)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), **self.options)
        if not self.schedule:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def private(**kwargs: Any) -> TwoPhaseSupportCallback:
    """A callback for the toy data: 10 steps an epoch."""
    defaults = {
        "noise_multiplier": 1.0,
        "target_delta": 1e-5,
        "expected_batch_size": 12,
        "max_grad_norm": 1.0,
    }
    if "target_epsilon" in kwargs:
        defaults.pop("noise_multiplier")
    return TwoPhaseSupportCallback(**{**defaults, **kwargs})  # type: ignore[arg-type]


def trainer(*callbacks: Any, **kwargs: Any) -> Trainer:
    """A quiet Trainer on the CPU."""
    defaults = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 50,
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **kwargs})


class Saver(Callback):
    """Keeps ``step=N.ckpt`` every so many steps."""

    def __init__(self, folder: Any, every: int) -> None:
        self.folder, self.every = folder, every

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


def flat(module: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])
