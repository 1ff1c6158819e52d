import numpy as np
import pytest
import torch

from datamodules import EmbeddedMNIST


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
