"""Finding blocks, linear layers and heads: whole names, and no match that is only nearly meant."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from leantune.errors import ModelError
from leantune.models.anatomy import (
    decoder_blocks,
    linear_sizes,
    linears,
    match_linears,
    output_head,
    select_blocks,
    summarise_names,
    text_config,
)
from tests.models import ARCHITECTURES, tiny_model


class Attention(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))


class Decoder(nn.Module):
    """A decoder of `num_layers` blocks, as Hugging Face models are laid out."""

    def __init__(self, num_layers: int, names: list[tuple[str, ...]] | None = None) -> None:
        super().__init__()
        blocks = names or [("q_proj", "v_proj")] * num_layers
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention(*block)}) for block in blocks)
        self.lm_head = nn.Linear(4, 9)
        self.config: Any = type("Config", (), {"num_hidden_layers": num_layers, "hidden_size": 4})()
        self.config.get_text_config = lambda decoder: self.config

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_blocks_of_every_architecture_are_found_in_order(architecture: str) -> None:
    model = tiny_model(architecture)
    blocks = decoder_blocks(model)
    assert [name.rpartition(".")[2] for name in blocks] == ["0", "1", "2"]
    assert all(dict(model.named_modules())[name] is block for name, block in blocks.items())
    assert all(type(block).__name__.endswith(("Layer", "Block")) for block in blocks.values())


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_all_linear_means_every_linear_layer_of_every_block_but_not_the_head(architecture: str) -> None:
    model = tiny_model(architecture)
    found = match_linears(model, "all-linear", None)
    head = output_head(model)
    assert all(module is not head for module in found.values())
    prefixes = tuple(f"{name}." for name in decoder_blocks(model))
    assert all(name.startswith(prefixes) for name in found)
    per_layer = [sum(name.startswith(prefix) for name in found) for prefix in prefixes]
    assert per_layer[0] >= 4
    assert per_layer == [per_layer[0]] * 3


def test_experts_as_many_as_layers_are_not_taken_for_blocks() -> None:
    model = Decoder(3)
    model.layers[0]["attn"].experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))  # pyright: ignore[reportIndexIssue]
    assert list(decoder_blocks(model)) == ["layers.0", "layers.1", "layers.2"]


def test_a_model_without_a_list_of_blocks_is_refused() -> None:
    model = Decoder(3)
    model.config.num_hidden_layers = 5
    with pytest.raises(ModelError, match="found no list of 5 decoder blocks"):
        decoder_blocks(model)


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelError, match="layer 3 does not exist; the model has 3 layers, 0 to 2"):
        select_blocks(tiny_model(), (1, 3))
    assert list(select_blocks(tiny_model(), (2, 0))) == ["model.layers.2", "model.layers.0"]


def test_names_are_compared_component_by_component() -> None:
    """`layers.3` in a substring match also trains layers 30 to 39."""
    model = Decoder(31)
    found = match_linears(model, ["layers.3.attn.q_proj"], None)
    assert list(found) == ["layers.3.attn.q_proj"]
    with pytest.raises(ModelError, match=r"'ayers\.3\.attn\.q_proj' matches no linear layer"):
        match_linears(model, ["ayers.3.attn.q_proj"], None)
    with pytest.raises(ModelError, match="'proj' matches no linear layer"):
        match_linears(model, ["proj"], None)
    with pytest.raises(ModelError, match=r"'layers\.3' matches no linear layer"):
        match_linears(model, ["layers.3"], None)


def test_layers_are_chosen_whole_too() -> None:
    assert list(match_linears(Decoder(31), ["q_proj"], (3,))) == ["layers.3.attn.q_proj"]


def test_names_suffixes_and_regular_expressions() -> None:
    model = tiny_model()
    assert len(match_linears(model, ["q_proj", "self_attn.v_proj"], None)) == 6
    assert len(match_linears(model, ["model.layers.1.mlp.up_proj"], None)) == 1
    assert len(match_linears(model, r".*\.(up|down)_proj", (0, 2))) == 4
    with pytest.raises(ModelError, match="matches no linear layer"):  # a regex must match the whole name
        match_linears(model, "q_proj", None)


def test_a_target_that_matches_nothing_is_an_error_even_beside_one_that_does() -> None:
    """Case 5: the misspelt half of a list was skipped."""
    with pytest.raises(
        ModelError, match=r"'v_prj' matches no linear layer; did you mean 'v_proj'\?"
    ) as caught:
        match_linears(tiny_model(), ["q_proj", "v_prj"], None)
    assert "linear layers here: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(
        caught.value
    )


def test_a_target_that_exists_in_some_layers_only_is_an_error_with_the_fix() -> None:
    """Case 5: hybrid models have attention in every other block."""
    model = Decoder(4, [("q_proj", "v_proj"), ("v_proj",), ("q_proj", "v_proj"), ("v_proj",)])
    with pytest.raises(ModelError, match=r"'q_proj' exists in 2 of 4 layers only.*method.layers to 0;2"):
        match_linears(model, ["q_proj", "v_proj"], None)
    assert len(match_linears(model, ["q_proj"], (0, 2))) == 2
    assert len(match_linears(model, ["layers.0.attn.q_proj"], None)) == 1


def test_a_target_outside_the_chosen_layers_is_an_error() -> None:
    with pytest.raises(ModelError, match="matches no linear layer"):
        match_linears(tiny_model(), ["model.layers.0.mlp.up_proj"], (1,))


def test_sizes_of_transposed_linear_layers() -> None:
    sizes = {linear_sizes(m) for n, m in linears(tiny_model("gpt2")).items() if n.endswith("c_attn")}
    assert sizes == {(32, 96)}
    assert linear_sizes(nn.Linear(3, 5)) == (3, 5)


def test_a_model_without_a_head_is_refused() -> None:
    model: Any = tiny_model()
    with pytest.raises(ModelError, match="has no output head"):
        output_head(model.model)


def test_the_summary_counts_names() -> None:
    assert summarise_names(["a.q", "b.q", "a.v"]) == "q ×2, v ×1"


def test_the_text_configuration_of_renamed_keys() -> None:
    assert text_config(tiny_model("gpt2")).hidden_size == 32
    assert text_config(tiny_model("gpt2")).num_hidden_layers == 3
