"""Interventions while generating: the same prompt tokens as in training, in any batch (case 13)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leantune.errors import ModelError
from leantune.generate.decode import Sampling, generate
from leantune.methods import attach
from leantune.models.anatomy import decoder_blocks
from tests.batches import lively, shake
from tests.fixtures import tiny_tokenizer
from tests.models import tiny_model

PROMPTS = [
    "SELECT name FROM employees",
    "the",
    "How many people are there? There are twelve of them, said the old man",
    "old man",
]
SETTINGS = {"rank": 4, "position": "f5+l5"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(vocab_size=320)


def edited(architecture: str, **settings: Any) -> Any:
    model = lively(tiny_model(architecture))
    attached = attach("loreft", model, {**SETTINGS, **settings}, seed=0)
    shake(attached, 1.0)
    return attached


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_left_padded_batch_answers_as_each_prompt_alone(
    architecture: str, tied: bool, tokenizer: Any
) -> None:
    """Case 13: padding used to shift the edited positions."""
    attached = edited(architecture, tied=tied)
    sampling = Sampling(max_new_tokens=8)
    together = generate(attached.model, tokenizer, PROMPTS, sampling, attached=attached, batch_size=4)
    alone = [
        generate(attached.model, tokenizer, [prompt], sampling, attached=attached)[0] for prompt in PROMPTS
    ]
    assert together == alone
    with attached.disabled():
        base = generate(attached.model, tokenizer, PROMPTS, sampling, attached=attached)
    assert together != base


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_decoding_with_a_cache_equals_reading_the_whole_text(architecture: str, tokenizer: Any) -> None:
    """With a KV cache only the prefill is edited; without one, every pass sees and edits the prompt."""
    attached = edited(architecture)
    answer = generate(attached.model, tokenizer, [PROMPTS[2]], Sampling(max_new_tokens=8), attached=attached)
    tokens = tokenizer(PROMPTS[2])["input_ids"]
    text = torch.tensor([tokens])
    with torch.no_grad(), attached.edits(torch.tensor([len(tokens)])):
        for _ in range(8):
            token = attached.model(input_ids=text, use_cache=False).logits[0, -1].argmax()
            text = torch.cat([text, token.view(1, 1)], dim=1)
    expected = tokenizer.decode(text[0, len(tokens) :], skip_special_tokens=True)
    assert expected.startswith(answer[0])
    assert answer[0]


def changed_positions(
    attached: Any, tokens: Tensor, lengths: list[int], starts: list[int]
) -> list[list[int]]:
    """Per row, the positions at which the first block's output differs from the base model's."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).clone())

    first_block = next(iter(decoder_blocks(attached.model).values()))
    handle = first_block.register_forward_hook(keep)
    with torch.no_grad(), attached.edits(torch.tensor(lengths), torch.tensor(starts)):
        attached.model(input_ids=tokens, use_cache=False)
        with attached.disabled():
            attached.model(input_ids=tokens, use_cache=False)
    handle.remove()
    differing = (seen[0] != seen[1]).any(dim=-1)
    return [row.nonzero().flatten().tolist() for row in differing]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_short_prompt_is_edited_at_both_ends_and_nowhere_twice(architecture: str, tied: bool) -> None:
    """Case 13: f5+l5 with a 3-token prompt."""
    attached = edited(architecture, tied=tied, layers=[0])
    assert attached.num_edited(3) == 2
    tokens = torch.randint(3, 300, (1, 3))
    assert changed_positions(attached, tokens, [3], [0]) == [[0, 2]]


def test_positions_follow_lengths_and_padding() -> None:
    attached = edited("llama", layers=[0], position="f2+l3")
    tokens = torch.randint(3, 300, (4, 12))
    right = changed_positions(attached, tokens, [10, 3, 1, 4], [0, 0, 0, 0])
    assert right == [[0, 1, 7, 8, 9], [0, 2], [], [0, 1, 2, 3]]
    left = changed_positions(attached, tokens, [10, 3, 1, 4], [2, 9, 11, 8])
    assert left == [[2, 3, 9, 10, 11], [9, 11], [], [8, 9, 10, 11]]


def test_only_the_chosen_layers_are_edited() -> None:
    tokens = torch.randint(3, 300, (1, 6))
    assert changed_positions(edited("llama", layers=[1, 2]), tokens, [6], [0]) == [[]]


def test_a_forward_pass_that_does_not_know_the_prompt_is_refused() -> None:
    """Edits left out without a word look like a model that learned nothing."""
    attached = edited("llama")
    with pytest.raises(ModelError, match="does not know which prompt tokens to edit"):
        attached.model(input_ids=torch.ones(1, 4, dtype=torch.int64))


def test_untied_interventions_are_one_for_each_end() -> None:
    """f5+l5 over two layers used to reach one end only."""
    attached = edited("llama", tied=False, layers=[0, 2])
    assert sorted(attached.interventions()) == [
        f"{layer}.block_output.{part}" for layer in (0, 2) for part in ("first", "last")
    ]
    one_end = edited("llama", tied=False, position="l2")
    assert sorted(one_end.interventions()) == [f"{layer}.block_output.last" for layer in range(3)]
