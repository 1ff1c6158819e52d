"""Raw training data stays out of logs; validation and released values pass."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from toys import Plain, loader, private, trainer


class Talkative(Plain):
    """Logs in every way at hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"train_dict": loss})
        if self.logger is not None and hasattr(self.logger.experiment, "add_scalar"):
            self.logger.experiment.add_scalar("train_direct", float(loss.detach()), batch_idx)
        for logger in self.loggers:
            logger.log_metrics({"train_metrics": float(loss.detach())})
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train_late", self.accuracy.compute())
        for logger in self.loggers:
            logger.log_metrics({"train_late_direct": 1.0})


class TalkativeCallback(Callback):
    """Logs from training, as callbacks do."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("train_callback", 1.0)
        self.log_dict({"train_callback_dict": 1.0})


def tags(folder: Any) -> set[str]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


@pytest.mark.parametrize("others", [False, True])
def test_training_values_are_not_logged(tmp_path: Any, others: bool) -> None:
    """By self.log, log_dict, a logger's own methods, or at the epoch's end."""
    logger = TensorBoardLogger(tmp_path, name=None, version="run")
    loggers = [logger, CSVLogger(tmp_path, name="csv")] if others else logger
    other = TalkativeCallback()
    fitted = trainer(private(), other, logger=loggers, log_every_n_steps=1)
    fitted.fit(Talkative(), loader())
    assert not any("withhold" in str(value) for value in other.__dict__.values())
    logged = tags(tmp_path / "run")
    assert {"val_loss", "privacy/epsilon", "privacy/epsilon_rdp", "privacy/phase"} <= logged
    assert not any("train" in tag or "loss" in tag.replace("val_loss", "") for tag in logged)
    assert not any("train" in name for name in fitted.callback_metrics)


def test_opting_in_renames(tmp_path: Any) -> None:
    """What is computed from raw training data says so in its name."""
    logger = TensorBoardLogger(tmp_path, name=None, version="run")
    fitted = trainer(private(log_non_private=True), logger=logger, log_every_n_steps=1)
    fitted.fit(Plain(), loader())
    logged = tags(tmp_path / "run")
    assert {"non_private/train_loss_step", "non_private/train_acc", "non_private/loss"} <= logged
    assert not any(tag.startswith("train") for tag in logged)


def test_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    """Once a fit, not once a step."""
    with caplog.at_level("INFO"):
        trainer(private()).fit(Plain(), loader())
    assert sum("computed from raw training data" in r.message for r in caplog.records) == 1


def test_logging_outside_a_private_fit_is_untouched() -> None:
    """Before and after: the module's own log is back."""
    module = Plain()
    trainer(private()).fit(module, loader())
    fitted = trainer()
    fitted.fit(module, loader())
    assert "train_acc" in fitted.callback_metrics
    assert torch.isfinite(fitted.callback_metrics["train_acc"])
