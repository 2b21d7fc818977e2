"""Rows of one batch that differ in everything answer as each would alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from leantune.errors import ConfigError
from leantune.generate.batch import decode_rows
from leantune.generate.decode import generate
from leantune.generate.draw import draw
from leantune.generate.prompts import encode_prompts, stop_ids
from leantune.generate.rows import Piece, Row
from leantune.generate.sampling import Sampling
from leantune.methods import Attached, attach
from leantune.methods.choice import AdapterSet
from tests.batches import lively, shake
from tests.fixtures import tiny_tokenizer
from tests.models import tiny_model

PROMPTS = [
    "SELECT name FROM employees",
    "the",
    "How many people are there? There are twelve of them, said the old man",
    "old man",
    "Below is an instruction",
    "a",
    "the capital of France",
]
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {"rank": 4}),
    "both": ("loreft", {"rank": 4, "position": "f2+l2"}),
    "last": ("nodireft", {"rank": 2, "position": "l1", "component": "mlp_output"}),
    "untied": ("loreft", {"rank": 2, "position": "f1+l3", "tied": False}),
    "every": ("noreft", {"rank": 2, "position": "l1", "generation": "all"}),
}
NAMES = ["lora", "both", None, "last", "untied", "every", "both"]
GREEDY = Sampling(max_new_tokens=9)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(vocab_size=320)


def alone(architecture: str, name: str | None) -> Attached:
    """An adapter on a model of its own."""
    model = lively(tiny_model(architecture))
    if name is None:
        return Attached("base", model)
    method, settings = METHODS[name]
    attached = attach(method, model, settings, seed=0)
    shake(attached, 0.3)
    return attached


def side_by_side(architecture: str, references: dict[str | None, Attached]) -> AdapterSet:
    """The same adapters on one model."""
    model = lively(tiny_model(architecture))
    adapters = {}
    for name, reference in references.items():
        if name is not None:
            adapters[name] = attach(METHODS[name][0], model, METHODS[name][1], seed=1)
            files = reference.export()
            assert files is not None
            adapters[name].load(files.tensors, name)
    return AdapterSet(model, adapters)


def row(model: Any, tokenizer: Any, prompt: str, sampling: Sampling = GREEDY, **options: Any) -> Row:
    tokens = encode_prompts(model, tokenizer, [prompt], sampling.max_new_tokens)[0].ids
    return Row(tokens, sampling, frozenset(stop_ids(model, tokenizer)), **options)


def answered(attached: Attached, tokenizer: Any, rows: list[Row]) -> tuple[list[str], list[Piece]]:
    """The answers, and the last piece of each."""
    pieces: list[list[Piece]] = [[] for _ in rows]
    decode_rows(attached.model, tokenizer, rows, attached, lambda piece: pieces[piece.row].append(piece))
    assert all(piece.finish is None for of_row in pieces for piece in of_row[:-1])
    return ["".join(piece.text for piece in of_row) for of_row in pieces], [of_row[-1] for of_row in pieces]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox", "qwen3", "mixtral"])
def test_each_row_answers_as_its_adapter_alone(architecture: str, tokenizer: Any) -> None:
    """A batch mixes adapters, lengths and ends; rows that end early leave it."""
    references = {name: alone(architecture, name) for name in dict.fromkeys(NAMES)}
    together = side_by_side(architecture, references)
    lengths = [9, 2, 5, 1, 12, 9, 3]
    rows = [
        row(together.model, tokenizer, prompt, replace(GREEDY, max_new_tokens=length), adapter=name)
        for prompt, name, length in zip(PROMPTS, NAMES, lengths, strict=True)
    ]
    answers, ends = answered(together, tokenizer, rows)
    expected = [
        generate(
            references[name].model,
            tokenizer,
            [prompt],
            replace(GREEDY, max_new_tokens=length),
            attached=references[name],
        )[0]
        for prompt, name, length in zip(PROMPTS, NAMES, lengths, strict=True)
    ]
    assert answers == expected
    assert [end.num_tokens for end in ends if end.finish == "length"] == [
        length for length, end in zip(lengths, ends, strict=True) if end.finish == "length"
    ]
    base = generate(references[None].model, tokenizer, PROMPTS, GREEDY)
    assert sum(a[:3] != b[:3] for a, b in zip(answers, base, strict=True)) > 2


def test_a_prompt_of_one_token_is_not_edited_again_at_every_step(tokenizer: Any) -> None:
    """The next token looks like the prompt: one token wide, but for the cache."""
    reference = alone("llama", "both")
    model = reference.model
    tokens = encode_prompts(model, tokenizer, ["a"], 1)[0].ids
    assert len(tokens) == 1
    text = torch.tensor([tokens])
    with torch.no_grad(), reference.edits(torch.tensor([1])):
        for _ in range(6):
            token = model(input_ids=text, use_cache=False).logits[0, -1].argmax()  # pyright: ignore
            text = torch.cat([text, token.view(1, 1)], dim=1)
    rows = [row(model, tokenizer, "a", replace(GREEDY, max_new_tokens=6))]
    answers, _ = answered(reference, tokenizer, rows)
    assert tokenizer.decode(text[0, 1:], skip_special_tokens=True).startswith(answers[0])
    assert answers[0]


def test_rows_are_told_apart_by_strength_and_subspaces(tokenizer: Any) -> None:
    """Strength 0, or no dimension that acts, is the base model; the neighbours stay as they are."""
    attached = alone("llama", "both")
    adapters = AdapterSet(attached.model, {"both": attached})
    none = torch.zeros(4, dtype=torch.bool)
    asked: list[dict[str, Any]] = [{}, {"strength": 0.0}, {"subspaces": none}, {"strength": 1.0}]
    rows = [row(attached.model, tokenizer, PROMPTS[2], adapter="both", **options) for options in asked]
    answers, _ = answered(adapters, tokenizer, rows)
    (edited,) = generate(attached.model, tokenizer, [PROMPTS[2]], GREEDY, attached=attached)
    with attached.disabled():
        (base,) = generate(attached.model, tokenizer, [PROMPTS[2]], GREEDY)
    assert base != edited
    assert answers == [edited, base, base, edited]


def test_a_seed_draws_the_same_in_any_company(tokenizer: Any) -> None:
    """In a shared stream of random numbers the neighbours would decide."""
    model = lively(tiny_model("llama"), 3.0)
    base = Attached("base", model)
    drawn = Sampling(max_new_tokens=10, temperature=1.5, top_p=0.9, top_k=50, seed=3)
    mine = row(model, tokenizer, PROMPTS[0], drawn)
    others = [row(model, tokenizer, PROMPTS[2], replace(drawn, seed=seed)) for seed in (4, 5)]
    (lonely,), _ = answered(base, tokenizer, [row(model, tokenizer, PROMPTS[0], drawn)])
    company, _ = answered(base, tokenizer, [others[0], mine, others[1]])
    assert company[1] == lonely
    assert company[0] != company[2]


def test_answers_end_at_stop_strings_and_when_they_are_cancelled(tokenizer: Any) -> None:
    model = lively(tiny_model("llama"))
    base = Attached("base", model)
    (whole,), _ = answered(base, tokenizer, [row(model, tokenizer, PROMPTS[0])])
    stop = whole[len(whole) // 2 :][:2]
    rows = [
        row(model, tokenizer, PROMPTS[0], stop_strings=(stop,)),
        row(model, tokenizer, PROMPTS[0], cancelled=True),
        row(model, tokenizer, PROMPTS[0]),
    ]
    answers, ends = answered(base, tokenizer, rows)
    assert answers[0] == whole[: whole.index(stop)]
    assert [end.finish for end in ends] == ["stop", "cancelled", "length"]
    assert ends[1].num_tokens == 1
    assert answers[2] == whole


def test_what_a_batch_of_rows_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_beams 2"):
        Row([1], Sampling(num_beams=2))


def test_only_the_likeliest_tokens_are_drawn() -> None:
    """top_k keeps k tokens; top_p the smallest set that reaches p, at least one."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(**settings: Any) -> set[int]:
        return {draw(logits, Sampling(temperature=1.0, **settings), generator) for _ in range(300)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.6) == {0, 1}
    assert drawn(top_p=0.81) == {0, 1, 2}
    assert drawn(top_p=0.01) == {0}
