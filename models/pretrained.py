"""Public weights for a network, by name and shape; a head of another size stays new."""

import hashlib
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

_PREFIXES = ("network.", "module.")  # of ClassificationModule and of DistributedDataParallel
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm


def load_public_weights(network: nn.Module, path: str) -> dict[str, Any]:
    """Load the weights in a file into ``network``, in place.

    Every parameter must be found, but for those of the head, the last layer: it is loaded whole or
    not at all. What the file holds beyond the network is left out, with a warning unless it is
    BatchNorm's running statistics.

    Args:
        network: its state is changed only if this succeeds.
        path: a state dict (.pt, .pth) or a Lightning checkpoint (.ckpt).

    Returns:
        ``path``, ``sha256`` of the file, and how many numbers are in the parameters that were
        loaded (``num_loaded``) and that were not (``num_new``).

    Raises:
        ValueError: if the file is missing or unreadable, or holds another kind of network.
    """
    content = _read(path)
    own, parameters = network.state_dict(), dict(network.named_parameters())
    found = {_stripped(name, own): tensor for name, tensor in _tensors(content, path).items()}
    fitting = {n: found[n] for n in own if n in found and _like(found[n], own[n])}
    new = [name for name in parameters if name not in fitting]
    head = _last_layer(parameters)
    if unmatched := [name for name in new if name not in head]:
        raise ValueError(
            f"model.pretrained={path!r} has no match, by name and shape, for {len(unmatched)} of "
            f"{len(parameters)} parameters ({_first(unmatched)}): give a file with these, or use a "
            "network of the same kind."
        )
    if new:
        fitting = {name: tensor for name, tensor in fitting.items() if name not in head}
    rest = [n for n in found if n not in own and n.rpartition(".")[2] not in _STATISTICS]
    if rest:
        rank_zero_warn(f"model.pretrained={path!r} holds more than the network: {_first(rest)}.")
    network.load_state_dict(fitting, strict=False)
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    num_loaded = sum(size for name, size in sizes.items() if name in fitting)
    return {
        "path": path,
        "sha256": hashlib.sha256(content).hexdigest(),
        "num_loaded": num_loaded,
        "num_new": sum(sizes.values()) - num_loaded,
    }


def _read(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(
            f"model.pretrained={path!r} cannot be read ({error.strerror}): give the path of a "
            "file of public weights, or null."
        ) from error


def _tensors(content: bytes, path: str) -> dict[str, Tensor]:
    """The file's tensors by name; nothing in it is executed."""
    try:
        state = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever an unpickler meets in a file that is not its own
        raise ValueError(
            f"model.pretrained={path!r} is no file of weights: give one that torch.save wrote, "
            "of a state dict or a checkpoint of tensors and plain types."
        ) from error
    state = state if isinstance(state, Mapping) else {}
    if any("TwoPhaseSupport" in str(name) for name in state.get("callbacks", {})):
        raise ValueError(
            f"model.pretrained={path!r} is a checkpoint of training on private records, whose ε "
            "would not be counted: go on with it by --ckpt_path, or give public weights."
        )
    state = state.get("state_dict", state)
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if not tensors:
        raise ValueError(
            f"model.pretrained={path!r} holds no tensors by name: give a state dict, or a "
            "checkpoint that has one under state_dict."
        )
    odd = [name for name, tensor in tensors.items() if not _is_sound(tensor)]
    if odd:
        raise ValueError(
            f"model.pretrained={path!r} has values that are not finite, or sparse tensors, in "
            f"{_first(odd)}: give sound weights."
        )
    return tensors


def _is_sound(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and bool(tensor.isfinite().all())


def _like(tensor: Tensor, own: Tensor) -> bool:
    same_kind = tensor.is_floating_point() == own.is_floating_point()
    return tensor.shape == own.shape and same_kind


def _stripped(name: str, own: Iterable[str]) -> str:
    """``name`` as the network would say it."""
    while name not in own and name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def _last_layer(parameters: Iterable[str]) -> list[str]:
    """Names of the parameters of the layer that is defined last."""
    names = list(parameters)
    layer = names[-1].rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == layer]


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
