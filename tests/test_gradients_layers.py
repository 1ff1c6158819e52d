"""Every kind of layer against one record at a time under autograd (see reference.py)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import reference
from tptopk_pl.gradients import GradientEngine, contributions
from tptopk_pl.support import Support

EXAMPLES = settings(max_examples=25, derandomize=True, deadline=None, database=None)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def random_support(model: nn.Module, ratio: float, seed: int = 0) -> Support:
    sizes = tuple(p.numel() for p in trained(model).values())
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(sum(sizes), generator=generator) < ratio
    return Support(chosen.nonzero().flatten(), sizes)


def scalar(out: Any, record: int) -> Tensor:
    """A loss of one record that is not linear in the output, the same alone and in company."""
    if isinstance(out, tuple):
        return sum(scalar(item, record) for item in out if item is not None)
    row = out[record]
    weights = torch.linspace(-1, 1, row.numel(), dtype=row.dtype).view(row.shape)
    return (row * weights + 0.3 * row.square()).sum()


def assert_matches(
    model: nn.Module,
    call: Callable[[nn.Module, Any], Any],
    inputs: tuple[Tensor, ...],
    *,
    support: Support | None = None,
    units: list[int] | None = None,
    option: str = "",
    tolerance: float = 1e-5,
) -> None:
    """Norms, a weighted sum and the single gradients by record, engine against reference.

    Layers that have the `option` take it, others their first.
    """
    n = len(inputs[0])
    units = list(range(n)) if units is None else units
    num_units = max(units) + 1
    plain = copy.deepcopy(model)

    def loss_of_record(record: int) -> Tensor:
        return scalar(call(plain, *[t[record : record + 1] for t in inputs]), 0)

    rows = reference.record_gradients(loss_of_record, list(trained(plain).values()), n)
    expected = reference.unit_gradients(rows, units, num_units)
    if support is not None:
        expected = expected[:, support.indices]

    whole = nn.ModuleList([model])
    engine = GradientEngine(whole, trained(model))
    engine.set_support(support)
    engine.choices = {f"{name}.weight": option for name, _ in whole.named_modules()}
    engine.attach()
    engine.begin(torch.tensor(units), num_units)
    out = call(model, *inputs)
    loss = sum(scalar(out, record) for record in range(n))
    if loss.requires_grad:
        loss.backward()
    norms = engine.norms()
    scale = max([1e-3, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=tolerance, atol=tolerance * scale)
    factors = torch.rand(num_units, generator=torch.Generator().manual_seed(7)).to(norms.dtype)
    for weights in (factors, *torch.eye(num_units, dtype=norms.dtype)):
        torch.testing.assert_close(
            engine.weighted_sum(weights),
            weights @ expected,
            rtol=tolerance,
            atol=tolerance * scale * num_units,
        )
    assert not engine.bypassed
    assert all(p.grad is None for p in trained(model).values())
    engine.end()
    engine.detach()


def check(model: nn.Module, *inputs: Tensor, call: Any = None, units: Any = None) -> None:
    """Dense and masked, many coordinates and few, in each way that needs no compiler."""
    call = call or (lambda module, *args: module(*args))
    for option in ("rows", "gram"):
        assert_matches(model, call, inputs, units=units, option=option)
    for ratio, option in ((0.3, "rows"), (0.3, "sparse"), (0.03, "sparse")):
        support = random_support(model, ratio)
        assert_matches(model, call, inputs, units=units, support=support, option=option)


def batch(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@EXAMPLES
@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(1, 4), max_size=2), st.booleans())
def test_linear(inputs: int, outputs: int, steps: list[int], bias: bool) -> None:
    check(nn.Linear(inputs, outputs, bias=bias), batch(4, *steps, inputs))


@st.composite
def convolutions(draw: Any, transposed: bool) -> tuple[nn.Module, Tensor]:
    dims = draw(st.integers(1, 3))
    sizes = [st.integers(1, 3) for _ in range(dims)]
    groups = draw(st.sampled_from([1, 1, 2]))
    kernel, stride, dilation = (draw(st.tuples(*sizes)) for _ in range(3))
    options: dict[str, Any] = {"groups": groups, "dilation": dilation, "bias": draw(st.booleans())}
    channels = (groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)))
    if transposed:
        bounds = zip(stride, dilation, strict=True)
        options["output_padding"] = tuple(draw(st.integers(0, max(p) - 1)) for p in bounds)
        padding = draw(st.tuples(*[st.integers(0, 1)] * dims))
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        length = 4
    else:
        modes = ["zeros", "zeros", "circular", "replicate", "reflect"]
        options["padding_mode"] = draw(st.sampled_from(modes))
        padding = draw(st.sampled_from(["valid", "same", 0, 1, 2]))
        if padding == "same":
            stride = (1,) * dims
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        length = 7
    layer = kind(*channels, kernel, stride=stride, padding=padding, **options)
    lengths = [length + i for i in range(dims)]
    return layer, batch(3, channels[0], *lengths)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@EXAMPLES
@given(convolutions(transposed=False))
def test_convolution(drawn: tuple[nn.Module, Tensor]) -> None:
    check(*drawn)


@EXAMPLES
@given(convolutions(transposed=True))
def test_transposed_convolution(drawn: tuple[nn.Module, Tensor]) -> None:
    try:
        drawn[0](drawn[1])
    except RuntimeError:  # options that PyTorch itself refuses (an output of size < 1)
        return
    check(*drawn)


def test_transposed_convolution_takes_an_output_size() -> None:
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
    check(layer, batch(3, 2, 4, 4), call=lambda module, x: module(x, output_size=[8, 8]))


def test_inputs_may_be_given_by_name() -> None:
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2)
    check(layer, batch(3, 2, 4, 4), call=lambda m, x: m(output_size=[10, 10], input=x))
    check(nn.RMSNorm(4), batch(3, 4), call=lambda m, x: m(x=x))


def test_convolution_in_blocks_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contributions._BLOCK_ELEMENTS, "cpu", 200)
    check(nn.Conv2d(2, 3, 3, padding=1), batch(5, 2, 4, 4))


def test_channels_last_input() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(3, 3), nn.Conv2d(3, 2, 3))
    model = model.to(memory_format=torch.channels_last)
    check(model, batch(3, 2, 5, 5).to(memory_format=torch.channels_last))


NORMALIZATIONS = [
    (nn.LayerNorm(4), (3, 4)),
    (nn.LayerNorm((2, 4)), (3, 5, 2, 4)),
    (nn.LayerNorm(4, bias=False), (3, 5, 4)),
    (nn.RMSNorm(4), (3, 5, 4)),
    (nn.RMSNorm((2, 4), eps=0.1), (3, 2, 4)),
    (nn.GroupNorm(2, 4), (3, 4, 3, 2)),
    (nn.GroupNorm(2, 4), (3, 4)),
    (nn.InstanceNorm1d(2, affine=True), (3, 2, 5)),
    (nn.InstanceNorm2d(2, affine=True), (3, 2, 3, 4)),
    (nn.InstanceNorm3d(2, affine=True, eps=0.1), (3, 2, 2, 3, 2)),
]


@pytest.mark.parametrize(("layer", "shape"), NORMALIZATIONS, ids=lambda v: str(v)[:40])
def test_normalization(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = copy.deepcopy(layer)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    check(layer, 2 * batch(*shape) + 1)


@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 2, 3)])
def test_embedding_leaves_the_padding_row_alone(shape: tuple[int, ...]) -> None:
    tokens = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(2))
    assert (tokens == 1).any()
    check(nn.Embedding(5, 3, padding_idx=1), tokens)
    check(nn.Embedding(5, 3), tokens)


COMPOSITES = [
    (nn.PReLU(3), [(4, 3, 2)]),
    (nn.PReLU(3), [(4, 3)]),
    (nn.PReLU(), [(4, 3, 4, 4)]),
    (nn.Bilinear(2, 3, 4), [(4, 2), (4, 3)]),
    (nn.GRUCell(3, 2), [(4, 3), (4, 2)]),
    (nn.RNNCell(3, 2), [(4, 3)]),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap's fallback
@pytest.mark.parametrize(("layer", "shapes"), COMPOSITES, ids=lambda v: str(v)[:30])
def test_layers_without_a_rule(layer: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    check(copy.deepcopy(layer), *[batch(*shape) for shape in shapes])


class Standardized(nn.Conv2d):
    """A convolution whose weight is standardized in the forward: the rule would be wrong."""

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean()) / self.weight.std()
        return self._conv_forward(x, weight, self.bias)


class Plain(nn.Linear):
    """A subclass that changes nothing."""


def test_subclasses() -> None:
    check(Standardized(2, 3, 3), batch(3, 2, 4, 4))
    check(Plain(3, 2), batch(3, 3))


ATTENTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"kdim": 3, "vdim": 5},
    {"add_bias_kv": True, "add_zero_attn": True},
]


@pytest.mark.parametrize("options", ATTENTIONS, ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention(options: dict[str, Any], need_weights: bool) -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True, **options)
    key, value = batch(3, 5, options.get("kdim", 4)), batch(3, 5, options.get("vdim", 4))
    check(
        layer,
        batch(3, 3, 4),
        key,
        value,
        call=lambda module, *qkv: module(*qkv, need_weights=need_weights),
    )


def test_attention_masks() -> None:
    """A mask [L, S] is everybody's, even where L is the number of records."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    x, causal = batch(3, 3, 4), torch.triu(torch.full((3, 3), -torch.inf), 1)
    check(layer, x, call=lambda module, x: module(x, x, x, attn_mask=causal))
    check(layer, x, call=lambda module, x: module(x, x, x, None, False, causal, is_causal=True))
    padding = torch.tensor([[0, 0, 1], [0, 0, 0], [0, 1, 1]]).bool()
    check(layer, x, padding, call=lambda module, x, p: module(x, x, x, key_padding_mask=p))
    own = batch(3, 2, 3, 3)
    check(
        layer,
        x,
        own,
        call=lambda module, x, own: module(
            x, x, x, attn_mask=own.flatten(0, 1), average_attn_weights=False
        ),
    )


def test_transformer_layer() -> None:
    for norm_first in (True, False):
        layer = nn.TransformerEncoderLayer(
            4, 2, 8, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        check(layer, batch(3, 3, 4))
        check(layer.eval(), batch(3, 3, 4))


def test_dropout_inside_attention_is_one_draw() -> None:
    """With dropout 1/2, the engine's sum is the gradient of the very loss that was computed."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    x, eps = batch(3, 5, 4), 1e-6
    layer, x = layer.double(), x.double()
    engine = GradientEngine(nn.ModuleList([layer]), trained(layer))
    engine.attach()

    def loss() -> Tensor:
        torch.manual_seed(3)
        engine.begin(torch.arange(3), 3)
        return layer(x, x, x)[0].square().sum()

    before = loss()
    before.backward()
    gradient = engine.weighted_sum(torch.ones(3).double())
    direction = torch.randn_like(gradient)
    flat = torch.cat([p.detach().flatten() for p in layer.parameters()])
    torch.nn.utils.vector_to_parameters(flat + eps * direction, layer.parameters())
    change = (loss() - before) / eps
    torch.testing.assert_close(change, gradient @ direction, rtol=1e-4, atol=1e-4)
    engine.detach()
