"""The trained-parameter column of the ReFT paper (arXiv 2404.03592), from configurations alone.

Models have their real sizes, and no memory. The percentages are those that the paper prints, of all
parameters of the model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from leantune.methods import attach

SIZES: dict[str, dict[str, Any]] = {
    "LLaMA-7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "LLaMA-13B": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "Llama-2-7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "Llama-3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
TOTALS = {
    "LLaMA-7B": 6_738_415_616,
    "LLaMA-13B": 13_015_864_320,
    "Llama-2-7B": 6_738_415_616,
    "Llama-3-8B": 8_030_261_248,
}
# Commonsense-170K, Math-10K and GSM8K: all layers, seven first and seven last tokens, tied.
REASONING: dict[str, Any] = {"rank": 8, "layers": "all", "position": "f7+l7"}
# UltraFeedback: four layers, the ends of the prompt each with an intervention of its own.
INSTRUCT: dict[str, Any] = {"rank": 4, "layers": "3;9;18;24", "position": "f5+l5", "tied": False}
HALF = {**INSTRUCT, "rank": 2}
ALPACA: dict[str, Any] = {"rank": 4, "layers": "8;19", "position": "f1+l1", "tied": False}


def of_real_size(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES[name]))
    return model.requires_grad_(False)


def trained(model: PreTrainedModel, method: str, settings: dict[str, Any]) -> int:
    """How many values a method trains, and saves."""
    attached = attach(method, model, settings, seed=0)
    count = sum(p.numel() for p in attached.trainable().values())
    files = attached.export()
    assert files is not None
    assert sum(tensor.numel() for tensor in files.tensors.values()) == count
    return count


# LoReFT, and NodiReFT: the paper's DiReFT.
@pytest.mark.parametrize("method", ["loreft", "nodireft"])
@pytest.mark.parametrize(
    ("task", "name", "settings", "count", "printed"),
    [
        ("commonsense", "LLaMA-7B", REASONING, 2_097_408, "0.031"),
        ("commonsense", "LLaMA-13B", REASONING, 3_277_120, "0.025"),
        ("commonsense", "Llama-2-7B", REASONING, 2_097_408, "0.031"),
        ("commonsense", "Llama-3-8B", REASONING, 2_097_408, "0.026"),
        ("arithmetic", "LLaMA-7B", REASONING, 2_097_408, "0.031"),
        ("arithmetic", "LLaMA-13B", REASONING, 3_277_120, "0.025"),
        ("GSM8K", "LLaMA-7B", REASONING, 2_097_408, "0.031"),
        ("instruct", "Llama-2-7B", INSTRUCT, 262_176, "0.0039"),
        ("instruct, half", "Llama-2-7B", HALF, 131_088, "0.0019"),
    ],
)
def test_the_column_of_the_paper(
    task: str, name: str, settings: dict[str, Any], count: int, printed: str, method: str
) -> None:
    model = of_real_size(name)
    total = sum(p.numel() for p in model.parameters())
    assert total == TOTALS[name], task
    found = trained(model, method, settings)
    assert found == count, task
    digits = len(printed.partition(".")[2])
    assert f"{100 * found / total:.{digits}f}" == printed, task


@pytest.mark.parametrize(
    ("method", "settings", "count"),
    [
        ("loreft", ALPACA, 131_088),
        ("loreft", {"rank": 4, "layers": [8], "position": "l1"}, 32_772),
        ("direft", {"rank": 4, "layers": [8], "position": "l1"}, 32_772),
        ("noreft", {"rank": 4, "layers": [8], "position": "l1"}, 32_772),
        ("noreft", {"rank": 4, "layers": [8], "position": "l1", "projection_bias": True}, 32_776),
        ("lobireft", {"rank": 4, "layers": [8], "position": "l1"}, 16_388),
        ("consreft", {"rank": 1, "layers": [15], "position": "l1"}, 4_097),
    ],
)
def test_the_examples_of_pyreft(method: str, settings: dict[str, Any], count: int) -> None:
    """Its Alpaca run, one intervention of each kind, and the one that memorises a text."""
    assert trained(of_real_size("LLaMA-7B"), method, settings) == count


@pytest.mark.parametrize(
    ("hidden", "layers", "count"), [(768, 12, 18_444), (1024, 24, 49_176)], ids=["base", "large"]
)
def test_rank_1_on_the_sizes_of_roberta(hidden: int, layers: int, count: int) -> None:
    """The paper's GLUE counts (RoBERTa-base, -large), on decoders of the same sizes."""
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        intermediate_size=64,
        vocab_size=64,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    assert trained(model, "loreft", {"rank": 1, "position": "f1"}) == count


def test_lora_counts_rank_times_the_sides_of_every_layer() -> None:
    settings = {"rank": 16, "target_modules": ["q_proj", "v_proj"]}
    assert trained(of_real_size("LLaMA-7B"), "lora", settings) == 32 * 2 * 16 * (4096 + 4096)
