"""DoRA against PEFT: the same numbers from the same values, and adapters that either side can read."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from leantune.checkpoint.adapter import load_adapter, save_trained
from leantune.errors import CheckpointError
from leantune.methods import Attached, attach
from tests.batches import gradients, logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.models import tiny_model

BATCH = small_batch()


def lively_model(architecture: str) -> Any:
    """A random model whose biases are not the zeros that transformers starts with."""
    model = tiny_model(architecture)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def peft_model(architecture: str, **config: Any) -> Any:
    """A fresh base model with PEFT's DoRA on it."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for GPT-2 PEFT corrects fan_in_fan_out itself and says so
        return get_peft_model(lively_model(architecture), LoraConfig(use_dora=True, **options))


def in_peft(architecture: str, folder: Path) -> tuple[Any, Attached]:
    """The adapter of a folder as PEFT reads it; any key that it misses or does not expect fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers
        theirs: Any = PeftModel.from_pretrained(lively_model(architecture), folder)
    return theirs, Attached("peft", theirs.get_base_model())


def saved(attached: Attached, folder: Path) -> Path:
    save_trained(attached, folder, tiny_tokenizer(vocab_size=300), "some/base", "v1")
    return folder


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


OURS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rslora": True, "target_modules": ["q_proj", "down_proj"]}),
    ("llama", {"layers": "0;2", "alpha": 3.0}),
    ("qwen2", {"target_modules": ["q_proj", "v_proj"]}),
    ("gpt_neox", {}),
    ("gpt2", {}),
    ("gpt2", {"target_modules": ["c_attn"], "layers": [1]}),
]


@pytest.mark.parametrize(("architecture", "settings"), OURS)
def test_our_saved_adapter_gives_our_logits_in_peft(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    attached = attach("dora", lively_model(architecture), {"rank": 4, "alpha": 8.0, **settings}, seed=0)
    shake(attached)
    theirs, reference = in_peft(architecture, saved(attached, tmp_path / "a"))
    assert_same(logits_of(attached, BATCH), logits_of(reference, BATCH))
    magnitudes = {n for n, _ in theirs.named_parameters() if "lora_magnitude_vector" in n}
    assert len(magnitudes) * 3 == len(attached.trainable())
    loaded = [p for n, p in theirs.named_parameters() if "lora_magnitude_vector" in n]
    mine = [p for n, p in attached.trainable().items() if n.endswith(".magnitude")]
    assert all(torch.equal(a, b) for a, b in zip(loaded, mine, strict=True))


THEIRS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"use_rslora": True, "target_modules": r".*\.mlp\.(up|gate)_proj"}),
    ("qwen2", {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0, 2]}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
]


@pytest.mark.parametrize(("architecture", "config"), THEIRS)
def test_an_adapter_trained_and_saved_by_peft_gives_its_logits_here(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    theirs = peft_model(architecture, **config)
    reference = Attached("peft", theirs.get_base_model())
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    for _ in range(3):
        gradients(reference, BATCH)
        optimizer.step()
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(lively_model(architecture), tmp_path)
    assert ours.name == "dora"
    assert_same(logits_of(ours, BATCH), logits_of(reference, BATCH))
    base = logits_of(Attached("base", lively_model(architecture)), BATCH)
    assert not torch.allclose(logits_of(ours, BATCH), base, atol=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_the_same_values_give_pefts_gradients(architecture: str) -> None:
    ours = attach("dora", lively_model(architecture), {"rank": 4, "alpha": 8.0}, seed=0)
    shake(ours)
    theirs = peft_model(architecture, fan_in_fan_out=architecture == "gpt2")
    files = ours.export()
    assert files is not None
    parameters = _peft_parameters(theirs)
    assert parameters.keys() == files.tensors.keys()
    for name, tensor in files.tensors.items():
        parameters[name].data.copy_(tensor)
    for model in (ours.model, theirs):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # GPT-2's own
    gradients(ours, BATCH)
    gradients(Attached("peft", theirs.get_base_model()), BATCH)
    for name, mine in zip(files.tensors, _in_order(ours, files.tensors), strict=True):
        torch.testing.assert_close(mine, parameters[name].grad, rtol=1e-4, atol=1e-5)


def _peft_parameters(theirs: Any) -> dict[str, nn.Parameter]:
    """PEFT's trained parameters by the names that a saved adapter has."""
    names = {n: n.replace("_vector.default.weight", "_vector") for n, _ in theirs.named_parameters()}
    return {names[n].replace(".default.", "."): p for n, p in theirs.named_parameters() if p.requires_grad}


def _in_order(ours: Attached, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The gradients of our parameters, in the order of an export."""
    by_memory = {p.data_ptr(): p.grad for p in ours.trainable().values()}
    found = [by_memory[tensor.data_ptr()] for tensor in tensors.values()]
    return [gradient for gradient in found if gradient is not None]


def test_a_fresh_adapter_is_pefts_up_to_the_random_factor() -> None:
    """Magnitudes start as the row norms of the weight, of [in, out] ones too."""
    for architecture in ("llama", "gpt2"):
        files = attach("dora", lively_model(architecture), {"rank": 4}, seed=0).export()
        assert files is not None
        theirs = _peft_parameters(peft_model(architecture))
        assert theirs.keys() == files.tensors.keys()
        for name, tensor in files.tensors.items():
            assert tensor.shape == theirs[name].shape
            if "lora_A" not in name:
                torch.testing.assert_close(tensor, theirs[name].data, rtol=1e-6, atol=0)


def test_the_files_are_pefts(tmp_path: Path) -> None:
    attached = attach("dora", lively_model("llama"), {"rank": 4, "rslora": True, "dropout": 0.1}, seed=0)
    folder = saved(attached, tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert set(config) <= set(LoraConfig().to_dict())
    assert (config["use_dora"], config["use_rslora"], config["lora_dropout"]) == (True, True, 0.1)
    peft_model("llama").save_pretrained(tmp_path / "b")
    theirs = load_file(tmp_path / "b" / "adapter_model.safetensors")
    mine = load_file(folder / "adapter_model.safetensors")
    assert {n: t.shape for n, t in mine.items()} == {n: t.shape for n, t in theirs.items()}


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_the_method_of_an_adapter_is_told_by_its_content(method: str, tmp_path: Path) -> None:
    """LoRA and DoRA share a file name; a DoRA adapter loaded as LoRA would lose its magnitudes."""
    attached = attach(method, lively_model("llama"), {"rank": 4}, seed=0)
    shake(attached)
    loaded = load_adapter(lively_model("llama"), saved(attached, tmp_path / "a"))
    assert type(loaded) is type(attached)
    assert torch.equal(logits_of(loaded, BATCH), logits_of(attached, BATCH))


@pytest.mark.parametrize(("method", "word"), [("lora", "missing"), ("dora", "matching nothing in the model")])
def test_magnitudes_that_are_missing_or_too_many_are_named(method: str, word: str, tmp_path: Path) -> None:
    folder = saved(attach(method, lively_model("llama"), {"rank": 4}, seed=0), tmp_path / "a")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": method == "lora"}))
    with pytest.raises(CheckpointError, match=rf"{word}: .*lora_magnitude_vector.*\(21 in all\)"):
        load_adapter(lively_model("llama"), folder)


def test_peft_settings_that_would_be_lost_are_refused_for_dora_too(tmp_path: Path) -> None:
    folder = saved(attach("dora", lively_model("llama"), {"rank": 4}, seed=0), tmp_path / "a")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alpha_pattern": {"q_proj": 2}}))
    with pytest.raises(CheckpointError, match="alpha_pattern"):
        load_adapter(lively_model("llama"), folder)
