"""MNIST: 70,000 handwritten digits (LeCun, Cortes and Burges)."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torchvision import datasets

from datamodules._published import PublishedImages


class MNIST(PublishedImages):
    """60,000 training images, of which `num_val` validate, and 10,000 test images ``[1, 28, 28]``.

    Scaled by published constants: statistics of the records at hand would be a release of their
    own, which no ε accounts for. The files are in ``root/MNIST/raw``.
    """

    source = datasets.MNIST
    folder = "MNIST/raw"
    # torchvision checks the archives; these are the unpacked files.
    checksums: ClassVar = {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    }
    mean, std = (0.1307,), (0.3081,)

    def _read(self, train: bool) -> tuple[NDArray[np.uint8], NDArray[np.integer]]:
        part = "train" if train else "t10k"
        # The headers are the magic number and one size per dimension, four bytes each.
        images = np.frombuffer(self._bytes(f"{part}-images-idx3-ubyte"), np.uint8, offset=16)
        labels = np.frombuffer(self._bytes(f"{part}-labels-idx1-ubyte"), np.uint8, offset=8)
        return images.reshape(-1, 1, 28, 28), labels
