"""Data of the reference application, one file per data set."""

from datamodules.cifar10 import CIFAR10
from datamodules.embedded_mnist import EmbeddedMNIST
from datamodules.fashion_mnist import FashionMNIST
from datamodules.mnist import MNIST

__all__ = ["CIFAR10", "MNIST", "EmbeddedMNIST", "FashionMNIST"]
