"""Modules and networks of other packages, as they are: right gradients, or a refusal that helps."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.demos.boring_classes import (
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    RandomDataset,
)
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from opacus.layers import DPLSTM
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchvision.models import (
    ConvNeXt,
    MaxVit,
    ShuffleNetV2,
    SwinTransformer,
    VisionTransformer,
    resnet18,
)
from torchvision.models.convnext import CNBlockConfig

from test_probe import Net
from toys import private, trainer
from tptopk_pl import rng
from tptopk_pl.sampling import PoissonSampler
from tptopk_pl.units import PrivacyUnits

TABLE = "relative_position_bias_table"
SWIN = (TABLE, "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias")
NUM_RECORDS, BATCH, STEPS, WORDS = 24, 8, 3, 20
DRAW = torch.Generator().manual_seed(0)
PIXELS = TensorDataset(
    torch.randn(NUM_RECORDS, 3, 16, 16, generator=DRAW), torch.arange(NUM_RECORDS) % 4
)
TOKENS = TensorDataset(*torch.randint(0, WORDS, (2, NUM_RECORDS, 5), generator=DRAW))


class Released(Callback):
    """Keeps the weights before each step, and its released gradient."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}
        self.steps.append((copy.deepcopy(module.state_dict()), gradients))


def fit(module: Any, data: Any, *callbacks: Any, **options: Any) -> None:
    defaults = {"expected_batch_size": BATCH, "target_delta": 1e-3}
    loader = DataLoader(data, batch_size=5, shuffle=True)
    callback = private(**{**defaults, **options})
    trainer(callback, *callbacks, max_epochs=None, max_steps=STEPS, limit_val_batches=0).fit(
        module, loader
    )
    assert callback.step == STEPS


def trains_rightly(module: Any, data: Any) -> None:
    """Without noise and clip, each step releases the sum of autograd's gradients."""
    plain = copy.deepcopy(module)
    released = Released()
    fit(
        module, data, released, noise_multiplier=0.0, max_grad_norm=math.inf, active_ratio=1, seed=3
    )
    object.__setattr__(plain, "log", lambda *_, **__: None)
    sampler = PoissonSampler(
        PrivacyUnits.one_per_record(NUM_RECORDS),
        sampling_rate=BATCH / NUM_RECORDS,
        steps_per_pass=3,
        physical_batch_size=5,
        key=rng.seeded_key(3),
        next_step=lambda: 0,
        last_step=STEPS,
    )
    for step, (weights, gradients) in enumerate(released.steps):
        plain.load_state_dict(weights)
        plain.zero_grad()
        for index in sampler.draw(step).tolist():
            output = plain.training_step(default_collate([data[index]]), step)
            (output["loss"] if isinstance(output, dict) else output).backward()
        truth = {n: p.grad / BATCH for n, p in plain.named_parameters() if p.grad is not None}
        assert gradients.keys() >= truth.keys()
        scale = max(float(g.abs().max()) for g in truth.values())
        for name, gradient in truth.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-4 * scale)


def refusal(module: Any, data: Any) -> str:
    with pytest.raises((MisconfigurationException, ValueError)) as caught:
        fit(module, data)
    return str(caught.value)


class Lstm(LightningLSTM):
    """Lightning's demo, smaller, without its download."""

    def __init__(self, convert: bool) -> None:
        super().__init__(WORDS)
        self.model = SimpleLSTM(WORDS, 8, 8, 1, dropout=0.0)
        if convert:
            self.model = ModuleValidator.fix(self.model)

    def prepare_data(self) -> None:
        pass


class Edited(Lstm):
    """As its refusals ask: no state from batch to batch, a loss for each record."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        output, _ = self.model(inputs, self.model.init_hidden(len(inputs)))
        losses = F.nll_loss(output, target.view(-1), reduction="none").view(len(inputs), -1).mean(1)
        return {"loss": losses.mean(), "losses": losses}


class ManyMetrics(LightningModule):
    """With collections of torchmetrics, hyperparameters and two losses."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network, self.head = nn.Sequential(nn.Flatten(), nn.Linear(768, 8)), nn.Linear(8, 4)
        scores = {"accuracy": MulticlassAccuracy(4), "f1": MulticlassF1Score(4)}
        self.training_scores = MetricCollection(scores).clone(prefix="train/")
        self.validation_scores = self.training_scores.clone(prefix="val/")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.network(batch[0])
        logits = self.head(features)
        self.training_scores(logits.softmax(1), batch[1])
        loss = F.cross_entropy(logits, batch[1]) + 0.1 * features.square().mean()
        self.log("loss", loss)
        return {"loss": loss, "preds": logits.detach()}

    def on_train_epoch_end(self) -> None:
        self.training_scores.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["rate"])


class Translator(LightningTransformer):
    """Lightning's demo, smaller, without its download."""

    def __init__(self) -> None:
        super().__init__(WORDS)
        self.model = Transformer(WORDS, 8, 2, 8, 1, dropout=0.0)

    def prepare_data(self) -> None:
        pass


def vit() -> nn.Module:
    return VisionTransformer(16, 8, 1, 2, 8, 16, num_classes=4)


def convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(8, None, 2)], num_classes=4)


def swin() -> nn.Module:
    return SwinTransformer(
        [2, 2], 8, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=4
    )


def maxvit() -> nn.Module:
    network = MaxVit((16, 16), 8, 4, [8], [1], 4, 0.0, num_classes=4)
    return ModuleValidator.fix(network)


def frozen(network: nn.Module, *names: str) -> nn.Module:
    """As the refusal asks for a network that one cannot edit."""
    for name, parameter in network.named_parameters():
        if name.endswith(names):
            parameter.requires_grad_(False)
    return network


def frozen_backbone() -> nn.Module:
    network = convnext()
    network.features.requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (BoringModel, RandomDataset(32, NUM_RECORDS)),
        (Translator, TOKENS),
        (lambda: Edited(convert=True), TOKENS),
        (lambda: Net(frozen(vit(), "class_token", "pos_embedding")), PIXELS),
        (lambda: Net(frozen(convnext(), "layer_scale")), PIXELS),
        (lambda: Net(frozen_backbone()), PIXELS),
        (lambda: Net(frozen(swin(), *SWIN)), PIXELS),
        (lambda: Net(frozen(maxvit(), TABLE)), PIXELS),
        (ManyMetrics, PIXELS),
    ],
    ids=[
        *("boring", "transformer", "lstm", "vit", "convnext", "frozen_backbone"),
        *("swin", "maxvit", "metrics"),
    ],
)
def test_it_trains_rightly(make: Any, data: Any) -> None:
    torch.manual_seed(1)
    trains_rightly(make(), data)


def test_a_residual_network_is_refused_in_one_line_and_the_edit_works() -> None:
    network = resnet18(num_classes=4)
    lines = refusal(Net(network), PIXELS).splitlines()
    assert len(lines) == 2
    assert "network.bn1 (BatchNorm2d)" in lines[1] and "and 17 more" in lines[1]
    assert "GroupNorm" in lines[1] and "FrozenBatchNorm2d" in lines[1]
    assert not any(isinstance(m, nn.BatchNorm2d) for m in ModuleValidator.fix(network).modules())


@pytest.mark.parametrize(
    ("network", "name"),
    [(vit, "class_token"), (convnext, "layer_scale")],
)
def test_bare_parameters_are_named_with_both_edits(network: Any, name: str) -> None:
    message = refusal(Net(network()), PIXELS)
    assert name in message
    assert "submodule of its own" in message and "requires_grad_(False)" in message


def test_weights_that_a_functional_attention_takes_are_found() -> None:
    """torchvision's window attention never calls its own linear layers."""
    message = refusal(Net(frozen(swin(), TABLE)), PIXELS)
    assert len(message.splitlines()) == 2
    for name in SWIN[1:]:
        assert f"network.features.*.*.{name}" in message
    assert "requires_grad_(False)" in message


def test_a_group_of_one_value_is_explained() -> None:
    """Which is what the conversion of a BatchNorm on maps of one pixel leads to."""
    network = ModuleValidator.fix(ShuffleNetV2([1, 1, 1], [8, 16, 32, 64, 64], num_classes=4))
    assert "take fewer groups" in refusal(Net(network), PIXELS)


def test_a_recurrent_network_is_refused_until_it_is_edited() -> None:
    """Then the state that the demo carries from batch to batch is found."""
    assert "opacus.layers.DPLSTM" in refusal(Lstm(convert=False), TOKENS)
    converted = Lstm(convert=True)
    assert isinstance(converted.model.rnn, DPLSTM)
    assert "from batch to batch" in refusal(converted, TOKENS)


def test_other_demos_are_refused() -> None:
    vectors = RandomDataset(32, NUM_RECORDS)
    assert "automatic_optimization=True" in refusal(ManualOptimBoringModel(), vectors)
    assert "a sum" in refusal(DemoModel(), vectors)
