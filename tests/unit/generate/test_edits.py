"""What is asked of interventions at use: their strength, subspaces and tokens, and marked spans."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import pytest
import torch
from torch import Tensor

from leantune.errors import ConfigError, ModelError
from leantune.generate.decode import generate, stream
from leantune.generate.edits import EditSettings
from leantune.generate.sampling import Sampling
from leantune.methods import Attached, attach
from leantune.methods.prompts import EditOptions
from tests.batches import lively, shake
from tests.fixtures import tiny_llama, tiny_tokenizer

PROMPTS = ["the", "How many people are there? There are twelve", "SELECT name FROM", "Q: "]
GREEDY = Sampling(max_new_tokens=10)
SUBSPACES = {"formal": "0-1", "sql": "2-3"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def base() -> Any:
    """The frozen model that the adapters of this file are on."""
    return lively(tiny_llama()).requires_grad_(False)


def edited(method: str = "loreft", **settings: Any) -> Attached:
    """A model whose answers its interventions change."""
    settings = {"rank": 4, "position": "f2+l2", "subspaces": SUBSPACES, **settings}
    attached = attach(method, base(), settings, seed=0)
    shake(attached, 0.5)
    return attached


def ask(
    attached: Attached,
    tokenizer: Any,
    edits: EditSettings | Sequence[EditSettings] = EditSettings(),  # noqa: B008
    prompts: Sequence[str] = PROMPTS,
    sampling: Sampling = GREEDY,
    **options: Any,
) -> list[str]:
    return generate(attached.model, tokenizer, prompts, sampling, attached=attached, edits=edits, **options)


class Told(Attached):
    """Notes what `edits` was told, and obeys nothing."""

    edits_states = True

    def __init__(self, markers: tuple[str, str] | None = None) -> None:
        super().__init__("told", base())
        self.markers = markers
        self.told: list[dict[str, Any]] = []

    @contextmanager
    def edits(
        self, prompt_lengths: Tensor, prompt_starts: Tensor | None = None, **options: Unpack[EditOptions]
    ) -> Generator[None]:
        self.told.append({"lengths": prompt_lengths, "starts": prompt_starts, **options})
        yield

    def subspace_mask(self, names: Sequence[str | int]) -> Tensor:
        return torch.tensor([index in names for index in range(3)])


def test_strength_zero_is_the_untouched_model_and_one_is_as_trained(tokenizer: Any) -> None:
    attached = edited()
    trained = ask(attached, tokenizer)
    untouched = ask(Attached("none", base()), tokenizer)
    assert trained != untouched
    assert ask(attached, tokenizer, EditSettings(strength=0)) == untouched
    assert ask(attached, tokenizer, EditSettings(strength=1)) == trained
    assert ask(attached, tokenizer, EditSettings(strength=-4.0)) not in (trained, untouched)


def test_all_subspaces_are_the_whole_and_one_is_not(tokenizer: Any) -> None:
    attached = edited()
    trained = ask(attached, tokenizer)
    for whole in ("formal,sql", ["sql", "formal"], [0, 1, 2, 3], ["formal", 2, 3]):
        assert ask(attached, tokenizer, EditSettings(subspaces=whole)) == trained  # pyright: ignore[reportArgumentType]
    parts = [ask(attached, tokenizer, EditSettings(subspaces=(name,))) for name in SUBSPACES]
    assert trained not in parts
    assert parts[0] != parts[1]


def test_tokens_after_the_prompt_are_edited_if_asked_for(tokenizer: Any) -> None:
    attached = edited(position="l1")
    answers = {g: ask(attached, tokenizer, EditSettings(generation=g)) for g in ("prompt", "all", "new")}
    assert answers["prompt"] == ask(attached, tokenizer)
    assert len({tuple(a) for a in answers.values()}) == 3
    every = edited(position="l1", generation="all")
    assert ask(every, tokenizer) == answers["all"]
    assert ask(every, tokenizer, EditSettings(generation="prompt")) == answers["prompt"]


@pytest.mark.parametrize("beams", [1, 3])
def test_each_prompt_of_a_batch_has_what_is_asked_for_it(tokenizer: Any, beams: int) -> None:
    """Prompts are sorted by length, padded and repeated for beams; each must keep its own settings."""
    attached, sampling = edited(), Sampling(max_new_tokens=8, num_beams=beams)
    asked = [
        EditSettings(strength=0.0),
        EditSettings(subspaces=("sql",)),
        EditSettings(strength=3.0, subspaces=("formal",)),
        EditSettings(),
    ]
    together = ask(attached, tokenizer, asked, sampling=sampling, batch_size=3)
    alone = [
        ask(attached, tokenizer, one, [prompt], sampling)[0]
        for one, prompt in zip(asked, PROMPTS, strict=True)
    ]
    assert together == alone


def test_a_stream_and_the_whole_answer_are_edited_alike(tokenizer: Any) -> None:
    attached = edited()
    for edits in (EditSettings(strength=0.0), EditSettings(subspaces=("sql",))):
        pieces = stream(attached.model, tokenizer, PROMPTS[1], GREEDY, attached, edits=edits)
        assert "".join(pieces) == ask(attached, tokenizer, edits, [PROMPTS[1]])[0]


def test_nothing_is_told_where_nothing_is_asked(tokenizer: Any) -> None:
    """A strength of ones cost a product at every intervention."""
    told = Told()
    ask(told, tokenizer)
    assert told.told[0].keys() == {"lengths", "starts", "marked"}


def test_marks_are_told_with_the_padding_and_for_every_beam(tokenizer: Any) -> None:
    told = Told(markers=("[[", "]]"))
    prompts = ["a [[b]]", "the old man said [[a]] and"]
    ask(told, tokenizer, prompts=prompts, sampling=Sampling(max_new_tokens=2, num_beams=2))
    [options] = told.told
    marked, lengths, starts = options["marked"], options["lengths"], options["starts"]
    assert marked.shape == (4, int(lengths.max()))
    assert marked.sum(dim=1).tolist() == [1, 1, 1, 1]
    assert marked[2].nonzero().item() == starts[2] + lengths[2] - 1
    assert torch.equal(marked[0], marked[1])


def test_marked_spans_alone_are_edited_and_no_markers_reach_the_model(tokenizer: Any) -> None:
    attached = edited(position="markers", markers=("[[", "]]"))
    untouched = Attached("none", base())
    plain, marked = "the old man said so", "the old[[ man]] said so"
    assert ask(attached, tokenizer, prompts=[plain]) == ask(untouched, tokenizer, prompts=[plain])
    assert ask(attached, tokenizer, prompts=[marked]) != ask(untouched, tokenizer, prompts=[plain])
    assert ask(attached, tokenizer, EditSettings(strength=0), [marked]) == ask(
        untouched, tokenizer, prompts=[plain]
    )
    alone = [ask(attached, tokenizer, prompts=[prompt])[0] for prompt in (plain, marked, PROMPTS[1])]
    assert ask(attached, tokenizer, prompts=[plain, marked, PROMPTS[1]]) == alone


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize(
    ("edits", "named"),
    [
        (EditSettings(strength=0.5), "strength"),
        (EditSettings(subspaces=(0,)), "subspaces"),
        (EditSettings(generation="all"), "generation"),
        (EditSettings(strength=0.5, subspaces=(0,)), "strength, subspaces"),
    ],
)
def test_a_model_without_interventions_refuses(
    tokenizer: Any, method: str, edits: EditSettings, named: str
) -> None:
    """The answers were those of the adapter at full strength."""
    attached = attach(method, tiny_llama(), {"rank": 2}, seed=0)
    with pytest.raises(ModelError, match=f"^{named}: method {method} has no interventions to obey it"):
        ask(attached, tokenizer, edits)
    assert ask(attached, tokenizer, EditSettings())


@pytest.mark.parametrize(("choice", "expected"), [("forma", "no subspace 'forma'"), ("4", "dimension 4")])
def test_subspaces_that_the_adapter_does_not_have_are_refused(
    tokenizer: Any, choice: str, expected: str
) -> None:
    with pytest.raises(ModelError, match=expected):
        ask(edited(), tokenizer, EditSettings(subspaces=choice))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"strength": float("nan")}, "strength: nan is not a number"),
        ({"strength": True}, "strength: True"),
        ({"strength": "1"}, "strength: '1'"),
        ({"generation": "answer"}, "generation: 'answer' is none of prompt, all, new"),
        ({"subspaces": []}, "subspaces: no subspace is listed"),
        ({"subspaces": "a,,b"}, "subspaces: '' is neither"),
    ],
)
def test_values_that_cannot_be_obeyed_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EditSettings(**values)


def test_settings_for_each_prompt_must_be_as_many_and_of_one_generation(tokenizer: Any) -> None:
    """One batch has one mode: the first prompt's was taken for all."""
    with pytest.raises(ConfigError, match="1 settings for 4 prompts"):
        ask(edited(), tokenizer, [EditSettings()])
    mixed = [EditSettings(generation="all"), *[EditSettings()] * 3]
    with pytest.raises(ConfigError, match="with the same generation"):
        ask(edited(), tokenizer, mixed)


@pytest.mark.parametrize("strength", [1e39, -101, float("nan"), True, "1"])
def test_a_strength_that_no_state_survives_is_refused(strength: Any) -> None:
    with pytest.raises(ConfigError, match="strength"):
        EditSettings(strength)
