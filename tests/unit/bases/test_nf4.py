"""Linear layers on NF4 codes: what they compute, keep and store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from leantune.bases.nf4 import Nf4Linear, pack
from leantune.errors import ModelError
from leantune.models.packed import PackedLinear
from leantune.ops.packed import from_bytes, packed_linear, to_bytes
from tests.models import tiny_model

# GPT-2 reads `n_embd`; the other architectures have no use for it.
WIDE = {"n_embd": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def fill(layer: PackedLinear, weight: Tensor, rows_at_a_time: int = 2) -> PackedLinear:
    """Give a layer the values of `weight` [out, in] as loading does: slices of rows, then the whole."""
    parts = [layer.pack(weight[at : at + rows_at_a_time]) for at in range(0, len(weight), rows_at_a_time)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in layer.packed_names}
    if layer.unfinished():
        whole |= layer.finish({name: whole[name] for name in layer.unfinished()})
    for name, values in whole.items():
        stored: Tensor = getattr(layer, name)
        assert (stored.shape, stored.dtype) == (values.shape, values.dtype)
        packed = name in layer.packed_names
        assert stored.is_meta is packed
        setattr(layer, name, nn.Parameter(values, requires_grad=False) if packed else values)
    return layer


def example(
    double_quant: bool = False,
    in_features: int = 128,
    out: int = 13,
    bias: bool = True,
    transposed: bool = False,
) -> tuple[PackedLinear, Tensor]:
    """A filled layer and the weight it was made from; 26 blocks, so that the last nested block is short."""
    torch.manual_seed(in_features + out)
    weight = torch.randn(out, in_features)
    offset = nn.Parameter(torch.randn(out), requires_grad=False) if bias else None
    return fill(Nf4Linear(in_features, out, offset, transposed, double_quant), weight), weight


BOTH = pytest.mark.parametrize("double_quant", [False, True])


@BOTH
@pytest.mark.parametrize(("in_features", "out", "bias"), [(128, 13, True), (64, 1, False), (192, 300, True)])
def test_products_and_gradients_are_those_of_the_dequantised_weight(
    double_quant: bool, in_features: int, out: int, bias: bool
) -> None:
    """A product or a gradient with other values than the stored ones, transposed, or without its bias."""
    layer, weight = example(double_quant, in_features, out, bias)
    values = layer.dequantise()
    assert (values - weight).abs().mean() < 0.1 * weight.abs().mean()
    if layer.bias is not None:
        layer.bias.requires_grad_(True)
    hidden = torch.randn(2, 3, in_features, requires_grad=True)
    result = layer(hidden)
    torch.testing.assert_close(result, F.linear(hidden, values, layer.bias), rtol=0, atol=0)
    upstream = torch.randn_like(result)
    result.backward(upstream)
    torch.testing.assert_close(hidden.grad, upstream @ values, rtol=1e-6, atol=1e-5)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, upstream.sum((0, 1)), rtol=1e-6, atol=1e-5)
    assert layer.codes.grad is None


@BOTH
def test_gradients_pass_a_numerical_check_in_float64(double_quant: bool) -> None:
    """A backward pass that is not the derivative of forward."""
    layer, _ = example(double_quant, 64, 3)
    hidden = torch.randn(2, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (hidden,))


def saved_by(call: Any) -> list[Tensor]:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return saved


@BOTH
def test_only_the_packed_parameters_themselves_are_kept_for_backward(double_quant: bool) -> None:
    """A dense copy per layer, the input, or a copy of the codes that FSDP2 could not free."""
    layer, _ = example(double_quant)
    stored = {id(tensor) for tensor in [*layer.parameters(), *layer.buffers()]}
    hidden = torch.randn(5, 128, requires_grad=True)
    saved = saved_by(lambda: layer(hidden))
    assert {id(tensor) for tensor in saved} == stored - {id(layer.bias)}


def test_nothing_is_kept_where_the_input_needs_no_gradient() -> None:
    """Frozen layers below the first adapter that hold tensors for a gradient nobody asks for."""
    layer, _ = example()
    assert layer.bias is not None
    hidden = torch.randn(5, 128)
    assert saved_by(lambda: layer(hidden)) == []
    layer.bias.requires_grad_(True)
    assert saved_by(lambda: layer(hidden)) == []
    wanted = hidden.clone().requires_grad_(True)
    with torch.no_grad():
        assert saved_by(lambda: layer(wanted)) == []
        assert layer(wanted).grad_fn is None
    layer(hidden).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((13,), 5.0))


@BOTH
def test_inference_mode_first_does_not_spoil_training(double_quant: bool) -> None:
    """Tables made while generating in inference mode, which autograd then refuses to use."""
    from leantune.ops import nf4

    for made_once in (nf4._pairs, nf4._dynamic_levels, nf4._has_kernel):
        made_once.cache_clear()
    layer, _ = example(double_quant)
    hidden = torch.randn(4, 128)
    with torch.inference_mode():
        generated = layer(hidden)
    hidden.requires_grad_(True)
    result = layer(hidden)
    result.sum().backward()
    assert torch.equal(result, generated)
    assert hidden.grad is not None


@BOTH
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(double_quant: bool, reentrant: bool) -> None:
    """Recomputation that loses the packed tensors, or unpacks others."""
    first, _ = example(double_quant)
    second, _ = example(double_quant, 64, 128)

    def block(hidden: Tensor) -> Tensor:
        result: Tensor = first(torch.tanh(second(hidden)))
        return result

    hidden = torch.randn(4, 64, requires_grad=True)
    block(hidden).square().sum().backward()
    expected, hidden.grad = hidden.grad, None
    result: Any = checkpoint(block, hidden, use_reentrant=reentrant)
    result.square().sum().backward()
    assert torch.equal(hidden.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_decides_the_precision_of_both_products(dtype: torch.dtype) -> None:
    """A product in fp32 under autocast, or a gradient that comes back in another dtype than its input."""
    layer, _ = example()
    weight = layer.dequantise(dtype)
    hidden = torch.randn(6, 128, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        result = layer(hidden)
        expected = F.linear(hidden, weight, layer.bias)
    assert result.dtype == dtype
    assert torch.equal(result, expected)
    upstream = torch.randn_like(result)
    result.backward(upstream)
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32
    assert torch.equal(hidden.grad, (upstream @ weight).float())


def test_without_autocast_the_input_decides_the_precision() -> None:
    """bf16 activations that meet an fp32 bias and fail, or are computed with in fp32."""
    layer, _ = example()
    hidden = torch.randn(6, 128, dtype=torch.bfloat16, requires_grad=True)
    result = layer(hidden)
    assert layer.bias is not None
    expected = F.linear(hidden, layer.dequantise(torch.bfloat16), layer.bias.bfloat16())
    assert torch.equal(result, expected)
    result.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


@BOTH
def test_casting_the_model_leaves_the_scales_as_they_are(double_quant: bool) -> None:
    """`model.to(bfloat16)` or `half()` that silently rounds block scales, nested scales or the offset."""
    layer, _ = example(double_quant)
    model = nn.Sequential(layer, nn.LayerNorm(13))
    values = layer.dequantise()
    for cast in (model.half, model.bfloat16, lambda: model.to(torch.float64), model.float):
        cast()
        assert torch.equal(layer.dequantise(), values)
    model.bfloat16()
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16


@BOTH
def test_a_state_dict_holds_all_that_the_layer_computes_with(double_quant: bool) -> None:
    """Nested scales or the offset missing in it: the same codes would mean another weight."""
    layer, _ = example(double_quant)
    other, _ = example(double_quant, out=13, bias=True)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.dequantise(), layer.dequantise())
    size = sum(t.nbytes for name, t in layer.state_dict().items() if name != "bias")
    assert size == 13 * (64 + (2 if double_quant else 8)) + (8 if double_quant else 0)


def test_unpack_takes_what_pack_gave() -> None:
    """Row norms of the stored weight taken from scales that were read as something else."""
    layer, weight = example()
    rows = layer.pack(weight[3:7])
    assert torch.equal(layer.unpack(rows), layer.dequantise()[3:7])
    double, _ = example(double_quant=True)
    preliminary = double.pack(weight[3:7])
    assert preliminary["scales"].dtype == torch.float32
    assert torch.equal(double.unpack(preliminary), layer.dequantise()[3:7])
    finished = {name: getattr(double, name) for name in double.packed_names}
    assert torch.equal(double.unpack(finished), double.dequantise())
    with pytest.raises(ValueError, match="4 rows, expected all 13"):
        double.unpack({name: tensor[3:7] for name, tensor in finished.items()})


@BOTH
def test_scales_finished_from_any_slices_are_those_of_the_whole(double_quant: bool) -> None:
    """A stored weight that depends on how many rows a rank reads at a time."""
    weight = torch.randn(13, 128)
    layers = [fill(Nf4Linear(128, 13, None, False, double_quant), weight, step) for step in (1, 4, 13)]
    values = [layer.dequantise() for layer in layers]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])


@BOTH
@pytest.mark.parametrize("transposed", [False, True])
def test_a_dense_layer_made_of_a_packed_one_computes_the_same(double_quant: bool, transposed: bool) -> None:
    """A merge or an export of a wrong weight, or of GPT-2's the wrong way round."""
    layer, _ = example(double_quant, transposed=transposed)
    dense = layer.to_dense()
    assert isinstance(dense, Conv1D if transposed else nn.Linear)
    assert dense.weight.shape == ((128, 13) if transposed else (13, 128))
    hidden = torch.randn(3, 128)
    torch.testing.assert_close(dense(hidden), layer(hidden), rtol=1e-6, atol=1e-5)


def test_bytes_that_are_not_aligned_are_still_read() -> None:
    """Scales that lie at an odd place in a gathered buffer, which float32 cannot be a view of."""
    values = torch.randn(3, 5)
    buffer = torch.cat([torch.zeros(1, dtype=torch.uint8), to_bytes(values).flatten()])
    assert torch.equal(from_bytes(buffer[1:].view(3, 20)), values)
    aligned = to_bytes(values)
    assert from_bytes(aligned).data_ptr() == aligned.data_ptr()
    assert from_bytes(to_bytes(torch.tensor(2.5))).tolist() == [2.5]


def test_weights_are_unpacked_once_a_pass() -> None:
    """A second unpacking in forward or backward, which would halve the speed of the base."""
    asked: list[torch.dtype] = []

    def unpack(dtype: torch.dtype, weight: Tensor) -> Tensor:
        asked.append(dtype)
        return weight.to(dtype)

    hidden = torch.randn(2, 4, requires_grad=True)
    result = packed_linear(hidden, unpack, [torch.randn(3, 4)], None)
    assert asked == [torch.float32]
    result.sum().backward()
    assert asked == [torch.float32] * 2


def on_meta(architecture: str, **changes: Any) -> nn.Module:
    return tiny_model(architecture, **changes).to("meta")


@BOTH
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "phi3"])
def test_every_linear_layer_but_the_head_is_packed(architecture: str, double_quant: bool) -> None:
    """Layers of another class or with other names passed over, a packed head, or real memory for codes."""
    model = on_meta(architecture, **WIDE)
    biases = {name for name, _ in model.named_parameters() if name.endswith(".bias")}
    lines = pack(model, double_quant=double_quant)
    packed = {name: m for name, m in model.named_modules() if isinstance(m, Nf4Linear)}
    per_block = {"llama": 7, "gpt2": 4, "gpt_neox": 4, "phi3": 4}[architecture]
    assert len(packed) == 3 * per_block
    assert len(lines) == 1
    assert lines[0].startswith(f"base nf4: {3 * per_block} linear layers packed: ")
    assert not any("head" in name or "embed_out" in name for name in packed)
    assert biases == {name for name, _ in model.named_parameters() if name.endswith(".bias")}
    for layer in packed.values():
        assert layer.transposed is (architecture == "gpt2")
        assert layer.codes.is_meta
        assert not any(parameter.requires_grad for parameter in layer.parameters())
        assert not any(buffer.is_meta for buffer in layer.buffers())


def test_layers_of_other_widths_stay_dense_and_are_named() -> None:
    """A width of 80 that makes blocks cross rows, or a layer left out in silence."""
    model = on_meta("llama", **WIDE | {"intermediate_size": 80})
    lines = pack(model)
    assert "left dense, 80 inputs are not a multiple of the block of 64: down_proj ×3" in lines
    assert type(model.get_submodule("model.layers.1.mlp.down_proj")) is nn.Linear
    assert isinstance(model.get_submodule("model.layers.1.mlp.up_proj"), Nf4Linear)
    with pytest.raises(ModelError, match="32 inputs are not a multiple"):
        pack(on_meta("llama", intermediate_size=48))


def test_what_the_user_or_the_method_keeps_dense_stays_dense() -> None:
    """Blocks that Llama-Pro trains packed under its feet, or `keep_dense` ignored."""
    model = on_meta("llama", **WIDE)
    lines = pack(model, keep_dense=["q_proj"], leave=["model.layers.2"])
    assert "left dense, base.keep_dense: q_proj ×3" in lines
    assert any(line.startswith("left dense, trained by the method: ") for line in lines)
    packed = {name for name, m in model.named_modules() if isinstance(m, Nf4Linear)}
    assert len(packed) == 12
    assert not any(".layers.2." in name or name.endswith("q_proj") for name in packed)
    with pytest.raises(ModelError, match=r"base\.keep_dense.*q_prj"):
        pack(on_meta("llama", **WIDE), keep_dense=["q_prj"])


@BOTH
def test_a_whole_model_computes_as_with_the_dequantised_weights(double_quant: bool) -> None:
    """Packed layers of GPT-2 filled with transposed weights, or fed through the wrong way round."""
    original = tiny_model("gpt2", **WIDE)
    packed: Any = tiny_model("gpt2", **WIDE)
    pack(packed, double_quant=double_quant)
    dense: Any = tiny_model("gpt2", **WIDE)
    for name, layer in list(packed.named_modules()):
        if isinstance(layer, Nf4Linear):
            stored: Any = original.get_submodule(name).weight
            fill(layer, stored.detach().t().contiguous(), 50)
            dense.get_submodule(name).weight.data = layer.dequantise().t().contiguous()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(packed(ids).logits, dense(ids).logits, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(packed(ids).logits, original(ids).logits, atol=1e-4)
