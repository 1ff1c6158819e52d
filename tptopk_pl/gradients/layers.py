"""Which modules of a model the engine serves, and which it refuses.

Every refusal of a model is collected into one message, an edit for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from tptopk_pl.gradients.rules import rule_for
from tptopk_pl.gradients.tap import Layer, Owned

_RECURRENT: dict[type[nn.Module], str] = {
    nn.LSTM: "opacus.layers.DPLSTM",
    nn.GRU: "opacus.layers.DPGRU",
    nn.RNN: "opacus.layers.DPRNN",
    nn.LSTMCell: "opacus.layers.dp_rnn.DPLSTMCell",
}
_MOVE = (
    "Move it into a submodule of its own whose forward uses it, or, in a network that you cannot "
    "edit, call requires_grad_(False) on it."
)


def find_layers(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[Layer]:
    """The layers that own ``parameters``, in the order of ``module.named_modules()``.

    Raises:
        ValueError: naming each parameter or module that cannot be served, with an edit.
    """
    layers, refusals = _examine(module, parameters)
    if refusals:
        raise ValueError(
            "These parameters cannot be trained privately:\n"
            + "\n".join(f"- {text}" for text in refusals)
        )
    return layers


def layer_refusals(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Each parameter or module that cannot be served, with an edit."""
    return _examine(module, parameters)[1]


def _examine(
    module: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> tuple[list[Layer], list[str]]:
    positions = {id(parameter): i for i, parameter in enumerate(parameters.values())}
    refusals = [text for item in parameters.items() if (text := _parameter_refusal(*item))]
    layers: list[Layer] = []
    covered: set[nn.Module] = set()
    found: set[int] = set()
    for name, child in module.named_modules():
        if child in covered:
            continue
        # A parametrized module or an attention is one whole: its submodules never run alone.
        whole = is_parametrized(child) or isinstance(child, nn.MultiheadAttention)
        owners = list(child.modules()) if whole else [child]
        covered.update(owners)
        # What a submodule owns as well is an alias here (opacus.layers.DPLSTM has such).
        aliases = set() if whole else {id(p) for sub in child.children() for p in sub.parameters()}
        owned = tuple(
            Owned(owner, local, positions[id(parameter)])
            for owner in owners
            for local, parameter in owner._parameters.items()
            if id(parameter) in positions and id(parameter) not in aliases
        )
        if not owned:
            continue
        found.update(item.position for item in owned)
        if text := _module_refusal(child, owned, is_root=child is module):
            refusals.append(f"{name or 'the model'} ({type(child).__name__}): {text}")
        else:
            layers.append(Layer(name or "the model", child, owned, rule_for(child)))
    refusals += [
        f"{name}: it belongs to no submodule of the model."
        for i, name in enumerate(parameters)
        if i not in found
    ]
    return layers, refusals


def _parameter_refusal(name: str, parameter: nn.Parameter) -> str | None:
    if is_lazy(parameter):
        return f"{name}: it is not initialized yet. Run the model once on a synthetic batch first."
    if not parameter.is_floating_point():
        return f"{name}: its dtype is {parameter.dtype}. Use real floating-point parameters."
    if not parameter.requires_grad:
        return f"{name}: it is frozen. Leave it out, or call requires_grad_(True)."
    return None


def _module_refusal(module: nn.Module, owned: Sequence[Owned], *, is_root: bool) -> str | None:
    """Why ``module``, which owns parameters, cannot be served; None if it can."""
    names = ", ".join(item.local for item in owned)
    hooks = (*module._forward_pre_hooks.values(),)
    if is_parametrized(module):
        return (
            "its weight is parametrized. Call "
            "torch.nn.utils.parametrize.remove_parametrizations on it."
        )
    if any(isinstance(hook, WeightNorm | SpectralNorm | BasePruningMethod) for hook in hooks):
        return (
            "a hook computes its weight. Call torch.nn.utils.remove_weight_norm, "
            "remove_spectral_norm or prune.remove on it."
        )
    for kind, replacement in _RECURRENT.items():
        if isinstance(module, kind):
            return f"its gradients by record are not to be had. Use {replacement}."
    if text := _option_refusal(module):
        return text
    if type(module).forward is nn.Module.forward:
        return f"{names} has no forward of its own. {_MOVE}"
    rule = rule_for(module)
    if is_root and rule is None:
        return f"{names} sits on the model itself. {_MOVE}"
    has_children = any(True for child in module.children() for _ in child.parameters())
    if has_children and not isinstance(module, nn.MultiheadAttention):
        return f"{names} sits beside submodules with parameters. {_MOVE}"
    if rule is not None and not {item.local for item in owned} <= {"weight", "bias"}:
        return f"{names} is more than a {rule.kind.__name__} uses. {_MOVE}"
    return None


def _option_refusal(module: nn.Module) -> str | None:
    """Options of single kinds of layers that couple records or hide their gradients."""
    if isinstance(module, _BatchNorm):
        return (
            "it mixes the records of a batch. Call "
            "opacus.validators.ModuleValidator.fix(model), which puts GroupNorm in its place."
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "its running statistics are not private. Set track_running_stats=False."
    if isinstance(module, nn.EmbeddingBag):
        return "it has no dimension of records. Use nn.Embedding and sum over the tokens."
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return f"max_norm={module.max_norm} changes rows by data. Set max_norm=None."
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq=True couples the records. Set scale_grad_by_freq=False."
        if module.sparse:
            return "sparse=True hides the gradient. Set sparse=False."
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        return "its second dimension is the records. Construct with batch_first=True."
    return None
