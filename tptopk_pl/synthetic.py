"""Synthetic records: the structure, shapes and types of real ones, and none of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map

Fill = Callable[[torch.Tensor], torch.Tensor]


def synthetic_record(record: Any, *, fill: Fill | None = None, text: str = "") -> Any:
    """A record of the same structure, shapes and types, and none of the values.

    Args:
        record: any nest of tensors, arrays, numbers, strings, images, dataclasses and the like.
        fill: what a tensor becomes; zeros by default.
        text: what a string becomes.

    Raises:
        ValueError: if the record holds an object that cannot be made blank.
    """
    fill = fill or torch.zeros_like

    def blank(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, torch.Tensor):
            return fill(leaf)
        if isinstance(leaf, Enum):
            members = list(type(leaf))
            return members[int(fill(torch.zeros((), dtype=torch.int64))) % len(members)]
        if isinstance(leaf, bool | int | float) or _is_numeric(leaf, np.generic):
            return type(leaf)(fill(torch.as_tensor(leaf)).item())
        if _is_numeric(leaf, np.ndarray):  # copied: torch refuses negative strides
            return fill(torch.from_numpy(leaf.copy())).numpy()
        if isinstance(leaf, np.ndarray):
            return np.zeros_like(leaf)
        if is_image(leaf):
            return _image(leaf, fill)
        if isinstance(leaf, str):
            return type(leaf)(text)
        if isinstance(leaf, bytes):
            return type(leaf)(text.encode())
        return _object(leaf, lambda part: synthetic_record(part, fill=fill, text=text))

    return tree_map(blank, record)


def _image(image: Any, fill: Fill) -> Any:
    """Of the same mode and size, without palette and metadata."""
    from PIL.Image import frombytes

    wide = image.mode in ("1", "F", "I") or image.mode.startswith("I;")  # not of bytes
    mode = "L" if wide else image.mode
    bands = 1 if wide else len(image.getbands())
    pixels = fill(torch.zeros(image.height, image.width, bands, dtype=torch.uint8))
    return frombytes(mode, image.size, pixels.numpy().tobytes()).convert(image.mode)


def _object(leaf: Any, blank: Callable[[Any], Any]) -> Any:
    """Any other object, part by part: never a copy, which would carry real values along."""
    if is_dataclass(leaf):
        parts = {f.name: getattr(leaf, f.name) for f in fields(leaf)}
    else:
        parts = getattr(leaf, "__dict__", {})
    try:
        if not parts:
            return type(leaf)()
        made = object.__new__(type(leaf))
        for name, part in parts.items():
            object.__setattr__(made, name, blank(part))
        return made
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"A record holds a {type(leaf).__name__}, of which no synthetic one can be made: "
            "return tensors, numbers, strings, images, or containers of these."
        ) from error


def _is_numeric(leaf: Any, kind: type[np.generic] | type[NDArray[Any]]) -> bool:
    return isinstance(leaf, kind) and leaf.dtype.kind in "biuf"


def is_image(leaf: Any) -> bool:
    """Whether it is a PIL image, without importing PIL."""
    return hasattr(leaf, "point") and hasattr(leaf, "mode")
