"""LoRA against PEFT: the same numbers from the same factors, and adapters that either side can read."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from leantune.checkpoint.adapter import load_adapter, save_trained
from leantune.methods import Attached, attach
from leantune.train.optimizer import build_optimizer
from tests.batches import gradients, logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.models import tiny_model

BATCH = small_batch()
GPT2 = ["c_attn", "c_proj", "c_fc"]


def peft_model(architecture: str, **config: Any) -> Any:
    """A fresh base model with PEFT's LoRA on it, in evaluation mode."""
    model: Any = tiny_model(architecture)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for GPT-2 PEFT corrects fan_in_fan_out itself and says so
        return get_peft_model(model, LoraConfig(**options))


def copy_factors(attached: Attached, theirs: Any) -> None:
    """Give PEFT's module the values of ours, by the names that a saved adapter has."""
    files = attached.export()
    assert files is not None
    parameters = {n.replace(".default.", "."): p for n, p in theirs.named_parameters() if "lora_" in n}
    assert parameters.keys() == files.tensors.keys()
    for name, tensor in files.tensors.items():
        parameters[name].data.copy_(tensor)


CASES = [
    ("llama", {"rank": 4, "alpha": 8.0}, {}),
    ("llama", {"rank": 8, "alpha": 3.0}, {"r": 8, "lora_alpha": 3}),
    ("llama", {"rank": 4, "alpha": 8.0, "rslora": True}, {"use_rslora": True}),
    ("phi3", {"rank": 4, "alpha": 8.0}, {}),
    ("gpt_neox", {"rank": 4, "alpha": 8.0}, {}),
    ("gpt2", {"rank": 4, "alpha": 8.0}, {"fan_in_fan_out": True}),
]


@pytest.mark.parametrize(("architecture", "settings", "config"), CASES)
def test_the_same_factors_give_pefts_logits_and_gradients(
    architecture: str, settings: dict[str, Any], config: dict[str, Any]
) -> None:
    ours = attach("lora", tiny_model(architecture), settings, seed=0)
    shake(ours)
    theirs = peft_model(architecture, **config)
    copy_factors(ours, theirs)
    reference = Attached("peft", theirs.get_base_model())
    torch.testing.assert_close(logits_of(ours, BATCH), logits_of(reference, BATCH), rtol=1e-5, atol=1e-6)
    mine = [g for g in gradients(ours, BATCH).values() if g is not None]
    other = [g for g in gradients(reference, BATCH).values() if g is not None]
    assert len(mine) == len(other) > 0
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_implementation_peft_trains_the_same_losses(architecture: str) -> None:
    """Same start, same data, same optimizer: only the module that computes the update differs."""
    curves: list[list[float]] = []
    for implementation in ("leantune", "peft"):
        settings = {"rank": 4, "alpha": 8.0, "implementation": implementation}
        model: Any = tiny_model(architecture, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
        attached = attach("lora", model, settings, seed=0)
        curves.append(_losses(attached, 3))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert curves[0][2] < curves[0][0]


def _losses(attached: Attached, steps: int) -> list[float]:
    optimizer = build_optimizer(
        attached.trainable(),
        attached.decay_free(),
        name="adamw",
        learning_rate=5e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        momentum=0.0,
        rho=0.9,
    )
    losses: list[float] = []
    for _ in range(steps):
        gradients(attached, BATCH)
        optimizer.step()
        losses.append(float(torch.nn.functional.cross_entropy(logits_of(attached, BATCH), BATCH.labels)))
    return losses


def test_both_implementations_start_from_the_same_values_and_save_the_same_files() -> None:
    exports = []
    for implementation in ("leantune", "peft"):
        attached = attach("lora", tiny_model("llama"), {"rank": 4, "implementation": implementation}, seed=5)
        files = attached.export()
        assert files is not None
        exports.append(files)
    assert exports[0].config == exports[1].config
    assert exports[0].tensors.keys() == exports[1].tensors.keys()
    assert all(torch.equal(exports[0].tensors[name], exports[1].tensors[name]) for name in exports[0].tensors)


def test_implementation_peft_keeps_trained_weights_in_fp32_on_a_bf16_model() -> None:
    """PEFT gives new factors the dtype of the frozen weight; bf16 swallows small updates."""
    model: Any = tiny_model("llama")
    attached = attach("lora", model.to(torch.bfloat16), {"rank": 4, "implementation": "peft"}, seed=0)
    assert {p.dtype for p in attached.trainable().values()} == {torch.float32}


def test_implementation_peft_can_be_disabled() -> None:
    attached = attach("lora", tiny_model("llama"), {"rank": 4, "implementation": "peft"}, seed=0)
    shake(attached)
    with attached.disabled():
        base = logits_of(attached, BATCH)
    assert torch.equal(base, logits_of(Attached("base", tiny_model("llama")), BATCH))
    assert not torch.allclose(logits_of(attached, BATCH), base, atol=1e-3)


TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    ("llama", {"target_modules": ["model.layers.1.self_attn.q_proj"]}),
    ("llama", {"target_modules": ["self_attn.o_proj", "down_proj"]}),
    ("llama", {"target_modules": r".*\.(q|k)_proj"}),
    ("llama", {"target_modules": r"model\.layers\.[02]\.mlp\..*"}),
    ("llama", {"target_modules": "all-linear", "layers": "0;2"}),
    ("llama", {"target_modules": ["q_proj"], "layers": [1]}),
    ("gpt2", {"target_modules": "all-linear"}),
    ("gpt2", {"target_modules": ["attn.c_proj"]}),
    ("gpt2", {"target_modules": ["c_attn"], "layers": [0]}),
    ("mixtral", {"target_modules": "all-linear"}),
]


@pytest.mark.parametrize(("architecture", "targets"), TARGETS)
def test_our_saved_adapter_gives_our_logits_in_peft(
    architecture: str, targets: dict[str, Any], tmp_path: Path
) -> None:
    attached = attach("lora", tiny_model(architecture), {"rank": 4, "alpha": 8.0, **targets}, seed=0)
    shake(attached)
    save_trained(attached, tmp_path / "a", tiny_tokenizer(vocab_size=300), "base", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of missing and unexpected keys
        warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers
        theirs: Any = PeftModel.from_pretrained(tiny_model(architecture), tmp_path / "a")
    reference = Attached("peft", theirs.get_base_model())
    torch.testing.assert_close(logits_of(attached, BATCH), logits_of(reference, BATCH), rtol=1e-5, atol=1e-6)
    adapted = {n for n, _ in theirs.named_parameters() if "lora_A" in n}
    assert len(adapted) * 2 == len(attached.trainable())


PEFT_TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]}),
    ("llama", {"target_modules": ["q_proj"], "layers_to_transform": 1}),
    ("llama", {"target_modules": r".*\.mlp\.(up|gate)_proj", "use_rslora": True}),
    ("llama", {"target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.up_proj"]}),
    ("gpt2", {"target_modules": GPT2, "fan_in_fan_out": True}),
]


@pytest.mark.parametrize(("architecture", "config"), PEFT_TARGETS)
def test_an_adapter_saved_by_peft_gives_its_logits_here(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    theirs = peft_model(architecture, **config)
    reference = Attached("peft", theirs.get_base_model())
    shake(reference)
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(tiny_model(architecture), tmp_path)
    torch.testing.assert_close(logits_of(ours, BATCH), logits_of(reference, BATCH), rtol=1e-5, atol=1e-6)


def test_the_saved_configuration_holds_pefts_keys_only(tmp_path: Path) -> None:
    """PEFT warns of every key it does not know."""
    attached = attach("lora", tiny_model("llama"), {"rank": 4}, seed=0)
    save_trained(attached, tmp_path / "a", tiny_tokenizer(vocab_size=300), "some/base", "v1")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert set(config) <= set(LoraConfig().to_dict())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/base", "v1")


def test_dropout_works_on_the_input_of_the_update_and_only_in_training() -> None:
    model = tiny_model("llama")
    attached = attach("lora", model, {"rank": 4, "dropout": 0.5}, seed=0)
    shake(attached)
    plain = attach("lora", tiny_model("llama"), {"rank": 4}, seed=0)
    shake(plain)
    assert torch.equal(logits_of(attached, BATCH), logits_of(plain, BATCH))
    module: Any = next(iter(attached.targets.values()))  # pyright: ignore[reportAttributeAccessIssue]
    hidden = torch.ones(200, 32)
    factors = module.lora.train()
    torch.manual_seed(0)
    out = factors(hidden, torch.zeros(200, factors.B.shape[0]))
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(hidden, 0.5)
    torch.testing.assert_close(out, factors.scale * dropped @ factors.A.T @ factors.B.T, rtol=1e-5, atol=1e-5)
    mean: Tensor = out.mean(dim=0) - factors.eval()(hidden, torch.zeros_like(out))[0]
    assert float(mean.detach().abs().max()) < 0.5


def test_the_factors_are_the_formula_in_float64() -> None:
    """y = W x + alpha / rank · B A x."""
    attached: Any = attach("lora", tiny_model("llama"), {"rank": 4, "alpha": 6.0}, seed=0)
    shake(attached)
    attached.model.double()
    name, module = next(iter(attached.targets.items()))
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    expected = x @ module.weight.T + 6.0 / 4 * (x @ module.lora.A.T @ module.lora.B.T)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
    update = copy.deepcopy(attached.factors()[name]).weight()
    torch.testing.assert_close(update, 6.0 / 4 * module.lora.B @ module.lora.A)
