"""The numbers of trained values that the paper reports, on models of their real sizes (without memory)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from leantune.methods import attach


def llama_7b() -> PreTrainedModel:
    """LLaMA-7B's hidden size and layers; what no intervention touches is narrow."""
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=64, vocab_size=64
    )
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"rank": 8}, 2_097_408),
        ({"rank": 4, "layers": "8;19", "position": "f1+l1", "tied": False}, 131_088),
        ({"rank": 4, "layers": [8], "position": "l1", "tied": False}, 32_772),
        ({"rank": 4, "layers": "3;9;18;24", "position": "f5+l5", "tied": False}, 262_176),
        ({"rank": 4, "layers": "3;9;18;24", "position": "f5+l5", "tied": True}, 131_088),
    ],
)
def test_loreft_on_llama_7b(settings: dict[str, Any], count: int) -> None:
    attached = attach("loreft", llama_7b(), settings, seed=0)
    assert sum(p.numel() for p in attached.trainable().values()) == count
    files = attached.export()
    assert files is not None
    assert sum(tensor.numel() for tensor in files.tensors.values()) == count


def test_loreft_of_rank_1_on_12_layers_of_768() -> None:
    """The paper's RoBERTa-base count, on a decoder of the same sizes."""
    config = LlamaConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=64, vocab_size=64
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    attached = attach("loreft", model, {"rank": 1}, seed=0)
    assert sum(p.numel() for p in attached.trainable().values()) == 18_444


def test_lora_counts_rank_times_the_sides_of_every_layer() -> None:
    attached = attach("lora", llama_7b(), {"rank": 16, "target_modules": ["q_proj", "v_proj"]}, seed=0)
    assert sum(p.numel() for p in attached.trainable().values()) == 32 * 2 * 16 * (4096 + 4096)
