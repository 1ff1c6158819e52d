"""Tiny data sets in the files of the published ones, for tests without a network."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest

import datamodules
from datamodules._published import PublishedImages


def fake(
    monkeypatch: pytest.MonkeyPatch,
    dataset: type[PublishedImages],
    root: Path,
    num_train: int = 200,
    num_test: int = 50,
) -> None:
    """Write random images, label i % 10 for image i, and let the class expect these files.

    Args:
        monkeypatch: restores the published checksums after the test.
        dataset: `datamodules.MNIST`, `FashionMNIST` or `CIFAR10`.
        root: folder for `data.root`.
        num_train: training images, a multiple of 5: CIFAR-10 has five files of them.
        num_test: test images.
    """
    write = _cifar10_files if dataset is datamodules.CIFAR10 else _mnist_files
    files = write(num_train, num_test)
    (root / dataset.folder).mkdir(parents=True)
    for name, content in files.items():
        (root / dataset.folder / name).write_bytes(content)
    checksums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(dataset, "checksums", checksums)


def _mnist_files(num_train: int, num_test: int) -> dict[str, bytes]:
    files = {}
    for part, size in (("train", num_train), ("t10k", num_test)):
        for kind, array in zip(("images-idx3", "labels-idx1"), _draw(size, 28, 28), strict=True):
            # IDX: two zeros, 8 for unsigned bytes, the number of dimensions, then each size.
            sizes = np.array(array.shape, ">i4").tobytes()
            files[f"{part}-{kind}-ubyte"] = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
    return files


def _cifar10_files(num_train: int, num_test: int) -> dict[str, bytes]:
    images, labels = _draw(num_train, 3072)
    parts = np.split(np.arange(num_train), 5)
    files = {
        f"data_batch_{number}": pickle.dumps(
            {"data": images[part], "labels": labels[part].tolist()}
        )
        for number, part in enumerate(parts, start=1)
    }
    images, labels = _draw(num_test, 3072)
    return files | {"test_batch": pickle.dumps({"data": images, "labels": labels.tolist()})}


def _draw(size: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(size).integers(0, 256, (size, *shape), np.uint8)
    return images, (np.arange(size) % 10).astype(np.uint8)
