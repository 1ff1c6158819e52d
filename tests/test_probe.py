"""The probe for coupled examples: what it refuses, what it lets pass, what it leaves behind."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from toys import Plain, loader, private, records, trainer
from tptopk_pl.callback import losses
from tptopk_pl.callback.company import SIZE
from tptopk_pl.gradients import GradientEngine


class Loss(Plain):
    """A module with another loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return self.loss(self(images), labels)


class Net(LightningModule):
    """A network and a loss."""

    def __init__(self, network: nn.Module, loss: Any = F.cross_entropy) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Records(Dataset[Any]):
    """Made by a function of the index."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def fit(module: Any, data: Any = None, **options: Any) -> Any:
    callback = private(**options)
    trainer(callback).fit(module, data or loader())
    return callback


def passes(module: Any, data: Any = None) -> None:
    """One step is run."""
    callback = private()
    trainer(callback, max_steps=1).fit(module, data or loader())
    assert callback.step == 1
    assert callback.probe_result.refusals == []


def refuses(module: Any, data: Any = None, match: str = "One example's gradient") -> None:
    """No step is run."""
    with pytest.raises(MisconfigurationException, match=match):
        trainer(private(), max_steps=1).fit(module, data or loader())


WEIGHTS = torch.tensor([1.0, 3.0])
COUPLED = {
    "sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "class weights": lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS),
    "ignored label": lambda z, y: F.cross_entropy(z, y, ignore_index=1),
    "batch statistics": lambda z, y: F.cross_entropy(z - z.mean(0), y),
    "max": lambda z, y: F.cross_entropy(z, y, reduction="none").max(),
    "pairs": lambda z, y: (z @ z.T).square().mean(),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_coupled_losses_are_refused(kind: str) -> None:
    """With the way out in the message."""
    with pytest.raises(MisconfigurationException, match="example's gradient") as caught:
        fit(Loss(COUPLED[kind]))
    assert '{"loss": losses.mean(), "losses": losses}' in str(caught.value)


def test_class_weights_with_losses_of_each_record_are_allowed() -> None:
    """The mean over records is then explicit."""

    def losses(z: Tensor, y: Tensor) -> Any:
        each = F.cross_entropy(z, y, weight=WEIGHTS, reduction="none")
        return {"loss": each.mean(), "losses": each}

    assert fit(Loss(losses)).step == 20


INDEPENDENT = {
    "mean": F.cross_entropy,
    "label smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "constant factor": lambda z, y: 3 * F.cross_entropy(z, y),
    "several terms": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(),
}


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_independent_losses_pass(kind: str) -> None:
    """And the result is worded as what it is."""
    callback = fit(Loss(INDEPENDENT[kind]))
    assert callback.step == 20
    assert callback.probe_result.refusals == []


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.5), nn.RReLU()])
def test_random_layers_pass(layer: nn.Module) -> None:
    """Their draws differ with the batch size; that is not coupling."""
    module = Plain()
    module.network[2] = layer
    assert fit(module).step == 20


def test_records_in_the_second_dimension_are_refused() -> None:
    """Clipping would cut along the wrong dimension."""

    class Sequence(Plain):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.batch_first = batch_first
            self.network = nn.Linear(6, 6)
            self.mix = nn.Linear(6, 2)

        def forward(self, images: Tensor) -> Tensor:
            tokens = images[:, 0] if self.batch_first else images[:, 0].transpose(0, 1)
            hidden = torch.tanh(self.network(tokens))
            return self.mix(hidden.mean(1 if self.batch_first else 0))

    assert fit(Sequence(True)).step == 20
    with pytest.raises((MisconfigurationException, ValueError), match="network"):
        fit(Sequence(False))


def test_mixup_in_collate_is_refused() -> None:
    """The probe goes through the loader's own collate function."""

    def mixup(batch: Any) -> Any:
        images, labels = default_collate(batch)
        return 0.5 * images + 0.5 * images.roll(1, 0), labels

    with pytest.raises(MisconfigurationException, match="other examples"):
        fit(Plain(), loader(collate_fn=mixup))


def test_batch_statistics_in_a_transfer_hook_are_refused() -> None:
    """The probe goes through the transfer hooks."""

    class Standardizing(Plain):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            images, labels = batch
            return images - images.mean(0), labels

    with pytest.raises(MisconfigurationException, match="other examples"):
        fit(Standardizing())


def test_a_step_without_loss_is_refused() -> None:
    """Skipping by the data is not private."""
    with pytest.raises(MisconfigurationException, match="without a loss"):
        fit(Loss(lambda z, y: None))
    with pytest.raises(MisconfigurationException, match=r'"losses" of shape \(8,\)'):
        fit(Loss(lambda z, y: {"loss": z.mean(), "losses": z}))


def test_a_running_average_that_is_reassigned_is_refused() -> None:
    """A new tensor in a buffer's place is a write to it, also where NaN hides the value."""

    class Average(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean = 0.9 * self.mean + 0.1 * batch[0].mean()
            return super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match="Buffer mean"):
        fit(Average())


def test_ignored_labels_that_a_run_could_not_leave_out_are_refused() -> None:
    """In a list, or as floating-point numbers that become labels in the step."""

    def listed(batch: Any) -> Any:
        images, labels = default_collate(batch)
        return images, labels.tolist()

    class Listed(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            return F.cross_entropy(self(images), torch.tensor(labels))

    with pytest.raises(MisconfigurationException, match="ignored labels"):
        fit(Listed(), loader(collate_fn=listed))

    class Floating(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            return F.cross_entropy(self(images), labels.long())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    images, labels = records().tensors
    callback = fit(Floating(), loader(TensorDataset(images, labels.float())))
    assert callback.probe_result.ignored_labels_couple


def test_coupling_through_negative_values_is_found() -> None:
    """Normalised images have them."""

    class Gated(Plain):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images - images.clamp(max=0).mean(0))

    with pytest.raises(MisconfigurationException, match="One example's gradient"):
        fit(Gated())


class Augmenting(Plain):
    """Noise on the images of every training batch, whatever the module's mode."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, labels = batch
        if self.trainer.training:
            images = images + 0.3 * torch.randn_like(images)
        return images, labels

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return F.cross_entropy(self(images), labels, reduction=self.reduction)


def test_random_augmentation_in_a_transfer_hook_passes() -> None:
    """But a sum behind it is still found, by the size of the gradients."""
    assert fit(Augmenting("mean")).step == 20
    with pytest.raises(MisconfigurationException, match="number of examples"):
        fit(Augmenting("sum"))


def test_a_step_that_fails_on_one_example_is_refused() -> None:
    """Otherwise the unit of every such chunk would silently be left out."""
    squeezed = Loss(lambda z, y: F.cross_entropy(z.squeeze(), y))
    with pytest.raises(MisconfigurationException, match="batch of one example"):
        fit(squeezed)


def test_the_probe_leaves_no_trace() -> None:
    """Generators, metrics, counters, lists, gradients and train modes are as before."""

    class Counting(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.count = [], 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(len(batch[0]))
            self.count += 1
            torch.rand(1), np.random.rand()
            return super().training_step(batch, batch_idx)

    def state(module: Any) -> list[Any]:
        metric = module.accuracy
        return [
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),  # type: ignore[union-attr]
            list(module.seen),
            module.count,
            metric.update_count,
            int(metric.tp),
            [p.grad for p in module.parameters()],
            [m.training for m in module.modules()],
        ]

    class Before(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.state = state(pl_module)

    class Look(Counting):
        def on_train_start(self) -> None:
            self.state = state(self)

    before, module = Before(), Look()
    module.network[2] = nn.Dropout(0.5)
    trainer(before, private()).fit(module, loader())
    assert module.state == before.state


def test_private_data_are_not_looked_at() -> None:
    """The probe's records have the shapes of the data and none of their values."""
    seen: list[Tensor] = []

    class Look(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0].detach().clone())
            return super().training_step(batch, batch_idx)

    data = records()
    data.tensors[0].fill_(7.5)
    callback = private()
    trainer(callback, max_steps=2).fit(Look(), loader(data))
    probed = [batch for batch in seen if not (batch == 7.5).all()]
    assert len(probed) >= 4
    assert not any((batch == 7.5).any() for batch in probed)


def test_wrong_engine_gradients_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's sum is compared with autograd's for every parameter."""
    original = GradientEngine.weighted_sum
    monkeypatch.setattr(
        GradientEngine,
        "weighted_sum",
        lambda self, factors: original(self, factors).index_fill(0, torch.tensor([3]), 9.0),
    )
    with pytest.raises(MisconfigurationException, match=r"network\.0\.weight"):
        fit(Plain())


DRAWS = {
    "torch": (lambda: float(torch.rand(())), lambda n: torch.randperm(n)),
    "numpy": (lambda: np.random.rand(), lambda n: torch.from_numpy(np.random.permutation(n))),
    "random": (random.random, lambda n: torch.tensor(random.sample(range(n), n))),
}


def mixed(images: Tensor, draws: str, probability: float) -> Tensor:
    """MixUp with probability."""
    draw, order = DRAWS[draws]
    if draw() >= probability:
        return images
    share = draw()
    return share * images + (1 - share) * images[order(len(images))]


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("probability", [1.0, 0.3])
@pytest.mark.parametrize("where", ["step", "hook", "losses"])
def test_mixup_while_training_is_refused(draws: str, probability: float, where: str) -> None:
    """It mixes only in train mode, and only in some batches: several seeds are tried there."""

    class MixUp(Plain):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            images, labels = batch
            return (mixed(images, draws, probability) if where == "hook" else images), labels

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            if self.training and where != "hook":
                images = mixed(images, draws, probability)
            each = F.cross_entropy(self(images), labels, reduction="none")
            return {"loss": each.mean(), "losses": each} if where == "losses" else each.mean()

    refuses(MixUp())


def test_rare_mixup_in_collate_is_refused() -> None:
    def collate(batch: Any) -> Any:
        images, labels = default_collate(batch)
        return mixed(images, "torch", 0.3), labels

    refuses(Plain(), loader(collate_fn=collate))


class Changed(Plain):
    """Changes the images of a batch first."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(self.change(batch[0], batch_idx)), batch[1])


def after_the_first(images: Tensor, batch_idx: int) -> Tensor:
    return torch.cat([images[:1], images[1:] + images[:-1]])


def of_pairs(images: Tensor, batch_idx: int) -> Tensor:
    if len(images) % 2:
        return images
    return images + images.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def of_later_batches(images: Tensor, batch_idx: int) -> Tensor:
    return images - images.mean(0) if batch_idx else images


@pytest.mark.parametrize("change", [after_the_first, of_pairs, of_later_batches])
def test_dependence_anywhere_in_the_batch_is_refused(change: Any) -> None:
    """Every kept record is compared, in several splits of the company and several batches."""
    refuses(Changed(change), match="other examples")


def test_what_is_kept_between_batches_is_refused() -> None:
    """A running mean of the batches couples them; a generator of its own hides coupling."""

    class Centered(Plain):
        center = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            self.center = 0.99 * self.center + 0.01 * images.mean(0)
            return F.cross_entropy(self(images - self.center), labels)

    refuses(Centered(), match="from batch to batch")
    generator = np.random.default_rng(0)
    noisy = Changed(lambda images, _: images * float(generator.random()))
    refuses(noisy, match="generator of its own")


SKEWED = torch.tensor([1.0] * 9 + [5.0])
FLAT_HEAD = [nn.Flatten(), nn.Linear(36, 10)]
HEADS = {
    "linear": FLAT_HEAD,
    "conv": [nn.Conv2d(1, 10, 6), nn.Flatten()],
    "linear in the middle": [nn.Linear(6, 2), nn.Conv2d(1, 10, (6, 2)), nn.Flatten()],
}


@pytest.mark.parametrize("head", HEADS)
def test_a_rare_class_weight_is_refused(head: str) -> None:
    """The loss tells its classes and its weights, whatever the head."""
    network = nn.Sequential(*HEADS[head])
    refuses(Net(network, nn.CrossEntropyLoss(weight=SKEWED)), match="class weights")
    nll = lambda z, y: F.nll_loss(z.log_softmax(1), y, weight=SKEWED)  # noqa: E731
    refuses(Net(network, nll), match="class weights")


def normalized_by_weights(z: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(z, y, weight=SKEWED, reduction="none")
    return each.sum() / SKEWED[y].sum()


def test_hand_written_class_weights_are_refused() -> None:
    """Labels of every class are drawn."""
    for head in HEADS.values():
        refuses(Net(nn.Sequential(*head), normalized_by_weights))


@pytest.mark.parametrize("ignored", [-1, 3, 255])
def test_an_ignored_label_is_refused(ignored: int) -> None:
    """Also one that no synthetic record holds."""
    network = nn.Sequential(*FLAT_HEAD)
    loss = lambda z, y: F.cross_entropy(z, y, ignore_index=ignored)  # noqa: E731
    refuses(Net(network, loss), match=f"ignore_index={ignored} divides")


class Tokens(nn.Module):
    """Next-token scores ``[n, 12, 50]``."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(50, 8), nn.Embedding(12, 8)
        self.head = nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        return self.head(self.table(ids) + self.position(positions))


TOKENS = TensorDataset(*[torch.randint(0, 50, (60, 12), generator=torch.Generator())] * 2)


@pytest.mark.parametrize("pad", [0, 3, 49, -1])
def test_a_mean_over_labels_that_count_is_refused(pad: int) -> None:
    """Padding is a small id, the last one, or negative."""

    def masked(scores: Tensor, ids: Tensor) -> Tensor:
        mask = ids != pad
        each = F.cross_entropy(
            scores.transpose(1, 2), ids.clamp(min=0) if pad < 0 else ids, reduction="none"
        )
        return (each * mask).sum() / mask.sum()

    class Shifted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(self.network(batch[0].clamp(min=0)), batch[1])

    refuses(Shifted(Tokens(), masked), DataLoader(TOKENS, batch_size=8))


def test_a_mean_over_each_record_passes() -> None:
    """A loss for each record may weigh and ignore as it likes."""

    def losses(scores: Tensor, ids: Tensor) -> Any:
        each = torch.stack(
            [F.cross_entropy(z, y, ignore_index=0) for z, y in zip(scores, ids, strict=True)]
        ).nan_to_num()
        return {"loss": each.mean(), "losses": each}

    passes(Net(Tokens(), losses), DataLoader(TOKENS, batch_size=8))


def sequence(index: int) -> tuple[Tensor, int]:
    return torch.arange(1, 4 + index % 5), index % 2


def padded(batch: Any) -> Any:
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in batch], batch_first=True)
    return ids, torch.tensor([label for _, label in batch])


class Bag(nn.Module):
    """A mean over time, of what is not padding or of everything."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.table, self.head, self.masked = nn.Embedding(50, 8), nn.Linear(8, 2), masked

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0)[..., None] if self.masked else torch.ones_like(ids)[..., None]
        return self.head((self.table(ids) * mask).sum(1) / mask.sum(1).clamp(min=1))


def test_padding_that_counts_is_refused() -> None:
    """Each layout is seen alone and together with longer ones."""
    data = DataLoader(Records(sequence), batch_size=8, collate_fn=padded)
    passes(Net(Bag(True)), data)
    refuses(Net(Bag(False)), data, match="layouts")


def test_padding_of_texts_is_refused() -> None:
    """Texts differ in length."""

    def collate(batch: Any) -> Any:
        return padded([(torch.tensor([ord(c) % 50 for c in t]), y) for t, y in batch])

    data = DataLoader(Records(lambda i: ("ab" * (1 + i % 3), i % 2)), 8, collate_fn=collate)
    refuses(Net(Bag(False)), data, match="layouts")


def test_batch_statistics_of_images_are_refused() -> None:
    """Synthetic images differ."""

    def collate(centered: bool) -> Any:
        def of(batch: Any) -> Any:
            images = torch.stack([torch.tensor(np.array(x)).float() / 255 for x, _ in batch])
            images = images - images.mean(0) * centered
            return images[:, None], torch.tensor([label for _, label in batch])

        return of

    images = Records(lambda i: (Image.new("L", (6, 6), color=i), i % 2))
    passes(Plain(), DataLoader(images, batch_size=8, collate_fn=collate(False)))
    refuses(Plain(), DataLoader(images, batch_size=8, collate_fn=collate(True)))


@dataclass
class Item:
    """A record that is no container torch knows."""

    image: Tensor
    label: int


def test_ignored_labels_are_found_in_records_of_any_class() -> None:
    items = Records(lambda i: Item(torch.ones(1, 6, 6), i % 2))

    def collate(batch: Any) -> Any:
        return torch.stack([r.image for r in batch]), torch.tensor([r.label for r in batch])

    callback = private()
    data = DataLoader(items, batch_size=8, collate_fn=collate)
    trainer(callback, max_steps=1).fit(Net(nn.Sequential(*FLAT_HEAD)), data)
    assert callback.probe_result.ignored_labels_couple


HOSTILE = {
    "nan_to_num": lambda z, y: torch.nan_to_num(F.cross_entropy(z, y)),
    "clamp": lambda z, y: F.cross_entropy(z, y).clamp(max=10),
    "skipped": lambda z, y: None if torch.isnan(z).any() else F.cross_entropy(z, y),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_overflow_that_reaches_others_is_refused(kind: str) -> None:
    """One record of NaN or 1e6 would switch off the whole batch."""
    refuses(Loss(HOSTILE[kind]), match="NaN")


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_what_training_step_writes_is_refused(kind: str) -> None:
    """Also after the first batch only, and into a frozen parameter."""

    class Writing(Plain):
        def __init__(self) -> None:
            super().__init__()
            if kind == "buffer":
                self.register_buffer("mean", torch.zeros(()))
            else:
                self.mean = nn.Parameter(torch.zeros(()), requires_grad=False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx > 0:
                self.mean.data.copy_(batch[0].mean())
            return super().training_step(batch, batch_idx)

    module = Writing()
    refuses(module, match="mean changes in training_step")
    assert module.mean == 0


class Encoder(nn.Module):
    """Attention over rows, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(6, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images[:, 0]).mean(1))


class StochasticDepth(nn.Module):
    """A branch that is dropped, record by record."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(len(x), 1) < 0.8 if self.training else 1.0
        return x + keep * self.branch(x)


IMAGES = torch.ones(60, 1, 6, 6)
CLASSES = torch.arange(60) % 10
FLAT = nn.Flatten
SOUND = {
    "label smoothing": (FLAT_HEAD, nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
    "equal weights": (FLAT_HEAD, nn.CrossEntropyLoss(weight=torch.full((10,), 2.0)), CLASSES),
    "probabilities": (
        FLAT_HEAD,
        lambda z, y: F.cross_entropy(z, y, weight=SKEWED),
        F.one_hot(CLASSES).float(),
    ),
    "multi-label": (FLAT_HEAD, F.binary_cross_entropy_with_logits, torch.ones(60, 10)),
    "binary": (
        [FLAT(), nn.Linear(36, 1), FLAT(0)],
        lambda z, y: F.binary_cross_entropy_with_logits(z, y.float(), pos_weight=torch.tensor(3.0)),
        CLASSES % 2,
    ),
    "probability of one": (
        [FLAT(), nn.Linear(36, 1), nn.Sigmoid(), FLAT(0)],
        F.binary_cross_entropy,
        torch.ones(60),
    ),
    "regression": ([FLAT(), nn.Linear(36, 1), FLAT(0)], F.mse_loss, torch.ones(60)),
    "attention": ([Encoder()], F.cross_entropy, CLASSES),
    "stochastic depth": ([*FLAT_HEAD, StochasticDepth()], F.cross_entropy, CLASSES),
    "group norm": (
        [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), FLAT(), nn.Linear(64, 10)],
        F.cross_entropy,
        CLASSES,
    ),
}


@pytest.mark.parametrize("kind", SOUND)
def test_sound_modules_pass(kind: str) -> None:
    layers, loss, targets = SOUND[kind]
    passes(Net(nn.Sequential(*layers), loss), loader(TensorDataset(IMAGES, targets)))


def test_a_recurrent_module_passes() -> None:
    """Of the per-example kind that Opacus offers."""
    from opacus.layers import DPLSTM

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = DPLSTM(6, 5, batch_first=True), nn.Linear(5, 10)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.layer(images[:, 0])[0][:, -1])

    passes(Net(Recurrent()), loader(TensorDataset(IMAGES, CLASSES)))


def test_a_mask_as_long_as_the_probes_company_is_shared() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(36, 8))

        def forward(self, images: Tensor, mask: Tensor) -> Tensor:
            return images.flatten(1) @ self.weight @ mask

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing, self.head = Mixing(), nn.Linear(8, 10)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.mixing(images, torch.ones(SIZE, SIZE).tril()))

    passes(Net(Masked()), loader(TensorDataset(IMAGES, CLASSES)))


def test_layers_that_a_module_uses_as_keys_stay_the_same() -> None:
    module = Net(nn.Sequential(*FLAT_HEAD))
    module.rates = {module.network: 2.0}
    passes(module, loader(TensorDataset(IMAGES, CLASSES)))
    assert module.rates[module.network] == 2.0


def test_refusals_name_the_way_out() -> None:
    """For a mask of labels, class names as texts, and a penalty on weights."""
    masks = TensorDataset(IMAGES, torch.zeros(60, 6, 6, dtype=torch.int64))
    refuses(Net(nn.Conv2d(1, 4, 3, padding=1)), loader(masks), match="Even if no label is ignored")
    names = {"cat": 0, "dog": 1}
    named = Net(
        nn.Sequential(*FLAT_HEAD),
        lambda z, y: F.cross_entropy(z, torch.tensor([names[name] for name in y])),
    )
    data = Records(lambda i: (torch.ones(1, 6, 6), ["cat", "dog"][i % 2]))
    refuses(named, DataLoader(data, batch_size=8), match="class labels as integers")
    module = Plain()
    module.training_step = lambda batch, index: (  # type: ignore[method-assign]
        F.cross_entropy(module(batch[0]), batch[1])
        + sum(p.square().sum() for p in module.parameters())
    )
    refuses(module, match="weight_decay")


def test_values_out_of_range_never_reach_the_device() -> None:
    """On a GPU they would end the process."""
    with losses.LossWatch(), pytest.raises(IndexError, match=r"outside \[0, 2\]"):
        F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3]))
    with losses.LossWatch(), pytest.raises(IndexError, match=r"outside \[0, 4\]"):
        nn.Embedding(5, 2)(torch.tensor([5]))
    with losses.LossWatch(), pytest.raises(IndexError, match=r"outside \[0, 1\]"):
        F.binary_cross_entropy(torch.tensor([float("nan")]), torch.zeros(1))


class Mix(nn.Module):
    """A layer without a rule, with a mask ``[8, 8]`` for all records."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x @ (mask * self.weight)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, images: Tensor) -> Tensor:
        return self.mix(images.flatten(1)[:, :8], torch.ones(8, 8).tril())


def test_an_argument_of_as_many_rows_as_the_probe_has_records_passes() -> None:
    passes(Net(Masked()))


class WithCells(nn.Module):
    """Keeps its layers in a list as well, and calls them there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 2)
        self.cells = [self.layer]

    def forward(self, images: Tensor) -> Tensor:
        return self.cells[0](images.flatten(1))


def test_layers_in_a_list_are_the_same_layers_after_the_probe() -> None:
    """Copies would never be trained."""
    network = WithCells()
    passes(Net(network))
    assert network.cells[0] is network.layer
