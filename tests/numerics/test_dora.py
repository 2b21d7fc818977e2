"""DoRA against its formula in float64, and the cases in which the formula itself has no answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from leantune.checkpoint.merge import fold_into_weights
from leantune.methods import Attached, attach
from leantune.methods.dora import AttachedDora
from leantune.methods.factors import dense_weight
from leantune.models.anatomy import linears
from leantune.models.packed import PackedLinear
from leantune.ops.dora import dora_gain, rescale, row_norms, updated_row_norms
from tests.batches import gradients, logits_of, shake, small_batch
from tests.models import tiny_model
from tests.packed import TinyPacked, fill_tiny, pack_tiny

BATCH = small_batch()
SETTINGS: dict[str, Any] = {"rank": 4, "alpha": 6.0}


def lively_model(architecture: str) -> Any:
    """A random model whose biases are not the zeros that transformers starts with."""
    model = tiny_model(architecture)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def base_logits(model: Any) -> Tensor:
    return logits_of(Attached("base", model), BATCH)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_a_fresh_adapter_is_the_identity_with_biases_that_are_not_zero(architecture: str) -> None:
    """(y - b) g + b is not y in floating point, even for g = 1."""
    expected = base_logits(lively_model(architecture))
    assert torch.equal(logits_of(attach("dora", lively_model(architecture), {}, seed=0), BATCH), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_fresh_adapter_is_the_identity_on_bf16_weights(autocast: bool) -> None:
    """A magnitude of bf16 steps, or a product formed in bf16, would be off by up to 1/256."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = base_logits(lively_model("qwen2").to(torch.bfloat16))
        found = logits_of(attach("dora", lively_model("qwen2").to(torch.bfloat16), {}, seed=0), BATCH)
    assert torch.equal(found, expected)


def test_the_gain_at_the_start_is_one_for_norms_of_any_size() -> None:
    """In float32 the square of 1e-30 is zero, that of 1e30 infinite, and of 1e-20 inexact."""
    norms = torch.logspace(-37, 37, 500)
    fresh = updated_row_norms(norms, torch.randn(500, 4), torch.randn(4, 8), torch.zeros(500, 4), 2.0)
    assert torch.equal(fresh, norms)
    assert torch.equal(dora_gain(norms, fresh), torch.ones(500))


def test_norms_of_the_sum_are_those_of_the_dense_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(s, generator=generator) for s in ((40, 24), (3, 24), (40, 3)))
    found = updated_row_norms(row_norms(weight), weight @ a.t(), a, b, 1.7)
    expected = (weight.double() + 1.7 * b.double() @ a.double()).norm(dim=1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_a_row_that_the_update_cancels_has_no_norm_below_zero() -> None:
    """The root of the -1e-7 that rounding leaves is not a number."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 64, generator=generator)
    b = torch.randn(200, 2, generator=generator)
    weight = -(b @ a)
    found = updated_row_norms(row_norms(weight), weight @ a.t(), a, b, 1.0)
    assert bool(torch.isfinite(found).all())
    assert bool((found <= 2e-3 * row_norms(weight)).all())


def layer_of(kind: str) -> tuple[Any, Tensor]:
    """A linear layer with bias of 24 inputs and 40 outputs, and the weight [40, 24] it computes with."""
    generator = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(40, 24, generator=generator), torch.randn(40, generator=generator)
    layer: Any
    if kind == "packed":
        layer = TinyPacked(24, 40, nn.Parameter(bias), False)
        fill_tiny(layer, weight)
    else:
        layer = nn.Linear(24, 40) if kind == "linear" else Conv1D(40, 24)
        layer.weight = nn.Parameter(weight if kind == "linear" else weight.t().contiguous())
        layer.bias = nn.Parameter(bias)
    layer.requires_grad_(False)
    return layer, dense_weight(layer)


class OneLayer(nn.Module):
    """As much of a model as attaching to a layer needs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.ModuleDict({"proj": layer})])
        self.head = nn.Linear(1, 1)
        self.config = self

    num_hidden_layers = 1

    def get_text_config(self, decoder: bool) -> Any:
        del decoder
        return self

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def adapted(kind: str, **settings: Any) -> tuple[Any, Any, Tensor]:
    """(layer, its factors, its weight), with a magnitude and factors that training has moved."""
    layer, weight = layer_of(kind)
    attached = attach("dora", OneLayer(layer), {**SETTINGS, **settings}, seed=0)
    shake(attached, scale=0.3)
    return layer, layer.dora, weight


def reference(x: Tensor, factors: Any, weight: Tensor, bias: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """y and gradients of sum(y * cos(y's index)) by the formula, the norm detached, all in float64."""
    a, b, m = (p.detach().double().requires_grad_() for p in (factors.A, factors.B, factors.magnitude))
    x = x.detach().double().requires_grad_()
    total = weight.double() + factors.scale * b @ a
    y = x @ ((m / total.norm(dim=1).detach()).unsqueeze(1) * total).t() + bias.double()
    probe(y).backward()
    found = {"A": a.grad, "B": b.grad, "magnitude": m.grad, "x": x.grad}
    return y.detach(), {name: grad for name, grad in found.items() if grad is not None}


def probe(y: Tensor) -> Tensor:
    """A number that depends on every output in another way."""
    return (y * torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape)).sum()


@pytest.mark.parametrize("kind", ["linear", "conv1d", "packed"])
@pytest.mark.parametrize("rslora", [False, True])
def test_outputs_and_gradients_are_those_of_the_formula(kind: str, rslora: bool) -> None:
    layer, factors, weight = adapted(kind, rslora=rslora)
    assert factors.scale == 6.0 / (2.0 if rslora else 4.0)
    x = torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = layer(x)
    probe(y).backward()
    expected, gradient = reference(x, factors, weight, layer.bias)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert gradient.keys() == {"A", "B", "magnitude", "x"}
    for name, parameter in {**dict(factors.named_parameters()), "x": x}.items():
        torch.testing.assert_close(parameter.grad.double(), gradient[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_in_float64_the_formula_holds_to_its_last_digits(kind: str) -> None:
    layer, factors, weight = adapted(kind)
    layer.double()
    factors.stored_norms.copy_(row_norms(weight.double()))
    x = torch.randn(7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = layer(x)
    probe(y).backward()
    expected, gradient = reference(x, factors, weight, layer.bias)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in {**dict(factors.named_parameters()), "x": x}.items():
        torch.testing.assert_close(parameter.grad, gradient[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["linear", "packed"])
def test_under_autocast_the_norm_stays_in_float32(kind: str) -> None:
    """Outputs may be rounded to bf16; a norm in bf16 would shift every output of a row alike."""
    layer, factors, weight = adapted(kind)
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        norms = factors.magnitude / factors._gain(weight)
    assert y.dtype == torch.bfloat16
    exact = (weight.double() + factors.scale * (factors.B.double() @ factors.A.double())).norm(dim=1)
    torch.testing.assert_close(norms.double(), exact, rtol=2e-6, atol=0)
    probe(y.float()).backward()
    expected, gradient = reference(x, factors, weight, layer.bias)
    torch.testing.assert_close(y.double(), expected, rtol=0.02, atol=0.2)
    for name, parameter in {**dict(factors.named_parameters()), "x": x}.items():
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad.double() - gradient[name]).norm() / gradient[name].norm()
        assert float(error) < 0.02, name


def test_dropout_acts_on_the_input_of_the_update_and_only_in_training() -> None:
    layer, factors, weight = adapted("linear", dropout=0.5)
    x = torch.ones(6, 24)
    gain = factors._gain(weight).detach()
    layer.train()
    torch.manual_seed(0)
    trained = layer(x).detach()
    torch.manual_seed(0)
    dropped = nn.functional.dropout(x, 0.5)
    update = factors.scale * dropped @ factors.A.t() @ factors.B.t()
    torch.testing.assert_close(trained, gain * (x @ weight.t() + update) + layer.bias, rtol=1e-5, atol=1e-5)
    layer.eval()
    update = factors.scale * x @ factors.A.t() @ factors.B.t()
    torch.testing.assert_close(layer(x), gain * (x @ weight.t() + update) + layer.bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_zeros_stay_finite_and_the_fresh_adapter_equals_the_base(packed: bool) -> None:
    """Case 15: magnitude 0 over norm 0 made the first loss NaN."""

    def holed() -> Any:
        model = lively_model("qwen2")
        for layer in linears(model).values():
            rows: Any = layer.weight
            rows.data[::3] = 0.0
        return pack_tiny(model) if packed else model

    attached = attach("dora", holed(), {}, seed=0)
    assert torch.equal(logits_of(attached, BATCH), base_logits(holed()))
    before = {n: p.clone() for n, p in attached.trainable().items()}
    for _ in range(3):  # the first step gives the rows of B values, and so the empty rows a length
        found = gradients(attached, BATCH)
        for name, parameter in attached.trainable().items():
            gradient = found[name]
            assert gradient is not None
            assert bool(torch.isfinite(gradient).all()), name
            parameter.data -= 0.05 * gradient.sign()
    assert bool(torch.isfinite(logits_of(attached, BATCH)).all())
    assert all(not torch.equal(before[n], p) for n, p in attached.trainable().items())


def test_the_norm_uses_no_old_values() -> None:
    """A norm kept from the step before gives other curves after a resume than without the stop."""
    layer, factors, weight = adapted("linear")
    x = torch.randn(4, 24)
    layer(x)
    factors.B.data.mul_(-2.0)
    expected, _ = reference(x, factors, weight, layer.bias)
    torch.testing.assert_close(layer(x).detach().double(), expected, rtol=1e-5, atol=1e-5)


def test_a_magnitude_comes_from_the_weight_before_it_was_packed() -> None:
    """QDoRA: outputs get back the length that packing took from their rows."""
    attached = attach("dora", pack_tiny(tiny_model("llama")), {}, seed=0)
    assert isinstance(attached, AttachedDora)
    targets = attached.row_norm_targets()
    assert targets == linears(attached.model)
    original = {name: row_norms(dense_weight(layer)) for name, layer in linears(tiny_model("llama")).items()}
    packed = base_logits(attached.model)
    for name, layer in targets.items():
        assert isinstance(layer, PackedLinear)
        stored = row_norms(layer.dequantise())
        assert not torch.equal(stored, original[name])
        attached.set_row_norms(name, original[name], stored)
    assert not torch.equal(base_logits(attached.model), packed)
    for weight, expected in zip(dict(attached.merged_weights()).values(), original.values(), strict=True):
        torch.testing.assert_close(row_norms(weight), expected, rtol=1e-6, atol=0)


def test_attached_to_a_model_without_memory_it_waits_for_the_norms() -> None:
    """The order of training: attach on meta, then load, then set the norms; forgetting them is loud."""
    layer, _ = layer_of("linear")
    expected = layer(torch.ones(1, 24))
    empty: Any = OneLayer(nn.Linear(24, 40, device="meta").requires_grad_(False))
    attached = attach("dora", empty, SETTINGS, seed=0)
    assert {str(p.device) for p in attached.trainable().values()} == {"cpu"}
    hollow = empty.h[0]["proj"]
    hollow.weight, hollow.bias = layer.weight, layer.bias
    assert bool(torch.isnan(hollow(torch.ones(1, 24))).all())
    ((name, target),) = attached.row_norm_targets().items()
    norms = row_norms(dense_weight(target))
    attached.set_row_norms(name, norms, norms)
    assert torch.equal(hollow(torch.ones(1, 24)), expected)


def test_the_row_norms_of_the_frozen_weight_are_no_part_of_what_is_saved() -> None:
    attached = attach("dora", tiny_model("llama"), SETTINGS, seed=0)
    assert not any("stored_norms" in name for name in attached.model.state_dict())


def test_weight_decay_spares_magnitudes() -> None:
    attached = attach("dora", tiny_model("llama"), SETTINGS, seed=0)
    spared = {name for name in attached.trainable() if name.endswith(".magnitude")}
    assert attached.decay_free() == spared
    assert len(spared) == 21


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_folding_into_packed_layers_makes_a_dense_model_that_computes_the_same(
    architecture: str, method: str
) -> None:
    attached: Any = attach(method, pack_tiny(lively_model(architecture)), SETTINGS, seed=0)
    shake(attached)
    expected = logits_of(attached, BATCH)
    fold_into_weights(attached)
    torch.testing.assert_close(base_logits(attached.model), expected, rtol=1e-4, atol=1e-5)
    assert {type(m) for m in linears(attached.model).values()} == {
        Conv1D if architecture == "gpt2" else nn.Linear
    }
    assert set(attached.model.state_dict()) == set(tiny_model(architecture).state_dict())


def test_rescaling_by_a_gain_near_one_is_not_lost_in_bf16() -> None:
    """1.003 is 1 in bf16, so a magnitude would train without any effect."""
    out = torch.full((4096,), 100.0, dtype=torch.bfloat16)
    gain = torch.full((4096,), 1.0039)
    assert rescale(out, gain, None).dtype == torch.bfloat16
    assert float(rescale(out, gain, None).float().mean()) == pytest.approx(100.5)
