"""The data modules: on the embedded digits, on tiny stand-ins, on real files if there are any."""

import gzip
import hashlib
import os
import shutil
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import datasets
from torchvision.transforms import v2
from torchvision.transforms.functional import to_tensor

from datamodules import CIFAR10, MNIST, EmbeddedMNIST, FashionMNIST
from datamodules._published import PublishedImages
from fake_data import fake
from models import ClassificationModule
from toys import trainer


@pytest.fixture(scope="module")
def mnist() -> EmbeddedMNIST:
    data = EmbeddedMNIST(batch_size=64)
    data.setup("fit")
    return data


def test_sizes_shapes_and_types(mnist):
    assert [len(part) for part in (mnist.train_set, mnist.val_set, mnist.test_set)] == [
        4_000,
        500,
        500,
    ]
    images, labels = next(iter(mnist.train_dataloader()))
    assert images.shape == (64, 1, 28, 28) and images.dtype == torch.float32
    assert labels.shape == (64,) and labels.dtype == torch.int64


def test_every_class_is_in_every_part(mnist):
    """The source is sorted by class: cut without mixing, the test part would hold nines only."""
    for part in (mnist.train_set, mnist.val_set, mnist.test_set):
        share = torch.bincount(part.tensors[1], minlength=10) / len(part)
        assert share.min() > 0.06 and share.max() < 0.14


def test_the_parts_are_disjoint_and_whole(mnist):
    labels = torch.cat([p.tensors[1] for p in (mnist.train_set, mnist.val_set, mnist.test_set)])
    assert torch.bincount(labels).tolist() == [500] * 10
    images = torch.cat([p.tensors[0] for p in (mnist.train_set, mnist.val_set, mnist.test_set)])
    assert len(torch.unique(images.flatten(1), dim=0)) == 5_000


def test_the_split_depends_on_no_global_seed(mnist):
    np.random.seed(7)
    torch.manual_seed(7)
    again = EmbeddedMNIST()
    again.setup("test")
    torch.testing.assert_close(again.test_set.tensors, mnist.test_set.tensors)
    assert mnist.train_set.tensors[1][:10].tolist() == [4, 2, 0, 9, 6, 6, 2, 1, 2, 0]


def test_scaling_uses_the_public_constants(mnist):
    """Black is (0 - 0.1307) / 0.3081, white (1 - 0.1307) / 0.3081, whatever images are at hand."""
    images = mnist.train_set.tensors[0]
    assert images.min().item() == pytest.approx(-0.42421, abs=1e-5)
    assert images.max().item() == pytest.approx(2.82149, abs=1e-5)


def test_only_training_images_are_shuffled(mnist):
    def first_labels(loader) -> list[int]:
        return next(iter(loader))[1].tolist()

    assert first_labels(mnist.train_dataloader()) != first_labels(mnist.train_dataloader())
    for loader in (mnist.val_dataloader, mnist.test_dataloader, mnist.predict_dataloader):
        assert first_labels(loader()) == first_labels(loader())


def test_refuses_an_empty_batch():
    with pytest.raises(ValueError, match="batch_size=0"):
        EmbeddedMNIST(batch_size=0)


PUBLISHED = [MNIST, FashionMNIST, CIFAR10]
DATA = os.environ.get("TPTOPK_DATA")  # root of the published files
needs_data = pytest.mark.skipif(DATA is None, reason="TPTOPK_DATA does not name the data folder")


@pytest.fixture(params=PUBLISHED, ids=lambda dataset: dataset.__name__)
def dataset(request, monkeypatch, tmp_path) -> type[PublishedImages]:
    """A published data set of 200 and 50 images below tmp_path, and no network."""

    def no_network(*args, **kwargs):
        raise URLError("no network")

    fake(monkeypatch, request.param, tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    return request.param


def loaded(data: PublishedImages) -> PublishedImages:
    data.prepare_data()
    data.setup("fit")
    return data


def test_published_images_are_split_and_scaled(dataset, tmp_path):
    data = loaded(dataset(root=str(tmp_path), batch_size=16, num_val=40))
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [160, 40, 50]
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (16, *((3, 32, 32) if dataset is CIFAR10 else (1, 28, 28)))
    assert images.dtype == torch.float32 and labels.dtype == torch.int64
    for channel, (mean, std) in enumerate(zip(data.mean, data.std, strict=True)):
        values = data.train_set.tensors[0][:, channel]
        assert values.min().item() == pytest.approx((0 - mean) / std, abs=1e-5)
        assert values.max().item() == pytest.approx((1 - mean) / std, abs=1e-5)


def test_images_and_labels_are_those_of_torchvision(dataset, monkeypatch, tmp_path):
    """Its own reader is the oracle, for the test images in order and the training images mixed."""
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.CIFAR10, "_load_meta", lambda self: None)
    data = loaded(dataset(root=str(tmp_path), num_val=40))
    order = np.random.default_rng(0).permutation(200)
    ours = [
        torch.cat(pair) for pair in zip(data.train_set.tensors, data.val_set.tensors, strict=True)
    ]
    for train, (images, labels) in ((True, ours), (False, data.test_set.tensors)):
        theirs = dataset.source(tmp_path, train=train)
        scaling = v2.Normalize(data.mean, data.std)
        for place in range(0, len(labels), 7):
            image, label = theirs[order[place] if train else place]
            torch.testing.assert_close(images[place], scaling(to_tensor(image)))
            assert labels[place] == label


def test_the_published_split_depends_on_no_seed_and_no_stage(dataset, tmp_path):
    first = loaded(dataset(root=str(tmp_path), num_val=40))
    torch.manual_seed(7)
    np.random.seed(7)
    again = dataset(root=str(tmp_path), num_val=40)
    again.setup("test")
    for part in ("train_set", "val_set", "test_set"):
        torch.testing.assert_close(getattr(again, part).tensors, getattr(first, part).tensors)


def test_without_validation_images_all_train_and_nothing_validates(dataset, tmp_path):
    """Lightning skips validation, and warns of nothing: a warning would be an error here."""
    data = dataset(root=str(tmp_path), num_val=0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3072 if dataset is CIFAR10 else 784, 10))
    fit = trainer(max_epochs=1)
    fit.fit(ClassificationModule(network), datamodule=data)
    assert len(data.train_set) == 200
    assert "val/loss" not in fit.callback_metrics and fit.global_step == 1


@pytest.mark.parametrize("num_val", [-1, 200])
def test_training_needs_an_image(dataset, tmp_path, num_val):
    with pytest.raises(ValueError, match=rf"num_val={num_val} in \{{0, …, 199\}}"):
        loaded(dataset(root=str(tmp_path), num_val=num_val))


def test_files_are_read_once(dataset, tmp_path):
    """Fit, then test: the second stage finds the images in memory."""
    data = loaded(dataset(root=str(tmp_path), num_val=40))
    train_set = data.train_set
    shutil.rmtree(tmp_path / dataset.folder)
    data.setup("test")
    assert data.train_set is train_set


def test_what_is_there_is_not_downloaded(dataset, monkeypatch, tmp_path):
    """Nor read a second time by torchvision; sound or not, it is the user's to delete."""
    monkeypatch.setattr(dataset, "source", None)
    data = loaded(dataset(root=str(tmp_path), num_val=40))
    (tmp_path / dataset.folder / next(iter(dataset.checksums))).write_bytes(b"")
    data.prepare_data()


def test_a_damaged_file_is_never_used(dataset, tmp_path):
    """Cut short or changed, of whichever part, pickle or not."""
    for name in dataset.checksums:
        path = tmp_path / dataset.folder / name
        sound = path.read_bytes()
        for damaged in (sound[:-1], sound[:-1] + bytes([sound[-1] ^ 1])):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"{path} is damaged \(MD5 \w+\): delete it"):
                loaded(dataset(root=str(tmp_path), num_val=40))
        path.write_bytes(sound)
    loaded(dataset(root=str(tmp_path), num_val=40))


def one_line(data: PublishedImages) -> str:
    with pytest.raises(ValueError) as refusal:
        loaded(data)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_missing_set_is_one_line_that_names_the_folder(dataset, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    message = one_line(dataset(root=str(elsewhere), download=False))
    assert f"{elsewhere / dataset.folder}/" in message and "data.download=true" in message
    message = one_line(dataset(root=str(elsewhere)))
    assert f"that holds {dataset.folder}" in message and "no network" in message
    assert "no network" in one_line(dataset(root=str(elsewhere)))  # nothing to be taken for data


@pytest.mark.parametrize("download", [True, False])
def test_a_root_that_is_a_file_is_one_line(dataset, tmp_path, download):
    (tmp_path / "file").touch()
    message = one_line(dataset(root=str(tmp_path / "file"), download=download))
    assert "Not a directory" in message and "data.root" in message


def test_a_root_that_cannot_be_written_is_one_line(dataset, monkeypatch, tmp_path):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.makedirs", refuse)
    monkeypatch.setattr("torchvision.datasets.utils._get_redirect_url", lambda url, **_: url)
    assert "Permission denied" in one_line(dataset(root=str(tmp_path / "closed")))


def serve(monkeypatch, archives: dict[str, bytes]) -> list[str]:
    """Let torchvision download these; returns the list of names that it asks for."""
    asked = []

    def retrieve(url, path, chunk_size=0):
        name = url.rpartition("/")[2]
        asked.append(name)
        Path(path).write_bytes(archives[name])

    monkeypatch.setattr("torchvision.datasets.utils._get_redirect_url", lambda url, **_: url)
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", retrieve)
    return asked


def test_a_download_broken_off_is_taken_up_again(monkeypatch, tmp_path):
    """A part of an archive stays on disk: the next run replaces it."""
    fake(monkeypatch, MNIST, tmp_path / "server")
    archives = {
        f"{path.name}.gz": gzip.compress(path.read_bytes())
        for path in (tmp_path / "server" / MNIST.folder).iterdir()
    }
    checksums = [(name, hashlib.md5(content).hexdigest()) for name, content in archives.items()]
    monkeypatch.setattr(datasets.MNIST, "resources", checksums)
    last = list(archives)[-1]
    serve(monkeypatch, archives | {last: archives[last][:-5]})
    data = MNIST(root=str(tmp_path), num_val=40)
    assert "corrupted" in one_line(data)
    asked = serve(monkeypatch, archives)
    assert len(loaded(MNIST(root=str(tmp_path), num_val=40)).train_set) == 160
    assert asked == [last]
    loaded(MNIST(root=str(tmp_path), num_val=40))
    assert asked == [last]  # what is there is not downloaded again


@needs_data
@pytest.mark.parametrize(
    ("dataset", "train_counts", "first_labels"),
    [
        (
            MNIST,
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            [[1, 7, 1, 0, 9, 4, 6, 9, 3, 4], [6, 1, 5, 1, 0, 1, 9, 8, 3, 5]],
        ),
        (
            FashionMNIST,
            [6000] * 10,
            [[7, 7, 1, 7, 4, 1, 6, 3, 0, 7], [2, 3, 6, 5, 0, 3, 7, 9, 4, 7]],
        ),
        (
            CIFAR10,
            [5000] * 10,
            [[9, 2, 1, 2, 1, 3, 1, 4, 0, 5], [0, 1, 3, 2, 8, 6, 2, 1, 4, 2]],
        ),
    ],
)
def test_published_files(dataset, train_counts, first_labels):
    """Sizes, classes and split of the real files, scaled to mean 0 and deviation 1."""
    data = loaded(dataset(root=DATA, download=False))
    parts = [data.train_set, data.val_set, data.test_set]
    assert [len(part) for part in parts] == [sum(train_counts) - 5_000, 5_000, 10_000]
    train, val, test = (torch.bincount(part.tensors[1]) for part in parts)
    assert (train + val).tolist() == train_counts
    assert val.min() > 420 and test.min() > 890
    assert [part.tensors[1][:10].tolist() for part in parts[:2]] == first_labels
    assert data.train_set.tensors[0].mean().abs() < 0.001
    assert data.train_set.tensors[0].std() == pytest.approx(1, abs=0.001)
