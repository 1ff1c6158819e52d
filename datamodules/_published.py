"""Published image sets in the layout of torchvision, each file checked before it is used."""

import hashlib
from http.client import HTTPException
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset
from torchvision.datasets import VisionDataset

from datamodules._in_memory import InMemoryImages, scaled


class PublishedImages(InMemoryImages):
    """An image set that torchvision downloads: a subclass names its files and reads them.

    The validation images are a part of the training images, chosen by one fixed permutation; the
    test images are left as they are. Every process of a run loads its own copy.

    Args:
        root: folder that holds ``MNIST/raw``, ``FashionMNIST/raw`` or ``cifar-10-batches-py``.
        batch_size: images per forward pass. In a private run the expected batch is another number,
            the callback's `expected_batch_size`.
        num_val: training images set aside for validation; with 0 all train and none validates.
        num_workers: worker processes of each loader; the images are in memory, 0 is fastest.
        download: whether to download what is missing; what is there is only read.
    """

    source: ClassVar[type[VisionDataset]]
    folder: ClassVar[str]  # of the files, below root
    checksums: ClassVar[dict[str, str]]  # MD5 of each file
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __init__(
        self,
        root: str = "data",
        batch_size: int = 512,
        num_val: int = 5000,
        num_workers: int = 0,
        download: bool = True,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.root = Path(root).expanduser()
        self.num_val = num_val
        self.download = download
        self._note = "" if download else " With data.download=true it would be downloaded."

    def prepare_data(self) -> None:
        """Download the files if one is missing.

        If that fails, `setup` says so: raised here, on one process, the failure would leave the
        others waiting. The next run tries again; no file is used unchecked.
        """
        if not self.download:
            return
        try:
            if not all((self.root / self.folder / name).is_file() for name in self.checksums):
                self.source(self.root, download=True)
        except (OSError, RuntimeError, HTTPException) as error:
            self._note = f" The download failed: {' '.join(str(error).split())}"

    def _load(self) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
        images, labels = self._read(train=True)
        num_train = len(labels) - self.num_val
        if not 0 < num_train <= len(labels):
            raise ValueError(f"Expected num_val={self.num_val} in {{0, …, {len(labels) - 1}}}.")
        order = np.random.default_rng(0).permutation(len(labels))
        parts = [(images[part], labels[part]) for part in np.split(order, [num_train])]
        train, val, test = (
            TensorDataset(scaled(x, self.mean, self.std), torch.tensor(y, dtype=torch.int64))
            for x, y in (*parts, self._read(train=False))
        )
        return train, val, test

    def _read(self, train: bool) -> tuple[NDArray[np.uint8], NDArray[np.integer]]:
        """Images ``[n, C, H, W]`` and labels ``[n]`` of one part, read through `_bytes`."""
        raise NotImplementedError

    def _bytes(self, name: str) -> bytes:
        """Content of one file.

        Raises:
            ValueError: if it cannot be read or is not what was published.
        """
        path, dataset = self.root / self.folder / name, type(self).__name__
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"Cannot read {dataset} file {path} ({error.strerror}): set data.root to the "
                f"folder that holds {self.folder}, or put it there.{self._note}"
            ) from error
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != self.checksums[name]:
            raise ValueError(
                f"{dataset} file {path} is damaged (MD5 {found}): delete it so that it is "
                "downloaded again, or set data.root."
            )
        return content
