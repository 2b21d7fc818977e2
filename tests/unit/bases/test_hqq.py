"""Linear layers on HQQ codes: they compute with the de-quantised weight, and keep their scales."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from leantune.bases.hqq import HqqLinear, pack
from leantune.errors import ModelError
from leantune.models.packed import PackedLinear
from leantune.ops.hqq import dequantise, quantise
from tests.models import tiny_model


def filled(layer: PackedLinear, weight: Tensor) -> PackedLinear:
    """The layer with the values of `weight` [out, in], as loading gives them."""
    for name, values in layer.pack(weight).items():
        parameter: nn.Parameter = getattr(layer, name)
        assert (parameter.shape, parameter.dtype) == (values.shape, values.dtype)
        assert parameter.is_meta
        setattr(layer, name, nn.Parameter(values, requires_grad=False))
    return layer


def example(
    bits: int = 4, group_size: int = 8, in_features: int = 24, out: int = 5, bias: bool = True
) -> tuple[PackedLinear, Tensor]:
    """A packed layer and the weight it was made from."""
    torch.manual_seed(bits + in_features)
    weight = torch.randn(out, in_features)
    offset = nn.Parameter(torch.randn(out)) if bias else None
    layer = HqqLinear(in_features, out, offset, False, bits=bits, group_size=group_size)
    return filled(layer, weight), weight


@pytest.mark.parametrize(
    ("bits", "shape", "bias"),
    list(itertools.product((8, 4, 3, 2), [(24, 5), (40, 1), (8, 13)], (True, False))),
)
def test_forward_and_gradients_are_those_of_the_dequantised_weight(
    bits: int, shape: tuple[int, int], bias: bool
) -> None:
    """A product or a gradient taken with other values than the stored ones, or transposed."""
    layer, weight = example(bits, 8, *shape, bias)
    values = dequantise(*quantise(weight, bits, 8), bits, shape[0], torch.float32)
    assert torch.equal(layer.dequantise(), values)
    hidden = torch.randn(2, 3, shape[0], requires_grad=True)
    out = layer(hidden)
    torch.testing.assert_close(out, F.linear(hidden, values, layer.bias), rtol=1e-6, atol=1e-6)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    torch.testing.assert_close(hidden.grad, upstream @ values, rtol=1e-6, atol=1e-6)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, upstream.sum((0, 1)), rtol=1e-6, atol=1e-6)


def test_unpack_is_what_the_layer_computes_with() -> None:
    """Row norms or a merge taken from another weight than the layer's."""
    for bits in (8, 4, 3, 2):
        layer, weight = example(bits)
        assert torch.equal(layer.unpack(layer.pack(weight)), layer.dequantise())
        assert torch.equal(layer.unpack(layer.pack(weight[2:4])), layer.dequantise()[2:4])


def test_no_dense_weight_is_kept_for_backward() -> None:
    """A de-quantised copy saved by autograd in each layer: the memory that the base is there to save."""
    layer, _ = example(4, 32, 128, 96, bias=False)
    saved: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        layer(torch.randn(3, 128, requires_grad=True)).sum().backward()
    assert not [t for t in saved if t.is_floating_point() and t.numel() >= 96 * 128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_survive_a_cast_of_the_model(dtype: torch.dtype) -> None:
    """Scales and zeros rounded by `model.to(dtype)`, and the weights moved with them."""
    layer, _ = example(8)
    before = layer.dequantise()
    layer.to(dtype)
    assert torch.equal(layer.dequantise(), before)
    assert layer.bias is not None
    assert layer.bias.dtype == dtype
    out = layer(torch.randn(2, 24, dtype=dtype))
    assert out.dtype == dtype


def test_autocast_decides_the_dtype() -> None:
    """A layer that ignores the ambient precision."""
    layer, _ = example()
    hidden = torch.randn(2, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(hidden)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(hidden), rtol=0.05, atol=0.05)


def test_scales_that_lie_at_an_odd_address_are_read() -> None:
    """A shard cut out of a longer buffer of bytes, which cannot be viewed as float32."""
    layer, _ = example()
    before = layer.dequantise()
    for name in ("scales", "zeros"):
        stored = getattr(layer, name)
        buffer = torch.zeros(stored.numel() + 1, dtype=torch.uint8)
        buffer[1:] = stored.flatten()
        setattr(layer, name, nn.Parameter(buffer[1:].view(stored.shape), requires_grad=False))
    assert torch.equal(layer.dequantise(), before)


def test_transposed_layers_of_gpt2() -> None:
    """GPT-2's [in, out] weight packed along the wrong dimension, or its bias lost."""
    with torch.device("meta"):
        model = tiny_model("gpt2")
    pack(model, bits=4, group_size=16)
    packed = model.get_submodule("transformer.h.1.mlp.c_fc")
    assert isinstance(packed, HqqLinear)
    assert packed.transposed
    assert (packed.in_features, packed.out_features) == (32, 128)
    stored = torch.randn(32, 128)  # as the checkpoint holds it
    packed.bias = nn.Parameter(torch.randn(128))
    filled(packed, stored.t())
    dense = packed.to_dense()
    assert isinstance(dense, Conv1D)
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(packed(hidden), dense(hidden), rtol=1e-6, atol=1e-5)
    assert (dense.weight - stored).abs().max() < 0.5


def test_the_whole_model_is_packed_but_for_its_head() -> None:
    """A packed output head, or a packed tensor that asks for a gradient or is not bytes."""
    with torch.device("meta"):
        model = tiny_model("llama")
    lines = pack(model, bits=3, group_size=16)
    packed = {name: m for name, m in model.named_modules() if isinstance(m, HqqLinear)}
    assert len(packed) == 3 * 7
    assert not isinstance(model.get_output_embeddings(), HqqLinear)
    assert "21 linear layers packed" in lines[0]
    for layer in packed.values():
        tensors = [getattr(layer, name) for name in layer.packed_names]
        assert all(t.dtype == torch.uint8 and t.is_meta and not t.requires_grad for t in tensors)
        assert all(len(t) == layer.out_features for t in tensors)
        assert tensors[0].shape[1] == layer.in_features * 3 // 8


def test_layers_that_do_not_fit_are_left_dense_with_the_reason() -> None:
    """A group that runs over the end of a row; a layer left dense in silence."""
    with torch.device("meta"):
        model = tiny_model("llama")  # in features 32, and 48 of the down projections
    lines = pack(model, group_size=32)
    assert isinstance(model.get_submodule("model.layers.0.mlp.down_proj"), nn.Linear)
    assert isinstance(model.get_submodule("model.layers.0.mlp.up_proj"), HqqLinear)
    assert "48 input features are no multiple of base.group_size 32: down_proj ×3" in lines[1]


def test_rows_that_do_not_fill_bytes_are_left_dense() -> None:
    """3-bit codes cut off at the end of a row."""
    with torch.device("meta"):
        model = tiny_model("llama", intermediate_size=36)
    lines = pack(model, bits=3, group_size=4)
    assert "36 3-bit codes a row do not fill whole bytes: down_proj ×3" in lines[1]
    assert isinstance(model.get_submodule("model.layers.2.mlp.down_proj"), nn.Linear)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5}, "base.bits: 5"),
        ({"group_size": 0}, "base.group_size: 0"),
        ({"group_size": 64}, "no linear layer of this model can be packed"),
        ({"group_size": 16, "keep_dense": ("up_prj",)}, "base.keep_dense: 'up_prj'"),
    ],
)
def test_settings_that_cannot_be_obeyed_are_refused(settings: dict[str, object], message: str) -> None:
    """A setting that is ignored, or a run that goes on without anything packed."""
    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(ModelError, match=message):
        pack(model, **settings)  # pyright: ignore[reportArgumentType]


def test_kept_and_left_layers_stay_as_they_are() -> None:
    """keep_dense or the method's own blocks packed all the same."""
    with torch.device("meta"):
        model = tiny_model("llama")
    pack(model, group_size=16, keep_dense=("q_proj",), leave=("model.layers.1",))
    assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj"), nn.Linear)
    assert isinstance(model.get_submodule("model.layers.1.mlp.up_proj"), nn.Linear)
    assert isinstance(model.get_submodule("model.layers.2.mlp.up_proj"), HqqLinear)
