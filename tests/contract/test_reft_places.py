"""Interventions edit the module, the layers and the tokens that were asked for, and nothing else.

Every place is watched from both sides: one hook from before the interventions were attached sees the
states as the module gave them, one from after sees what becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leantune.config.positions import parse_position
from leantune.errors import ModelError
from leantune.methods import Attached, attach
from leantune.methods.reft import AttachedReft
from leantune.models.anatomy import COMPONENTS, decoder_blocks
from tests.batches import gradients, lively, logits_of, shake, small_batch
from tests.models import ARCHITECTURES, OTHER_BLOCKS, tiny_model

LENGTHS = [6, 9, 3, 1]
WIDTH = 12
TOKENS = torch.randint(3, 300, (len(LENGTHS), WIDTH), generator=torch.Generator().manual_seed(5))
# The parts of a block as its class calls them: attention, MLP, activation. Written out, so that what finds
# them is compared with somebody's reading of the models.
_LLAMA = ("self_attn", "mlp", "mlp.act_fn")
MODULES: dict[str, tuple[str, str, str | None]] = {
    **dict.fromkeys(ARCHITECTURES, _LLAMA),
    "phi3": ("self_attn", "mlp", "mlp.activation_fn"),
    "gpt2": ("attn", "mlp", "mlp.act"),
    "gpt_neox": ("attention", "mlp", "mlp.act"),
    "mixtral": ("self_attn", "mlp", None),
    "opt": ("self_attn", "fc2", "activation_fn"),
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h", None),  # around these it adds the residual
    "falcon": ("self_attention", "mlp", "mlp.act"),
    "gptj": ("attn", "mlp", "mlp.act"),
    "phi": ("self_attn", "mlp", "mlp.activation_fn"),
}
PLACES = [(a, c) for a in (*ARCHITECTURES, *OTHER_BLOCKS) for c in COMPONENTS]
REFUSED = [("mixtral", "mlp_activation"), ("bloom", "mlp_activation")]


def module_of(block: nn.Module, architecture: str, component: str) -> nn.Module:
    whole = ("", "")  # block_output, block_input
    name = (*whole, *MODULES[architecture])[COMPONENTS.index(component)]
    assert name is not None
    return block.get_submodule(name)


class Watched:
    """A model with interventions whose places are watched: (layer, component) -> states before and after."""

    def __init__(
        self,
        places: Sequence[tuple[int, str]],
        architecture: str = "llama",
        method: str = "loreft",
        **settings: Any,
    ) -> None:
        self.model: Any = lively(tiny_model(architecture))
        self.before: dict[tuple[int, str], Tensor] = {}
        self.after: dict[tuple[int, str], Tensor] = {}
        blocks = list(decoder_blocks(self.model).values())
        modules = {place: module_of(blocks[place[0]], architecture, place[1]) for place in places}
        for place, module in modules.items():
            _watch(module, place, self.before)
        attached = attach(method, self.model, {"rank": 2, **settings}, seed=0)
        assert isinstance(attached, AttachedReft)
        self.attached = attached
        shake(attached, 1.0)
        for place, module in modules.items():
            _watch(module, place, self.after)

    @torch.no_grad()
    def run(
        self,
        lengths: Sequence[int] = LENGTHS,
        starts: Sequence[int] | None = None,
        tokens: Tensor = TOKENS,
        **options: Any,
    ) -> Tensor:
        """A pass over the batch; returns the logits."""
        begins = None if starts is None else torch.tensor(starts)
        with self.attached.edits(torch.tensor(lengths), begins, **options):
            return self.model(input_ids=tokens, use_cache=False).logits

    def changed(self, place: tuple[int, str], rows: int = len(LENGTHS)) -> list[list[int]]:
        """The columns of each row whose state an intervention changed."""
        before, after = (
            states[place].reshape(rows, -1, states[place].shape[-1]) for states in (self.before, self.after)
        )
        return [row.nonzero().flatten().tolist() for row in (before != after).any(-1)]

    def expected(self, place: tuple[int, str], part: str = "both") -> Tensor:
        """The states before, all of them edited by the formula of LoReFT: h + R (W h + b - Rᵀ h)."""
        p = self.attached.interventions()[f"{place[0]}.{place[1]}.{part}"]
        h = self.before[place]
        return h + (h @ p.weight.t() + p.bias - h @ p.rotation) @ p.rotation.t()


def _watch(module: nn.Module, place: tuple[int, str], seen: dict[tuple[int, str], Tensor]) -> None:
    def keep_input(_module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        seen[place] = (args[0] if args else kwargs["hidden_states"]).clone()

    def keep_output(_module: nn.Module, _args: Any, output: Any) -> None:
        seen[place] = (output[0] if isinstance(output, tuple) else output).clone()

    if place[1] == "block_input":
        module.register_forward_pre_hook(keep_input, with_kwargs=True)
    else:
        module.register_forward_hook(keep_output)


def columns(position: str | Sequence[int], length: int, start: int = 0) -> list[int]:
    """The edited columns of a prompt, in the words of the paper's code rather than in ours."""
    asked = parse_position(position)
    if asked.every:
        chosen = list(range(length))
    elif asked.indices:
        chosen = [i if i >= 0 else length + i for i in asked.indices]
        chosen = [i for i in chosen if 0 <= i < length]
    else:
        first, last = min(length // 2, asked.first), min(length // 2, asked.last)
        chosen = [*range(first), *range(length - last, length)]
    return [start + column for column in sorted(set(chosen))]


@pytest.mark.parametrize(("architecture", "component"), [p for p in PLACES if p not in REFUSED])
def test_an_edit_lands_at_its_component_and_tokens_alone(architecture: str, component: str) -> None:
    """An edit of the wrong module, of a copy that is dropped, or of tokens in flattened order."""
    place = (1, component)
    watched = Watched([place], architecture, layers=[1], component=component, position="f2+l2")
    logits = watched.run()
    wanted = [columns("f2+l2", length) for length in LENGTHS]
    assert watched.changed(place) == wanted
    before, after, edited = (
        states.reshape(len(LENGTHS), WIDTH, -1)
        for states in (watched.before[place], watched.after[place], watched.expected(place))
    )
    for row, edits in enumerate(wanted):
        torch.testing.assert_close(after[row, edits], edited[row, edits], rtol=1e-4, atol=1e-4)
    width = {"mlp_activation": 128 if architecture == "gpt2" else 48}.get(component, 32)
    assert before.shape[-1] == width
    with watched.attached.disabled():
        assert not torch.allclose(logits, watched.run(), atol=1e-3)


@pytest.mark.parametrize(("architecture", "component"), REFUSED)
def test_a_component_that_a_block_does_not_have_is_refused(architecture: str, component: str) -> None:
    """Experts have many activations; some place that is called like it is not what was asked for."""
    with pytest.raises(ModelError, match=f"{component}: the MLP of .*; edit mlp_output instead"):
        attach("loreft", tiny_model(architecture), {"component": component}, seed=0)


def test_a_block_without_one_attention_is_refused_with_what_it_has() -> None:
    model: Any = tiny_model("llama")
    for block in model.model.layers:
        block.attention = nn.Linear(4, 4)
    with pytest.raises(
        ModelError, match=r"has 2 such modules where one was expected \(its modules: self_attn, mlp"
    ):
        attach("loreft", model, {"component": "attention_output"}, seed=0)


def test_places_may_differ_in_layers_rank_position_and_component() -> None:
    """f5+l5 over two layers used to reach one end only; here each group has what it says, all at once."""
    groups = [
        {"layers": "0", "rank": 3, "position": "f1", "component": "block_input"},
        {"layers": [0, 2], "position": "l2", "component": "mlp_output"},
        {"layers": "1", "rank": 4, "position": [0, -2]},
        {"layers": "2", "component": "attention_output", "tied": False},
        {"layers": "2", "component": "mlp_activation", "rank": 1, "position": "all"},
    ]
    wanted: dict[tuple[int, str], tuple[Any, dict[str, int]]] = {
        (0, "block_input"): ("f1", {"both": 3}),
        (0, "mlp_output"): ("l2", {"both": 2}),
        (1, "block_output"): ([0, -2], {"both": 4}),
        (2, "mlp_output"): ("l2", {"both": 2}),
        (2, "attention_output"): ("f2+l3", {"first": 2, "last": 2}),
        (2, "mlp_activation"): ("all", {"both": 1}),
    }
    watched = Watched(list(wanted), interventions=groups, position="f2+l3")
    watched.run()
    ranks = {
        f"{layer}.{component}.{part}": rank
        for (layer, component), (_, parts) in wanted.items()
        for part, rank in parts.items()
    }
    assert {name: module.rank for name, module in watched.attached.interventions().items()} == ranks
    for place, (position, _) in wanted.items():
        assert watched.changed(place) == [columns(position, length) for length in LENGTHS], place
    lines = watched.attached.describe()
    assert len(lines) == 5
    assert "LoReFT rank 2, position l2 (tied), at mlp_output of blocks 0, 2" in lines


def test_a_place_of_two_groups_is_refused() -> None:
    for second in ({"layers": "all"}, {"layers": "1", "tied": False}):
        groups = [{"layers": "1"}, second]
        with pytest.raises(ModelError, match="block_output of layer 1 is named twice"):
            attach("loreft", tiny_model(), {"interventions": groups}, seed=0)
    with pytest.raises(ModelError, match="layer 7 does not exist; the model has 3 layers, 0 to 2"):
        attach("loreft", tiny_model(), {"interventions": [{"layers": "1;7"}]}, seed=0)
    with pytest.raises(
        ModelError, match=r"method.rank: 33 is more than the hidden size 32 of 0\.block_output"
    ):
        attach("loreft", tiny_model(), {"rank": 33}, seed=0)
    wide = attach("loreft", tiny_model(), {"rank": 33, "component": "mlp_activation"}, seed=0)
    assert next(iter(wide.trainable().values())).shape == (48, 33)


@pytest.mark.parametrize("convention", ["standard", "pyreft-alpaca"])
@pytest.mark.parametrize("left", [False, True], ids=["right padding", "left padding"])
@pytest.mark.parametrize(
    "position",
    ["f2+l3", "f7+l7", "f1+l1", "f3", "l1", "l2", "all", (0, 2, -1), (5, 1, -4, -9), (-1,)],
    ids=str,
)
def test_positions_are_those_of_the_prompt(position: Any, left: bool, convention: str) -> None:
    """By pyreft's Alpaca script the last prompt token does not count, so that its l1 is the one before."""
    watched = Watched([(1, "block_output")], layers=[1], position=position, positions_convention=convention)
    starts = [WIDTH - length for length in LENGTHS] if left else [0] * len(LENGTHS)
    watched.run(LENGTHS, starts)
    counted = [length - (convention == "pyreft-alpaca") for length in LENGTHS]
    wanted = [columns(position, length, start) for length, start in zip(counted, starts, strict=True)]
    assert watched.changed((1, "block_output")) == wanted
    assert [watched.attached.num_edited(length) for length in LENGTHS] == [len(edits) for edits in wanted]


def test_the_table_of_short_prompts_is_that_of_the_facts() -> None:
    """L=10, f2+l3; L=5, f7+l7; L=1, l1: from the paper's code, worked out by hand."""
    assert columns("f2+l3", 10) == [0, 1, 7, 8, 9]
    assert columns("f7+l7", 5) == [0, 1, 3, 4]
    assert columns("l1", 1) == []


@pytest.mark.parametrize("convention", ["standard", "pyreft-alpaca"])
def test_two_indices_of_one_token_edit_it_once(convention: str) -> None:
    """In a prompt of three tokens 2 and -1 are the same: edited twice, it would be another state."""
    place = (1, "block_output")
    watched = Watched([place], layers=[1], position=(2, -1, 0, -3), positions_convention=convention)
    watched.run([3, 3, 4, 4])
    wanted = [[0, 2], [0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    if convention == "pyreft-alpaca":
        wanted = [[0, 1], [0, 1], [0, 2], [0, 2]]
    assert watched.changed(place) == wanted
    for row, edits in enumerate(wanted):
        torch.testing.assert_close(watched.after[place][row, edits], watched.expected(place)[row, edits])


@pytest.mark.parametrize("position", ["f2+l2", "f3", "l2"])
def test_untied_ends_have_an_intervention_each(position: str) -> None:
    """One of the two edited both ends, or the ends were swapped."""
    place = (1, "attention_output")
    watched = Watched([place], layers=[1], component=place[1], position=position, tied=False)
    watched.run()
    asked = parse_position(position)
    names = [f"1.attention_output.{part}" for part in asked.parts]
    assert list(watched.attached.interventions()) == names
    for row, length in enumerate(LENGTHS):
        first, last = min(length // 2, asked.first), min(length // 2, asked.last)
        spans = {"first": range(first), "last": range(length - last, length)}
        for part in asked.parts:
            edits = list(spans[part])
            torch.testing.assert_close(
                watched.after[place][row, edits],
                watched.expected(place, part)[row, edits],
                rtol=1e-4,
                atol=1e-5,
            )
    assert watched.changed(place) == [columns(position, length) for length in LENGTHS]


@pytest.mark.parametrize("left", [False, True], ids=["right padding", "left padding"])
def test_markers_choose_the_tokens_inside_them(left: bool) -> None:
    """Only inside the prompt: what is marked in the answer or in padding is no part of it."""
    watched = Watched([(0, "block_output")], layers=[0], position="markers", markers=["[[", "]]"])
    starts = [WIDTH - length for length in LENGTHS] if left else [0] * len(LENGTHS)
    marked = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    watched.run(LENGTHS, starts, marked=marked)
    inside = [
        [column for column in range(start, start + length) if marked[row, column]]
        for row, (start, length) in enumerate(zip(starts, LENGTHS, strict=True))
    ]
    assert watched.changed((0, "block_output")) == inside
    assert sum(map(len, inside)) > 4
    assert watched.attached.markers == ("[[", "]]")
    assert watched.attached.num_edited(5) is None
    with pytest.raises(ModelError, match=r"`edits` was not told which tokens are marked"):
        watched.run()


@pytest.mark.parametrize("method", ["loreft", "noreft", "consreft", "lobireft", "direft", "nodireft"])
def test_every_kind_edits_every_component(method: str) -> None:
    """Gradients reach all parameters, and the edits have an effect wherever they are."""
    batch = small_batch()
    groups = [{"layers": "1", "component": component} for component in COMPONENTS]
    attached = attach(method, tiny_model(), {"rank": 2, "interventions": groups}, seed=0)
    shake(attached)
    assert len(attached.trainable()) == 5 * (2 if method in ("consreft", "lobireft") else 3)
    found = gradients(attached, batch)
    for name in attached.trainable():
        gradient = found[name]
        assert gradient is not None
        assert bool((gradient != 0).any()), name
    trained = logits_of(attached, batch)
    with attached.disabled():
        assert torch.equal(logits_of(attached, batch), logits_of(Attached("base", tiny_model()), batch))
    assert not torch.allclose(trained, logits_of(Attached("base", tiny_model()), batch))


@pytest.mark.parametrize(("generation", "after"), [("prompt", False), ("all", True), ("new", True)])
@pytest.mark.parametrize(
    ("position", "tied"), [("f2+l1", True), ("f2+l1", False), ("f2", True), ("f2", False)]
)
def test_tokens_behind_the_prompt_are_edited_if_asked_for(
    generation: str, after: bool, position: str, tied: bool
) -> None:
    """By the intervention of the last tokens, if there are two; up to the end of the record alone."""
    place = (1, "block_output")
    watched = Watched([place], layers=[1], position=position, tied=tied, generation=generation)
    lengths, ends = [4, 3, 2, 1], [12, 9, 2, 5]
    watched.run(lengths, ends=torch.tensor(ends))
    wanted = [
        [*(columns(position, length) if generation != "new" else []), *(range(length, end) if after else [])]
        for length, end in zip(lengths, ends, strict=True)
    ]
    assert watched.changed(place) == wanted
    assert watched.attached.num_edited(4) == (None if after else len(wanted[0]))
    if after:
        part = "both" if tied else parse_position(position).parts[-1]
        edited = watched.expected(place, part)
        torch.testing.assert_close(watched.after[place][0, 4:], edited[0, 4:], rtol=1e-4, atol=1e-5)


def test_prompts_that_are_not_in_the_batch_are_refused() -> None:
    watched = Watched([(0, "block_output")], layers=[0])
    with pytest.raises(ModelError, match=r"the input is 12 tokens wide, but .* prompts that reach token 13"):
        watched.run([6, 9, 13, 1])
    with pytest.raises(ModelError, match="a batch of 4 sequences does not belong to 3 prompts"):
        watched.run([6, 9, 3])


def test_a_part_that_is_called_alone_with_another_width_is_edited_at_its_own_tokens() -> None:
    """Flat positions of the first width used to be read with the second one."""
    attached = attach("loreft", tiny_model(), {"rank": 2, "layers": [0], "position": "l1"}, seed=0)
    model: Any = attached.model
    seen: list[Tensor] = []
    decoder_blocks(model)["model.layers.0"].register_forward_hook(lambda _m, _a, out: seen.append(out))
    tokens = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attached.edits(torch.tensor([6, 6])):
        model.model(tokens[:, :6])
        model.model(tokens)
        with attached.disabled():
            model.model(tokens)
    assert (seen[1] != seen[2]).any(-1).nonzero().tolist() == [[0, 5], [1, 5]]


def test_a_component_that_there_is_not_is_refused() -> None:
    """A misspelt one used to mean the last of them."""
    with pytest.raises(ModelError, match="'blok_output' is unknown; expected one of block_output"):
        attach("loreft", tiny_model(), {"component": "blok_output"}, seed=0)
