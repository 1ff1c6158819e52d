"""CIFAR-10: 60,000 colour photographs of ten kinds of objects (Krizhevsky, 2009)."""

import pickle
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torchvision import datasets

from datamodules._published import PublishedImages


class CIFAR10(PublishedImages):
    """50,000 training images, of which `num_val` validate, and 10,000 test images ``[3, 32, 32]``.

    Scaled by published constants: statistics of the records at hand would be a release of their
    own, which no ε accounts for. The files are in ``root/cifar-10-batches-py``.
    """

    source = datasets.CIFAR10
    folder = datasets.CIFAR10.base_folder
    checksums: ClassVar = dict([*datasets.CIFAR10.train_list, *datasets.CIFAR10.test_list])
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def _read(self, train: bool) -> tuple[NDArray[np.uint8], NDArray[np.integer]]:
        names = [name for name in self.checksums if name.startswith("data" if train else "test")]
        # A pickle can run code: it is opened only once its checksum is known to be right.
        batches = [pickle.loads(self._bytes(name), encoding="latin1") for name in names]
        images = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        return images, np.concatenate([batch["labels"] for batch in batches])
