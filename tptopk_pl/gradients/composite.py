"""Calling a module that has no rule: one copy of each weight per record, under ``vmap``.

The original forward runs once, mapped over the records, so a dropout inside draws once and the
backward pass sees the same draw. Autograd then delivers the gradient of each record's own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tptopk_pl.gradients.chunk import Chunk
from tptopk_pl.gradients.contributions import Rows
from tptopk_pl.gradients.precision import exact, full_precision
from tptopk_pl.gradients.tap import Layer, substituted

_ATTENTION = nn.MultiheadAttention


def composite(
    layer: Layer, chunk: Chunk, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The output of ``layer``, whose ``forward`` is given, for the records of ``chunk``.

    Tensor arguments whose first dimension is the number of records are mapped, others shared. One
    that was of another length before (a mask ``[L, L]``, say) stays shared, even where L = n.

    Raises:
        ValueError: if no argument has that first dimension, if one no longer has (a selection of
            records), or if the module cannot be mapped.
    """
    detached = {item.position: item.parameter.detach() for item in layer.owned}
    active = [position for position in detached if chunk.is_active(position)]
    if not active:
        with substituted(layer.owned, [detached[item.position] for item in layer.owned]):
            return forward(*args, **kwargs)
    shared: set[int] = set()
    if type(layer.module).forward is _ATTENTION.forward:
        arguments = signature(_ATTENTION.forward).bind(layer.module, *args, **kwargs).arguments
        forward, args, kwargs, shared = _attention_call(forward, chunk.num_records, arguments)
    values, spec = tree_flatten((args, kwargs))
    call = f"call {chunk.calls[layer.name]}"
    chunk.calls[layer.name] += 1
    tensors_at = {
        f"{name} in {call}": value
        for name, value in _named_tensors(forward, args, kwargs).items()
        if id(value) not in shared
    }
    weights = {position: _copies(chunk, position, detached[position]) for position in active}
    structure: list[Any] = []

    # The module sees a batch of one record, as it is written for batches. Arguments that were one
    # tensor (query, key and value, say) stay one tensor inside.
    def one_record(weights: dict[int, Tensor], rows: dict[int, Tensor]) -> list[Tensor]:
        rows = {key: row.unsqueeze(0) for key, row in rows.items()}
        inner_args, inner_kwargs = tree_unflatten([rows.get(id(v), v) for v in values], spec)
        tensors = [weights.get(i.position, detached[i.position]) for i in layer.owned]
        with substituted(layer.owned, tensors):
            out, out_spec = tree_flatten(forward(*inner_args, **inner_kwargs))
        # vmap returns tensors alone: what else there is (a None) is put back outside.
        structure[:] = [_constant(leaf) for leaf in out], out_spec
        return [_only_record(leaf) for leaf in out if isinstance(leaf, Tensor)]

    with _explained(layer), _mappable_attention():
        rows = _rows_among(tensors_at, chunk.num_records, layer.by_record)
        tensors = iter(torch.vmap(one_record, randomness="different")(weights, rows))
    others, out_spec = structure
    return tree_unflatten([next(tensors) if o is None else o[0] for o in others], out_spec)


def _named_tensors(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """The tensors (not scalars) in each argument, under its name whether it was given or not."""
    names = [*signature(forward).parameters, *map(str, range(len(args)))]
    return {
        f"{name}[{i}]": leaf
        for name, argument in {**dict(zip(names, args, strict=False)), **kwargs}.items()
        for i, leaf in enumerate(tree_leaves(argument))
        if isinstance(leaf, Tensor) and leaf.ndim > 0
    }


def _rows_among(
    tensors: dict[str, Tensor], n: int, by_record: dict[str, bool]
) -> dict[int, Tensor]:
    """Those ``tensors`` that are ``[n, ...]``, by id; ``by_record`` is brought up to date."""
    rows = {place for place, t in tensors.items() if len(t) == n and by_record.get(place, True)}
    if not rows:
        raise ValueError(f"no argument has a first dimension of {n}, one row")
    for place, tensor in tensors.items():
        if len(tensor) != n and by_record.get(place):
            raise ValueError(f"{place} has shape {tuple(tensor.shape)}, not one row of {n}")
        if n > 1 or place not in rows:  # one row for one record says nothing
            by_record.setdefault(place, place in rows)
    return {id(tensors[place]): tensors[place] for place in rows}


def _copies(chunk: Chunk, position: int, parameter: Tensor) -> Tensor:
    """``parameter`` once per record, ``[n, ...]`` without memory; gradients go to ``chunk``."""
    copies = parameter.expand(chunk.num_records, *parameter.shape).requires_grad_()

    def deliver(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        with full_precision(grad.device):
            selection = chunk.selections[position]
            chunk.add(position, Rows(selection.gather(exact(grad).flatten(1))))

    copies.register_post_accumulate_grad_hook(deliver)
    return copies


def _constant(leaf: Any) -> tuple[Any] | None:
    """What is no tensor is the same for all records, and kept; None for a tensor."""
    if isinstance(leaf, Tensor):
        return None
    if not isinstance(leaf, bool | int | float | str | None):
        raise ValueError(f"it returns a {type(leaf).__name__}, not tensors in a tuple or dict")
    return (leaf,)


def _only_record(out: Tensor) -> Tensor:
    """``[1, ...]`` to ``[...]``."""
    if out.ndim == 0 or len(out) != 1:
        raise ValueError(f"for one record its output has shape {tuple(out.shape)}, not one row")
    return out.squeeze(0)


@contextmanager
def _explained(layer: Layer) -> Iterator[None]:
    """Turn a failure of ``vmap`` into a ValueError that names the module and says what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"{layer.name} ({type(layer.module).__name__}) has no rule for its gradients by "
            f"record, and cannot be mapped over the records: {error}. Let it take and return one "
            "row per record, build it from layers of torch.nn, or freeze its parameters with "
            "requires_grad_(False)."
        ) from error


@contextmanager
def _mappable_attention() -> Iterator[None]:
    """Attention in its plain form: the fused kernels have no batching rule, or no gradient."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _attention_call(
    forward: Callable[..., Any], n: int, arguments: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[()], dict[str, Any], set[int]]:
    """Forward and arguments (by name) of an attention, and the ids of what records share.

    A mask ``[L, S]`` is everybody's, even where L = n; ``[n·heads, L, S]`` is cut by record.
    """
    del arguments["self"]
    mask = arguments.get("attn_mask")
    if mask is None or mask.ndim != 3:
        return forward, (), arguments, {id(mask)}
    arguments["attn_mask"] = mask.reshape(n, -1, *mask.shape[1:])
    return partial(_with_mask_by_head, forward), (), arguments, set()


def _with_mask_by_head(forward: Callable[..., Any], **kwargs: Any) -> Any:
    """Attention on one record whose mask came as ``[1, heads, L, S]``."""
    return forward(**{**kwargs, "attn_mask": kwargs["attn_mask"].flatten(0, 1)})
