"""Which of its options each layer takes: measured, on synthetic signals of the layer's own sizes.

No rule from sizes alone is right: the fastest way depends on processor, libraries and support. What
is chosen changes a gradient by rounding at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn

from tptopk_pl.gradients.contributions import Contribution, Selection
from tptopk_pl.gradients.precision import full_precision
from tptopk_pl.gradients.tap import Layer, Signal

_RECORDS = {"cpu": 16}  # measured at once: enough for the loops that run over records
_RECORDS_ELSEWHERE = 128
_REPEATS = 3
_LONG = 0.1  # seconds: what takes longer is measured well enough by one run

# Seconds that a layer must still have before it for a compiled loop to be made, which takes some 3.
_COMPILING_PAYS = 15.0


def fastest(layer: Layer, selections: list[Selection], records_to_come: float) -> dict[str, str]:
    """The name of the fastest option by local parameter name, where there are several.

    Args:
        layer: a layer with a rule that has been called.
        selections: by parameter position.
        records_to_come: for how many records the choice will be used.
    """
    assert layer.rule is not None
    x, g = (_synthetic(signal, layer.module) for signal in layer.signals)
    with full_precision(g.device):
        gradients = layer.rule.gradients(layer.module, x, g)
        choices = {}
        for item in layer.owned:
            selection = selections[item.position]
            options = dict(gradients[item.local](selection))
            fused = options.pop("fused", None)
            if len(options) == 1 or selection.num_active == 0:
                continue
            seconds = _seconds(options, g)
            best = min(seconds, key=seconds.__getitem__)
            if fused and seconds[best] / len(g) * records_to_come > _COMPILING_PAYS:
                _once(fused, torch.ones(len(g), dtype=g.dtype, device=g.device))  # compiles
                seconds |= _seconds({"fused": fused}, g)
            choices[item.local] = min(seconds, key=seconds.__getitem__)
    return choices


def _synthetic(signal: Signal, module: nn.Module) -> Tensor:
    """A batch of normal numbers (or of tokens, for an embedding) like ``signal``."""
    n = _RECORDS.get(signal.device.type, _RECORDS_ELSEWHERE)
    generator = torch.Generator(signal.device).manual_seed(0)
    size, device = (n, *signal.shape), signal.device
    if not signal.dtype.is_floating_point:
        assert isinstance(module, nn.Embedding)
        return torch.randint(module.num_embeddings, size, generator=generator, device=device)
    return torch.randn(size, generator=generator, device=device, dtype=signal.dtype)


def _seconds(options: dict[str, Callable[[], Contribution]], g: Tensor) -> dict[str, float]:
    """Seconds that each option takes for the records of ``g``, the best of several runs."""
    factors = torch.ones(len(g), dtype=g.dtype, device=g.device)
    best = {name: _once(make, factors) for name, make in options.items()}  # and warm up
    quickest = min(best.values(), default=0.0)
    for name, make in options.items():
        if best[name] < min(4 * quickest, _LONG):
            best[name] = min(_once(make, factors) for _ in range(_REPEATS))
    return best


def _once(make: Callable[[], Contribution], factors: Tensor) -> float:
    _wait(factors.device)
    start = perf_counter()
    try:
        contribution = make()
        contribution.square_norms()
        contribution.weighted_sum(factors)
    except Exception:  # memory that runs out, most likely: any other option is better
        return math.inf
    _wait(factors.device)
    return perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
