"""A rehearsal: running a module so that nothing of it remains, and noticing what it changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def generators(device: torch.device) -> list[Any]:
    """The state of every global generator, to see whether something was drawn."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)
    numpys = np.random.get_state(legacy=False)["state"]
    return [
        torch.get_rng_state().tolist(),
        on_device.tolist(),
        (numpys["key"].tolist(), numpys["pos"]),
        random.getstate(),
    ]


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors(module).items()}


def seed_everything(seed: int) -> None:
    """Seed torch's, numpy's and Python's generators."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Restore generators, tensors, train modes, gradients and plain attributes afterwards."""
    before = state(module)
    modes = [(m, m.training) for m in module.modules()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors(module).values()}
    attributes = [(m, _plain_attributes(m, memo)) for m in module.modules()]
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            for m, training in modes:
                m.training = training
            for m, plain in attributes:
                m.__dict__.update(plain)
            for name, tensor in tensors(module).items():
                if name in before and tensor.shape == before[name].shape:
                    tensor.data.copy_(before[name])
            for parameter in module.parameters():
                parameter.grad = None


def _plain_attributes(module: nn.Module, memo: dict[int, Any]) -> dict[str, Any]:
    """Copies of what a training step may have counted or collected (metrics keep states so).

    ``memo`` is that of ``copy.deepcopy``, one for all modules: what is shared stays shared.
    """
    kinds = (bool, int, float, str, list, dict, set, tuple, Tensor, type(None))
    internal = nn.Module().__dict__.keys()
    return {
        name: _copy(value, memo)
        for name, value in module.__dict__.items()
        if name not in internal and isinstance(value, kinds)
    }


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    try:
        for part in _parts(value):
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                memo.setdefault(id(part), part.detach().clone())
            elif not isinstance(part, np.ndarray):
                # Others hold it too. A copy of a layer would compute with weights that stay as
                # they are (opacus.layers.DPLSTM keeps a list of its cells).
                memo.setdefault(id(part), part)
        return copy.deepcopy(value, memo)
    except Exception:  # what it holds cannot be copied: at least the container can
        return copy.copy(value)


def _parts(value: Any) -> Iterator[Any]:
    """What a nest of containers holds."""
    if not isinstance(value, dict | list | set | tuple):
        yield value
        return
    for part in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
        yield from _parts(part)
