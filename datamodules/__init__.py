"""Data of the reference application, one file per data set."""

from datamodules.embedded_mnist import EmbeddedMNIST

__all__ = ["EmbeddedMNIST"]
