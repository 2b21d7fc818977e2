"""Tiny random models of many architectures, built from configurations: no download, no fixture files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Sizes at which every linear layer fills whole blocks of a packed base; GPT-2 goes by `n_embd`, `n_layer`.
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "n_layer": 2,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_neox": {"num_key_value_heads": None},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0},
    "stablelm": {},
    "cohere": {},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
}

# Decoders with other blocks, for what goes by the parts of a block.
OTHER_BLOCKS: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "bloom": {"n_layer": 3, "n_head": 4},
    "falcon": {"ffn_hidden_size": 48, "head_dim": None},
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 48, "rotary_dim": 4},
    "phi": {},
}
_KNOWN = {**ARCHITECTURES, **OTHER_BLOCKS}


def tiny_model(
    architecture: str = "llama", seed: int = 0, *, wide: bool = False, **changes: Any
) -> PreTrainedModel:
    """A frozen random fp32 model in eval mode; `wide`: its linear layers can be packed."""
    settings = {**_COMMON, **_KNOWN[architecture], **(WIDE if wide else {}), **changes}
    config = AutoConfig.for_model(architecture, **{k: v for k, v in settings.items() if v is not None})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def save_tiny(folder: Path, tokenizer: Any, architecture: str = "llama", **changes: Any) -> Path:
    """A model folder with a tokenizer, as `model.name` of a run."""
    tiny_model(architecture, vocab_size=max(320, len(tokenizer)), **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
