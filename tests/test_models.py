"""Networks, public weights, and the module that classifies with them."""

import copy
import hashlib
import sys

import pytest
import torch
import torchvision
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import reference
import train
from models import ClassificationModule, DeepCNN, ResNet, SmallCNN, WideResNet
from models.weight_standardization import StandardizedConv2d
from toys import flat, private, trainer
from tptopk_pl.callback.probe import Probe, ProbeResult
from tptopk_pl.gradients import GradientEngine

# Each architecture at the smallest size that has all of its parts: network, channels, pixels.
SMALLEST = {
    "small_cnn": (SmallCNN, 1, 28),
    "deep_cnn": (DeepCNN, 3, 32),
    "resnet18": (lambda: ResNet(18, in_channels=1), 1, 28),
    "wide_resnet": (lambda: WideResNet(10, 2), 3, 28),
    "wide_resnet_standardized": (lambda: WideResNet(10, 2, weight_standardization=True), 3, 28),
}
every_architecture = pytest.mark.parametrize("name", SMALLEST)


def images(num_records: int = 6, channels: int = 1, size: int = 28) -> tuple[Tensor, Tensor]:
    return torch.randn(num_records, channels, size, size), torch.arange(num_records) % 10


def num_parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_cnns_have_the_published_sizes_and_shapes(activation):
    # conv 16·64+16, conv 32·16·16+32, fc 512·32+32, fc 32·10+10 = 1,040 + 8,224 + 16,416 + 330
    small = SmallCNN(activation)
    assert num_parameters(small) == 26_010
    assert small(images()[0]).shape == (6, 10)
    # 9·(3·32 + 32·32 + 32·64 + 64·64 + 64·128 + 128·128) + 448 of the convolutions' biases
    # = 287,008; fc 2048·128+128 = 262,272; fc 128·10+10 = 1,290
    deep = DeepCNN(activation)
    assert num_parameters(deep) == 550_570
    assert deep(images(6, 3, 32)[0]).shape == (6, 10)


@pytest.mark.parametrize("network", [SmallCNN, DeepCNN])
def test_cnns_refuse_another_activation(network):
    with pytest.raises(ValueError, match=r"activation='gelu' in \{tanh, relu\}"):
        network("gelu")


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_resnet_has_the_parameters_of_torchvision(depth):
    with torch.device("meta"):  # names and shapes alone
        ours = ResNet(depth, num_classes=1000, stem="large")
        theirs = getattr(torchvision.models, f"resnet{depth}")()
    shapes = [{n: p.shape for n, p in net.named_parameters()} for net in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert not list(ours.buffers())


def test_wide_resnet_has_the_published_size():
    # The classic WRN-16-4 with BatchNorm has 2,748,890; biases of the convolutions
    # 16 + 5·64 + 5·128 + 5·256 = 2,256, and three norms on shortcuts 2·(16 + 64 + 128) = 416.
    assert num_parameters(WideResNet()) == 2_748_890 + 2_256 + 416


@pytest.mark.parametrize("network", [ResNet(18), WideResNet(10, 2)], ids=["resnet", "wide_resnet"])
def test_residual_networks_take_any_size(network):
    with torch.no_grad():
        for size in (28, 32, 64):
            assert network(images(1, 3, size)[0]).shape == (1, 10)


def test_the_large_stem_shrinks_images_sixteenfold():
    network = ResNet(18, num_classes=5, in_channels=1, stem="large")
    seen = []
    network.layer1.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    with torch.no_grad():
        assert network(images(1, 1, 224)[0]).shape == (1, 5)
        assert WideResNet(10, 2)(images(1, 3, 224)[0]).shape == (1, 10)
    assert seen == [(1, 64, 56, 56)]


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (ResNet, {"depth": 101}, r"depth=101 in \{18, 34, 50\}"),
        (ResNet, {"stem": "huge"}, r"stem='huge' in \{small, large\}"),
        (WideResNet, {"depth": 18}, r"depth=18 in \{10, 16, 22, …\}"),
        (WideResNet, {"width": 1}, r"width=1 in \{2, 3, …\}"),
    ],
)
def test_residual_networks_refuse_what_there_is_not(network, options, message):
    with pytest.raises(ValueError, match=message):
        network(**options)


def test_weight_standardization_removes_mean_and_scale():
    conv = StandardizedConv2d(3, 4, 3, bias=False)
    x = images(2, 3, 5)[0]
    centered = conv.weight - conv.weight.mean(dim=(1, 2, 3), keepdim=True)
    scale = centered.square().mean(dim=(1, 2, 3), keepdim=True).sqrt() * 27**0.5  # fan_in 3·3·3
    expected = nn.functional.conv2d(x, centered / scale)
    torch.testing.assert_close(conv(x), expected, rtol=1e-3, atol=1e-3)
    before = conv(x)
    with torch.no_grad():
        conv.weight.mul_(3).add_(2)
    torch.testing.assert_close(conv(x), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("network", [ResNet, WideResNet])
def test_standardized_networks_have_the_same_parameters(network):
    with torch.device("meta"):
        plain, standardized = network(), network(weight_standardization=True)
    assert {n: p.shape for n, p in plain.named_parameters()} == {
        n: p.shape for n, p in standardized.named_parameters()
    }
    kinds = {type(m) for m in standardized.modules() if isinstance(m, nn.Conv2d)}
    assert kinds == {StandardizedConv2d}


@every_architecture
def test_gradients_of_each_record_are_those_of_autograd(name):
    """In float64, where rounding does not blur the comparison through many layers."""
    make, channels, size = SMALLEST[name]
    network = make().double()
    inputs, targets = images(2, channels, size)
    inputs = inputs.double()
    plain = copy.deepcopy(network)

    def loss_of_record(record: int) -> Tensor:
        return cross_entropy(plain(inputs[record, None]), targets[record, None])

    expected = reference.record_gradients(loss_of_record, list(plain.parameters()), 2)
    engine = GradientEngine(nn.ModuleList([network]), dict(network.named_parameters()))
    engine.attach()
    engine.begin(torch.arange(2), num_units=2)
    cross_entropy(network(inputs), targets, reduction="sum").backward()
    torch.testing.assert_close(engine.norms(), expected.norm(dim=1))
    for factors in torch.eye(2).double():
        torch.testing.assert_close(engine.weighted_sum(factors), factors @ expected)
    assert not engine.bypassed


class Moves(Callback):
    """How far each step moved each coordinate, by which optimizer, at which learning rate."""

    def on_train_start(self, trainer, module) -> None:
        self.steps, self.optimizers, self.rates = [], [], []
        self._before = flat(module)

    def on_train_batch_end(self, trainer, module, *_) -> None:
        after = flat(module)
        self.steps.append((after - self._before).abs())
        self._before = after

    def on_train_batch_start(self, trainer, module, *_) -> None:
        (optimizer,) = trainer.optimizers
        self.optimizers.append(type(optimizer))
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("name", ["deep_cnn", "resnet18", "wide_resnet_standardized"])
def test_trains_privately_in_two_phases(name, monkeypatch):
    make, channels, size = SMALLEST[name]
    if name == "resnet18":  # 34 made-up batches through 11 million parameters: a minute
        monkeypatch.setattr(Probe, "run", lambda probe: ProbeResult())
    module = ClassificationModule(make(), lr=0.1)
    data = TensorDataset(*images(6, channels, size))
    loaders = [DataLoader(data, batch_size=2, shuffle=shuffle) for shuffle in (True, False)]
    callback = private(expected_batch_size=2, active_ratio=0.1, warmup_steps=1)
    moves = Moves()
    trainer(callback, moves, max_steps=2, max_epochs=-1).fit(module, *loaders)
    warm_up, sparse = ((step > 0).double().mean() for step in moves.steps)
    assert warm_up > 0.99 and 0.09 < sparse < 0.101


def test_training_step_gives_the_loss_of_each_record_and_their_mean():
    module = ClassificationModule(SmallCNN())
    inputs, targets = images()
    step = module.training_step((inputs, targets), 0)
    alone = [cross_entropy(module(x[None]), y[None]) for x, y in zip(inputs, targets, strict=True)]
    torch.testing.assert_close(step["losses"], torch.stack(alone))
    torch.testing.assert_close(step["loss"], torch.stack(alone).mean())


def test_learning_rate_and_momentum_reach_the_optimizer():
    sgd = ClassificationModule(SmallCNN(), lr=0.25, momentum=0.5).configure_optimizers()
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.25, 0.5)


def test_fits_validates_tests_and_predicts_without_privacy():
    loader = DataLoader(TensorDataset(*images(20)), batch_size=10)
    module = ClassificationModule(SmallCNN(), lr=0.1)
    plain = trainer(max_epochs=15, log_every_n_steps=1)
    (before,) = plain.validate(module, loader, verbose=False)
    plain.fit(module, loader, loader)
    (after,) = plain.test(module, loader, verbose=False)
    assert after["test/loss"] < before["val/loss"] / 2
    predictions = torch.cat(plain.predict(module, loader))
    torch.testing.assert_close(predictions.sum(dim=1), torch.ones(20))
    assert not any(name.startswith("train") for name in plain.logged_metrics)


def test_evaluation_steps_log_the_loss_and_return_what_metrics_need():
    seen = []

    class Recording(ClassificationModule):
        def on_test_batch_end(self, outputs, batch, batch_idx):
            seen.append(outputs)

    loader = DataLoader(TensorDataset(*images(20)), batch_size=10)
    (logged,) = trainer().test(Recording(SmallCNN()), loader, verbose=False)
    assert set(logged) == {"test/loss"}
    assert [set(outputs) for outputs in seen] == [{"preds", "target"}] * 2
    assert seen[0]["preds"].shape == (10, 10) and seen[0]["target"].shape == (10,)


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Run train.py's main on the quickstart cut to an end, in an empty current directory."""
    monkeypatch.chdir(tmp_path)

    def command(*args: str) -> int:
        options = ["--config=configs/quickstart.yaml", "--trainer.enable_progress_bar=false"]
        monkeypatch.setattr(sys, "argv", ["train.py", "fit", *options, *args])
        return train.main()

    return command


class RecordsMoves(ClassificationModule):
    """Its last run's moves."""

    moves = Moves()

    def configure_callbacks(self) -> list[Callback]:
        return [self.moves]


def test_optimizer_and_schedule_of_the_command_line_are_used(command):
    """Adam's first step is lr in every coordinate; a schedule that ends in 0 stops the next."""
    model = f"--model={__name__}.RecordsMoves"
    adam = ["--optimizer=Adam", "--optimizer.lr=0.01"]
    schedule = ["--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0"]
    epochs = ["--trainer.max_epochs=2", "--trainer.limit_train_batches=1"]
    privacy = ["--privacy.method=dp_sgd", "--trainer.logger=false"]
    with pytest.warns(UserWarning, match=r"configure_optimizers` will be overridden"):
        code = command(model, *adam, *schedule, *epochs, *privacy)
    assert code == 0
    moves = RecordsMoves.moves
    assert moves.optimizers == [torch.optim.Adam] * 2
    first, second = moves.steps
    assert first.median() == pytest.approx(0.01, rel=1e-3) and first.max() < 0.0101
    assert moves.rates == [0.01, 0] and second.max() == 0


def save(path, state) -> str:
    torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("prefix", ["", "network.", "module.", "module.network."])
def test_public_weights_are_loaded_under_any_of_their_names(tmp_path, prefix):
    public = SmallCNN()
    state = {prefix + name: tensor for name, tensor in public.state_dict().items()}
    if prefix == "network.":
        state = {"state_dict": state, "epoch": 3}  # as Lightning keeps it
    path = save(tmp_path / "public.ckpt", state)
    module = ClassificationModule(SmallCNN(), pretrained=path)
    torch.testing.assert_close(flat(module.network), flat(public), rtol=0, atol=0)
    assert module.pretrained_weights == {
        "path": path,
        "sha256": hashlib.sha256((tmp_path / "public.ckpt").read_bytes()).hexdigest(),
        "num_loaded": 26_010,
        "num_new": 0,
    }


def test_weights_of_torchvision_fit_and_the_head_of_another_size_stays_new(tmp_path):
    public = torchvision.models.resnet18()
    path = save(tmp_path / "resnet18.pth", public.state_dict())
    network = ResNet(18, num_classes=10, stem="large")
    head = network.fc.weight.detach().clone()
    loaded = ClassificationModule(network, pretrained=path).pretrained_weights
    # 11,689,512 parameters, 1000·512 + 1000 of them the head's; the new one has 10·512 + 10
    assert (loaded["num_loaded"], loaded["num_new"]) == (11_176_512, 5_130)
    for name, parameter in network.named_parameters():
        expected = head if name == "fc.weight" else public.state_dict()[name]
        if name != "fc.bias":
            torch.testing.assert_close(parameter.data, expected, rtol=0, atol=0)


def test_without_public_weights_nothing_is_claimed():
    assert ClassificationModule(SmallCNN()).pretrained_weights is None


def test_weights_of_another_network_are_refused_and_change_nothing(tmp_path):
    path = save(tmp_path / "cnn.pt", DeepCNN().state_dict())
    network = SmallCNN()
    before = flat(network).clone()
    message = (
        r"^model.pretrained='.*cnn.pt' has no match.* for 6 of 8 .*\(features.0.weight, .*, …\)"
    )
    with pytest.raises(ValueError, match=message):
        ClassificationModule(network, pretrained=path)
    torch.testing.assert_close(flat(network), before, rtol=0, atol=0)


def test_weights_without_a_place_are_named(tmp_path):
    state = SmallCNN().state_dict() | {"features.9.weight": torch.ones(1)}
    path = save(tmp_path / "larger.pt", state)
    with pytest.warns(UserWarning, match=r"holds more than the network: features.9.weight"):
        ClassificationModule(SmallCNN(), pretrained=path)


class Payload:
    """Would be made on loading, were anything executed."""

    loaded = False

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}

    def __setstate__(self, state) -> None:
        Payload.loaded = True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no file of weights"),
        (b"PK\x03\x04 truncated", "is no file of weights"),
        (Payload(), "is no file of weights"),
        ([torch.ones(1)], "holds no tensors by name"),
        ({"epoch": 3}, "holds no tensors by name"),
    ],
)
def test_a_file_that_holds_no_weights_is_refused_and_not_executed(tmp_path, content, message):
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=rf"^model.pretrained='.*' {message}"):
        ClassificationModule(SmallCNN(), pretrained=str(path))
    assert not Payload.loaded


def test_a_missing_file_of_weights_is_one_line(command, capfd):
    assert command("--model.pretrained=none.pt") == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("train.py: model.pretrained='none.pt' cannot be read")


def test_a_checkpoint_of_a_private_run_is_no_public_weights(tmp_path):
    """Its records would be used again, and the second run's ε would not know."""
    state = {
        "state_dict": SmallCNN().state_dict(),
        "callbacks": {"TwoPhaseSupportCallback": {"step": 3}},
    }
    torch.save(state, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="private records, whose ε would not be counted"):
        ClassificationModule(SmallCNN(), pretrained=str(tmp_path / "a.ckpt"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    state = SmallCNN().state_dict()
    state["head.1.bias"][3] = value
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"not finite.*head\.1\.bias"):
        ClassificationModule(SmallCNN(), pretrained=str(tmp_path / "a.pt"))


def test_weights_of_integers_do_not_fit(tmp_path):
    state = {name: tensor.long() for name, tensor in SmallCNN().state_dict().items()}
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="no match"):
        ClassificationModule(SmallCNN(), pretrained=str(tmp_path / "a.pt"))
