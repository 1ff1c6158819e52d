"""Fashion-MNIST: 70,000 pictures of clothes (Xiao, Rasul and Vollgraf, arXiv 1708.07747)."""

from typing import ClassVar

from torchvision import datasets

from datamodules.mnist import MNIST


class FashionMNIST(MNIST):
    """60,000 training images, of which `num_val` validate, and 10,000 test images ``[1, 28, 28]``.

    Scaled by published constants: statistics of the records at hand would be a release of their
    own, which no ε accounts for. The files are in ``root/FashionMNIST/raw``.
    """

    source = datasets.FashionMNIST
    folder = "FashionMNIST/raw"
    checksums: ClassVar = {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    }
    mean, std = (0.2860,), (0.3530,)
