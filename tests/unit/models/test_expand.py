"""Block expansion: where new blocks go, what is zero in them, and that they add nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from leantune.errors import ModelError
from leantune.models.anatomy import decoder_blocks
from leantune.models.expand import (
    ExpandedNames,
    Expansion,
    check_identity,
    check_same_blocks,
    expanded_config,
    new_blocks,
    plan_expansion,
    probe_tokens,
    residual_writers,
)
from tests.expanded import expand_in_memory, tiny_expanded
from tests.models import ARCHITECTURES, tiny_model

MOE = {"num_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2, "moe_intermediate_size": 48}
EVERYWHERE = pytest.mark.parametrize("architecture", list(ARCHITECTURES))


def config_of(architecture: str, num_layers: int, **changes: Any) -> Any:
    return AutoConfig.for_model(architecture, num_hidden_layers=num_layers, **changes)


@pytest.mark.parametrize(
    ("num_layers", "blocks", "origins", "new"),
    [
        (3, 1, (0, 1, 2, 2), (3,)),
        (3, 2, (0, 0, 1, 2, 2), (1, 4)),
        (4, 2, (0, 1, 1, 2, 3, 3), (2, 5)),
        (2, 2, (0, 0, 1, 1), (1, 3)),
    ],
)
def test_new_blocks_follow_the_blocks_that_they_copy(
    num_layers: int, blocks: int, origins: tuple[int, ...], new: tuple[int, ...]
) -> None:
    assert plan_expansion(config_of("llama", num_layers), blocks) == Expansion(origins, new)


@pytest.mark.parametrize("num_layers", [5, 7, 12, 30])
def test_any_number_of_blocks_is_spread_without_repeats(num_layers: int) -> None:
    for blocks in range(1, num_layers + 1):
        expansion = plan_expansion(config_of("llama", num_layers), blocks)
        assert len(expansion.new) == blocks
        assert len(expansion.origins) == num_layers + blocks
        assert expansion.new[-1] == num_layers + blocks - 1
        assert all(expansion.origins[i] == expansion.origins[i - 1] for i in expansion.new)
        assert sorted(set(expansion.origins)) == list(range(num_layers))


@pytest.mark.parametrize("blocks", [0, -1, 4])
def test_an_impossible_number_of_blocks_is_refused(blocks: int) -> None:
    with pytest.raises(ModelError, match=rf"method.blocks: {blocks} .* expected 1 to 3"):
        plan_expansion(config_of("llama", 3), blocks)


def test_values_per_layer_follow_their_layer() -> None:
    """A list of layer types that kept its length made a model that transformers refuses to build."""
    config = config_of("gemma2", 3)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config.layer_types = list(kinds)
    expanded = expanded_config(config, plan_expansion(config, 2))
    assert expanded.num_hidden_layers == 5
    assert expanded.layer_types == [kinds[0], kinds[0], kinds[1], kinds[2], kinds[2]]
    assert new_blocks(expanded) == (1, 4)
    assert (config.num_hidden_layers, config.layer_types, new_blocks(config)) == (3, kinds, None)


def test_layers_that_are_named_by_index_are_named_by_their_new_index() -> None:
    config = config_of("qwen3_moe", 4, mlp_only_layers=[1, 2])
    expanded = expanded_config(config, Expansion((0, 1, 1, 2, 3, 3), (2, 5)))
    assert expanded.mlp_only_layers == [1, 2, 3]


def test_lists_that_say_nothing_about_layers_stay() -> None:
    """A model with three end tokens and three layers."""
    config = config_of("llama", 3, eos_token_id=[1, 2, 5])
    config.architectures = ["LlamaForCausalLM"]
    expanded = expanded_config(config, plan_expansion(config, 1))
    assert expanded.eos_token_id == [1, 2, 5]
    assert expanded.architectures == ["LlamaForCausalLM"]


def test_gpt2_names_its_number_of_layers_in_its_own_way() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=4)
    expanded = expanded_config(config, plan_expansion(config, 2))
    assert (expanded.n_layer, expanded.to_dict()["n_layer"]) == (6, 6)


def test_the_text_part_of_a_larger_configuration_is_expanded() -> None:
    config = AutoConfig.for_model("gemma3")
    config.text_config.num_hidden_layers = 2
    config.text_config.layer_types = ["sliding_attention", "full_attention"]
    vision = config.vision_config.num_hidden_layers
    expanded = expanded_config(config, plan_expansion(config, 1))
    assert expanded.text_config.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    assert expanded.vision_config.num_hidden_layers == vision
    assert new_blocks(expanded) == (2,)


def test_names_are_matched_whole_with_more_than_ten_layers() -> None:
    """A prefix match on `layers.1` also meant layers 10 to 19."""
    config = config_of("llama", 24)
    expansion = plan_expansion(config, 12)
    zero = frozenset({"mlp.down_proj.weight"})
    names = ExpandedNames("model.layers", expansion, dict.fromkeys(expansion.new, zero))
    for layer, origin in enumerate(expansion.origins):
        is_new = layer in expansion.new
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        assert names(name) == (f"model.layers.{origin}.mlp.down_proj.weight", is_new)
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        assert names(name) == (f"model.layers.{origin}.mlp.up_proj.weight", False)
    for name in ("model.norm.weight", "lm_head.weight", "model.layers_norm.2.weight", "x.model.layers.2.w"):
        assert names(name) == (name, False)


WRITERS = {
    "phi3": {"self_attn.o_proj.weight", "mlp.down_proj.weight"},  # o_proj is registered before qkv_proj
    "gpt2": {"attn.c_proj.weight", "attn.c_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"},
    "gpt_neox": {
        "attention.dense.weight",
        "attention.dense.bias",
        "mlp.dense_4h_to_h.weight",
        "mlp.dense_4h_to_h.bias",
    },
    "mixtral": {"self_attn.o_proj.weight", "mlp.experts.down_proj"},
}


@EVERYWHERE
def test_what_writes_into_the_residual_stream_is_found_by_structure(architecture: str) -> None:
    expected = WRITERS.get(architecture, {"self_attn.o_proj.weight", "mlp.down_proj.weight"})
    block = decoder_blocks(tiny_model(architecture))
    for module in block.values():
        found = residual_writers(module.to("meta"), 32)
        assert (set(found), len(found)) == (expected, len(expected))


def test_writers_of_blocks_built_in_other_ways() -> None:
    """OPT keeps its second matrix in the block itself; shared experts and biases of stacks write as well."""
    changes = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    opt = next(iter(decoder_blocks(_any_model("opt", **changes)).values()))
    assert set(residual_writers(opt, 32)) == {
        "fc2.weight",
        "fc2.bias",
        "self_attn.out_proj.weight",
        "self_attn.out_proj.bias",
    }
    moe = next(iter(decoder_blocks(_any_model("qwen2_moe", **MOE)).values()))
    assert set(residual_writers(moe, 32)) == {
        "self_attn.o_proj.weight",
        "mlp.experts.down_proj",
        "mlp.shared_expert.down_proj.weight",
    }
    stacks = nn.Module()
    for name, shape in (
        ("up", (2, 32, 48)),
        ("up_bias", (2, 48)),
        ("down", (2, 48, 32)),
        ("down_bias", (2, 32)),
    ):
        stacks.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
    assert residual_writers(stacks, 32) == ["down", "down_bias"]
    convolution = nn.Sequential(nn.Conv1d(32, 32, 3), nn.Linear(48, 32, bias=False))
    assert residual_writers(convolution, 32) == ["1.weight"]


def _any_model(architecture: str, **changes: Any) -> Any:
    """A tiny random model of an architecture that is none of the fourteen."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(architecture, **sizes, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


@EVERYWHERE
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_an_expanded_model_gives_the_same_logits_bit_for_bit(architecture: str, blocks: int) -> None:
    plain, wide, expansion = tiny_expanded(architecture, blocks)
    check_same_blocks(plain, wide, expansion)
    check_identity(wide, expansion)
    ids = torch.randint(3, 320, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(wide(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_a_new_block_that_adds_something_is_refused_by_name() -> None:
    """A writer that nobody knew of must not slip through: the claim is checked by running the model."""
    _, wide, expansion = tiny_expanded("llama", 2)
    last: Any = list(decoder_blocks(wide).values())[expansion.new[1]]
    last.mlp.down_proj.weight.data[0, 0] = 1e-3
    with pytest.raises(
        ModelError, match=r"new block model\.layers\.4 \(a copy of block 2\) is not an identity"
    ):
        check_identity(wide, expansion)


def test_a_block_that_norms_the_residual_stream_is_refused() -> None:
    changes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False}
    wide, expansion = expand_in_memory(_any_model("opt", **changes), 1)
    with pytest.raises(ModelError, match="cannot be expanded"):
        check_identity(wide, expansion)


def test_the_check_leaves_the_model_as_it_was() -> None:
    _, wide, expansion = tiny_expanded("llama", 1)
    wide.train()
    frozen = next(iter(decoder_blocks(wide).values())).eval()
    check_identity(wide, expansion)
    assert wide.training
    assert not frozen.training
    assert not any(block._forward_hooks for block in decoder_blocks(wide).values())


def test_a_model_that_scales_by_the_index_of_a_layer_is_refused() -> None:
    """GPT-2 can divide attention by the number of the layer; blocks behind a new one would change."""
    plain = tiny_model("gpt2", scale_attn_by_inverse_layer_idx=True)
    wide, expansion = expand_in_memory(plain, 1)
    with pytest.raises(ModelError, match=r"transformer\.h\.3 .* from block 2 .*\(attn\.scaling: "):
        check_same_blocks(plain, wide, expansion)


def test_a_model_whose_experts_come_by_index_is_refused() -> None:
    plain = _any_model("qwen3_moe", decoder_sparse_step=2, **MOE)
    config = expanded_config(plain.config, plan_expansion(plain.config, 2))
    wide = type(plain)(config)
    with pytest.raises(ModelError, match="is built differently from block 0"):
        check_same_blocks(plain, wide, plan_expansion(plain.config, 2))


def test_probes_lie_in_the_vocabulary_and_differ() -> None:
    ids = probe_tokens(tiny_model("llama"))
    assert ids.shape == (1, 8)
    assert len(set(ids[0].tolist())) == 8
    assert int(ids.min()) > 0
    assert int(ids.max()) < 320
