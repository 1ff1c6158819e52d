"""The networks that are measured, with the batch and the inputs of each."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torchvision.models.resnet import BasicBlock

from models import DeepCNN, ResNet, SmallCNN

NUM_CLASSES = 10
_VOCABULARY, _NUM_TOKENS = 1000, 64


@dataclass(frozen=True)
class Workload:
    """A network, the batch size to measure it with, and its inputs: ``n`` to ``[n, ...]``."""

    network: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch_size: int


def workload(name: str) -> Workload:
    """The workload of a name in `NETWORKS`, or of ``mlp_<width>``.

    Raises:
        ValueError: if there is none.
    """
    if name in NETWORKS:
        return NETWORKS[name]
    if match := re.fullmatch(r"mlp_([1-9]\d*)", name):
        return Workload(partial(mlp, int(match[1])), partial(_normal, 784), 64)
    raise ValueError(f"Expected model={name!r} in {{{', '.join(NETWORKS)}, mlp_<width>}}.")


def mlp(width: int) -> nn.Module:
    """784 - width - width - 10 with ReLU."""
    layers: list[nn.Module] = [nn.Linear(784, width), nn.ReLU()]
    layers += [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """Pre-norm attention, then a perceptron of four times the width: ``[n, t, w]`` to the same.

    Attention is made of plain Linear layers, which Opacus can take.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Residual attention and perceptron."""
        normed = self.norm(x)
        heads = [self._split(layer(normed)) for layer in (self.query, self.key, self.value)]
        x = x + self.out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.perceptron(x)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Transformer(nn.Module):
    """Tokens ``[n, 64]`` to scores ``[n, 10]``: two blocks of width 128 and a mean over tokens."""

    def __init__(self, width: int = 128, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Embedding(_NUM_TOKENS, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores; the positions are those of each record, as Opacus needs them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(positions)).mean(dim=1))


class _OutOfPlaceBlock(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + identity)


def _resnet18() -> nn.Module:
    """ResNet-18 that changes no activation in place: Opacus' hooks cannot take one that does."""
    network = ResNet(18)
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
        if isinstance(module, BasicBlock):
            module.__class__ = _OutOfPlaceBlock
    return network


def _normal(*shape_and_n: int) -> Tensor:
    *shape, n = shape_and_n
    return torch.randn(n, *shape)


def _tokens(n: int) -> Tensor:
    return torch.randint(_VOCABULARY, (n, _NUM_TOKENS))


NETWORKS = {
    "mnist_cnn": Workload(SmallCNN, partial(_normal, 1, 28, 28), 512),
    "cifar_cnn": Workload(DeepCNN, partial(_normal, 3, 32, 32), 256),
    "mlp": Workload(partial(mlp, 1000), partial(_normal, 784), 256),
    "resnet18": Workload(_resnet18, partial(_normal, 3, 64, 64), 16),
    "transformer": Workload(Transformer, _tokens, 64),
}
