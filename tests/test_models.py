import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from models import ClassificationModule, SmallCNN


def batch(num_records: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_records, 1, 28, 28), torch.arange(num_records) % 10


def quiet_trainer(tmp_path, **options) -> Trainer:
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_cnn_has_the_published_size_and_shape(activation):
    # conv 16·64+16, conv 32·16·16+32, fc 512·32+32, fc 32·10+10 = 1,040 + 8,224 + 16,416 + 330
    network = SmallCNN(activation)
    assert sum(p.numel() for p in network.parameters()) == 26_010
    assert network(batch()[0]).shape == (6, 10)


def test_cnn_refuses_another_activation():
    with pytest.raises(ValueError, match=r"activation='gelu' in \{tanh, relu\}"):
        SmallCNN("gelu")


def test_training_step_gives_the_loss_of_each_record_and_their_mean():
    module = ClassificationModule(SmallCNN())
    inputs, targets = batch()
    step = module.training_step((inputs, targets), 0)
    alone = [cross_entropy(module(x[None]), y[None]) for x, y in zip(inputs, targets, strict=True)]
    torch.testing.assert_close(step["losses"], torch.stack(alone))
    torch.testing.assert_close(step["loss"], torch.stack(alone).mean())


def test_optimizer_arguments_reach_the_optimizer():
    sgd = ClassificationModule(SmallCNN(), lr=0.25, momentum=0.5).configure_optimizers()
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.25, 0.5)
    given = ClassificationModule(SmallCNN(), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    assert isinstance(given.configure_optimizers(), torch.optim.Adam)


def test_fits_validates_tests_and_predicts_without_privacy(tmp_path):
    loader = DataLoader(TensorDataset(*batch(20)), batch_size=10)
    module = ClassificationModule(SmallCNN(), lr=0.1)
    options = {"enable_checkpointing": False, "log_every_n_steps": 1}
    trainer = quiet_trainer(tmp_path, max_epochs=15, **options)
    (before,) = trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader, loader)
    (after,) = trainer.test(module, loader, verbose=False)
    assert after["test/loss"] < before["val/loss"] / 2 and after["test/acc"] > before["val/acc"]
    predictions = torch.cat(trainer.predict(module, loader))
    torch.testing.assert_close(predictions.sum(dim=1), torch.ones(20))
    assert not any(name.startswith("train") for name in trainer.logged_metrics)


def test_evaluation_steps_return_predictions_and_targets_for_metrics(tmp_path):
    seen = []

    class Recording(ClassificationModule):
        def on_test_batch_end(self, outputs, batch, batch_idx):
            seen.append(outputs)

    loader = DataLoader(TensorDataset(*batch(20)), batch_size=10)
    quiet_trainer(tmp_path).test(Recording(SmallCNN()), loader, verbose=False)
    assert [set(outputs) for outputs in seen] == [{"preds", "target"}] * 2
    assert seen[0]["preds"].shape == (10, 10) and seen[0]["target"].shape == (10,)
