"""Several adapters on one model: each prompt has its own, and its own strength and subspaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leantune.bases import load_base
from leantune.checkpoint.adapter import load_adapter, load_adapters, save_trained
from leantune.errors import CheckpointError, ModelError
from leantune.generate.decode import Sampling, generate
from leantune.generate.edits import EditSettings
from leantune.methods import Attached, attach
from leantune.methods.choice import AdapterSet
from leantune.models.source import load_tokenizer, resolve_model
from tests.batches import gradients, lively, logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.methods import attached_to
from tests.models import save_tiny, tiny_model

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "upper": ("lora", {"rank": 4, "layers": "1-2"}),
    "all": ("lora", {"rank": 2, "alpha": 8.0}),
    "dora": ("dora", {"rank": 2}),
    "ends": ("loreft", {"rank": 3, "position": "f2+l2", "layers": "1"}),
    "mlp": ("nodireft", {"rank": 2, "position": "all", "component": "mlp_output", "generation": "all"}),
    "both": ("together", {"parts": [{"name": "lora", "rank": 2}, {"name": "consreft", "tied": False}]}),
}
CHOICE = ["upper", None, "ends", "dora", "mlp", "all", "both", "ends"]
PROMPTS = (6, 9, 3, 5, 1, 7, 4, 8)
TEXTS = torch.randint(6, 300, (len(CHOICE), 12), generator=torch.Generator().manual_seed(3))
LENGTHS = torch.tensor(PROMPTS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trained adapter of each kind, all on the same base."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, (method, settings)) in enumerate(ADAPTERS.items()):
        attached = attach(method, lively(tiny_model()), settings, seed=seed)
        shake(attached, 0.3, seed)
        save_trained(attached, root / name, tiny_tokenizer(vocab_size=320), "base", None)
    return {name: root / name for name in ADAPTERS}


@torch.no_grad()
def alone(folder: Path | None, row: int, **options: Any) -> Tensor:
    """Logits of one row with one adapter on a model of its own."""
    model: Any = lively(tiny_model())
    attached = load_adapter(model, folder) if folder else Attached("base", model)
    with attached.edits(LENGTHS[row : row + 1], **options):
        return model(input_ids=TEXTS[row : row + 1], use_cache=False).logits[0]


@torch.no_grad()
def chosen(adapters: AdapterSet, **options: Any) -> Tensor:
    model: Any = adapters.model
    with adapters.edits(LENGTHS, adapters=CHOICE, **options):
        return model(input_ids=TEXTS, use_cache=False).logits


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_each_row_of_a_batch_is_that_adapter_alone(folders: dict[str, Path]) -> None:
    """Hooks of all adapters are on the same model: each must act on its rows, in whatever order."""
    adapters = load_adapters(lively(tiny_model()), folders)
    assert list(adapters.adapters) == list(folders)
    found = chosen(adapters)
    for row, name in enumerate(CHOICE):
        close(found[row], alone(folders[name] if name else None, row))
    assert torch.equal(chosen(adapters), found)
    base: Any = lively(tiny_model())
    plain = base(input_ids=TEXTS, use_cache=False).logits
    with torch.no_grad(), adapters.disabled():
        assert torch.equal(chosen(adapters), plain)
    changed = ((found - plain).abs() > 1e-3).flatten(1).any(1).tolist()
    # The prompt of one token has no ends to edit, so this is a row that its adapter leaves alone.
    assert changed == [name is not None for name in CHOICE]
    with pytest.raises(ModelError, match="choose an adapter"), adapters.edits(LENGTHS):
        pass
    with torch.no_grad(), adapters.edits(LENGTHS, adapters=[None] * len(LENGTHS)):
        assert torch.equal(adapters.model(input_ids=TEXTS, use_cache=False).logits, plain)


@pytest.mark.parametrize("beams", [1, 3])
def test_answers_of_a_mixed_batch_are_those_of_each_adapter_alone(
    beams: int, folders: dict[str, Path]
) -> None:
    """With left padding, a cache, and beams, whose rows are several for each prompt."""
    tokenizer, sampling = tiny_tokenizer(vocab_size=320), Sampling(max_new_tokens=6, num_beams=beams)
    prompts = [
        "SELECT name FROM employees",
        "the",
        "How many people are there?",
        "old man",
        "t",
        "of them all",
    ]
    names = ["all", None, "ends", "dora", "mlp", "both"]
    adapters = load_adapters(lively(tiny_model()), folders)
    together = generate(
        adapters.model,
        tokenizer,
        prompts,
        sampling,
        attached=adapters,
        edits=[EditSettings(adapter=name) for name in names],
    )
    for prompt, name, answer in zip(prompts, names, together, strict=True):
        model: Any = lively(tiny_model())
        attached = load_adapter(model, folders[name]) if name else None
        assert generate(model, tokenizer, [prompt], sampling, attached=attached) == [answer], name


@pytest.mark.parametrize("base", ["nf4", "hqq"])
def test_adapters_of_a_packed_base_are_chosen_alike(base: str, tmp_path: Path) -> None:
    """DoRA multiplies what a packed layer gives, for its rows alone."""
    source = resolve_model(
        str(save_tiny(tmp_path / "base", tiny_tokenizer(vocab_size=320), "llama", wide=True))
    )
    names = ["upper", "dora", "ends", "mlp"]
    for seed, name in enumerate(names):
        method, settings = ADAPTERS[name]
        attached = attach(
            method,
            load_base(base, source),
            {**settings, **({"layers": "1"} if name == "upper" else {})},
            seed=seed,
        )
        shake(attached, 0.3, seed)
        save_trained(attached, tmp_path / name, load_tokenizer(source), "base", None)
    model: Any = load_base(base, source)
    adapters = load_adapters(model, {name: tmp_path / name for name in names})
    rows = [*names, None]
    with torch.no_grad(), adapters.edits(LENGTHS[:5], adapters=rows):
        found = model(input_ids=TEXTS[:5], use_cache=False).logits
    for row, name in enumerate(rows):
        single: Any = load_base(base, source)
        attached = load_adapter(single, tmp_path / name) if name else Attached("base", single)
        with torch.no_grad(), attached.edits(LENGTHS[row : row + 1]):
            close(found[row], single(input_ids=TEXTS[row : row + 1], use_cache=False).logits[0])


def test_what_cannot_be_chosen_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    adapters = load_adapters(lively(tiny_model()), folders)
    unknown = adapters.edits(LENGTHS[:2], adapters=["missing", None])
    with pytest.raises(ModelError, match="adapter 'missing' is not loaded; there are upper, all"), unknown:
        pass
    few = adapters.edits(LENGTHS[:2], adapters=["all"])
    with pytest.raises(ModelError, match="1 adapters were chosen for 2 prompts"), few:
        pass
    attached = attach("lora", lively(tiny_model()), {"train_embeddings": True}, seed=0)
    save_trained(attached, tmp_path / "rows", tiny_tokenizer(vocab_size=320), "base", None)
    with pytest.raises(
        CheckpointError, match="has trained embeddings, which all adapters of a model would share"
    ):
        load_adapters(lively(tiny_model()), {**folders, "rows": tmp_path / "rows"})


def test_experts_mix_the_rows_and_refuse_a_choice(tmp_path: Path) -> None:
    """Their layers see tokens of all prompts in an order of their own; interventions outside do not mind."""
    settings = {"target_modules": "all-linear", "rank": 2}
    for name, method, options in (("lora", "lora", settings), ("reft", "loreft", {"rank": 2})):
        attached = attach(method, lively(tiny_model("mixtral")), options, seed=0)
        shake(attached, 0.3)
        save_trained(attached, tmp_path / name, tiny_tokenizer(vocab_size=320), "base", None)
    model: Any = lively(tiny_model("mixtral"))
    adapters = load_adapters(model, {name: tmp_path / name for name in ("lora", "reft")})
    single: Any = lively(tiny_model("mixtral"))
    attached = load_adapter(single, tmp_path / "reft")
    with torch.no_grad(), adapters.edits(LENGTHS[:2], adapters=["reft", None]):
        found = model(input_ids=TEXTS[:2], use_cache=False).logits
    with torch.no_grad(), attached.edits(LENGTHS[:1]):
        close(found[0], single(input_ids=TEXTS[:1], use_cache=False).logits[0])


def reft(position: str = "f2+l2", **settings: Any) -> Any:
    options = {
        "rank": 4,
        "position": position,
        "layers": "1",
        "subspaces": {"a": "0-1", "b": [2, 3]},
        **settings,
    }
    attached = attach("loreft", lively(tiny_model()), options, seed=0)
    shake(attached, 1.0)
    return attached


@torch.no_grad()
def state_after(attached: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The states at the output of block 1, before and after the edits of prompts of the same text."""
    seen: list[Tensor] = []
    handle = attached.model.model.layers[1].register_forward_hook(
        lambda _m, _a, out: seen.append(out.clone())
    )
    tokens = TEXTS[:1].expand(4, -1)
    with attached.edits(torch.full((4,), 6), **options):
        attached.model(input_ids=tokens, use_cache=False)
        with attached.disabled():
            attached.model(input_ids=tokens, use_cache=False)
    handle.remove()
    return seen[1], seen[0]


def test_strength_scales_what_is_added_for_each_prompt() -> None:
    """0 is the base and 1 is as trained, both to the bit; between them it is the formula."""
    attached = reft()
    base, trained = state_after(attached)
    factors = torch.tensor([0.0, 1.0, 0.5, -2.0])
    _, found = state_after(attached, strength=factors)
    assert torch.equal(found[0], base[0])
    torch.testing.assert_close(found[1], trained[1], rtol=0, atol=0)
    close(found, base + factors[:, None, None] * (trained - base))
    _, half = state_after(attached, strength=0.5)
    close(half, base + 0.5 * (trained - base))
    assert torch.equal(state_after(attached, strength=0.0)[1], base)


def test_subspaces_are_switched_and_combined_for_each_prompt() -> None:
    """h + R diag(active) (W h + b - Rᵀ h): both halves together are the whole, none is the base."""
    attached = reft()
    base, trained = state_after(attached)
    masks = torch.stack([attached.subspace_mask(names) for names in (["a"], ["b"], ["a", "b"], [0, 3])])
    assert masks.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 1]]
    _, found = state_after(attached, subspaces=masks)
    p = attached.interventions()["1.block_output.both"]
    for row, mask in enumerate(masks):
        h = base[row, [0, 1, 4, 5]]
        edit = (mask * (h @ p.weight.t() + p.bias - h @ p.rotation)) @ p.rotation.t()
        close(found[row, [0, 1, 4, 5]], h + edit)
        assert torch.equal(found[row, [2, 3]], base[row, [2, 3]])
    close((found[0] - base[0]) + (found[1] - base[1]), trained[0] - base[0])
    assert torch.equal(state_after(attached, subspaces=torch.zeros(4, 4, dtype=torch.bool))[1], base)
    with pytest.raises(ModelError, match=r"there is no subspace 'c'; method.subspaces names a, b"):
        attached.subspace_mask(["c"])
    with pytest.raises(ModelError, match="dimension 4 does not exist; the rank is 4: 0 to 3"):
        attached.subspace_mask([4])
    with pytest.raises(ModelError, match="method lora has no subspaces to choose from"):
        attach("lora", tiny_model(), {}, seed=0).subspace_mask(["a"])


def test_dimensions_that_a_place_does_not_have_are_left_out() -> None:
    """Places of other ranks: a mask is read from its beginning, and what it does not reach acts."""
    groups = [{"layers": "1", "rank": 2}, {"layers": "2", "rank": 5}]
    attached = reft(layers="all", interventions=groups, subspaces={"a": "0"})
    assert attached.subspace_mask(["a"]).tolist() == [True, False, False, False, False]
    with torch.no_grad():
        _, found = state_after(attached, subspaces=torch.tensor([[1, 0]] * 4).bool())
        _, one = state_after(attached, subspaces=attached.subspace_mask(["a"]).expand(4, -1))
    close(found, one)


@pytest.mark.parametrize("method", ["loreft", "noreft", "consreft", "direft", "nodireft"])
def test_a_subspace_that_no_record_trains_stays_where_it_was(method: str) -> None:
    """Records of subspace a alone: W, b, c (and a free P) of b are not touched, not even by decay of moments.

    The columns of an orthonormal factor have no gradient of b's either, but may be turned a little when all
    of them together are made orthonormal again.
    """
    options = {"rank": 4, "position": "f2+l2", "layers": "1", "subspaces": {"a": "0-1", "b": "2-3"}}
    attached: Any = attach(method, lively(tiny_model()), options, seed=0)
    module = attached.interventions()["1.block_output.both"]
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(attached.trainable().values(), lr=1e-2, weight_decay=0.0)
    active = attached.subspace_mask(["a"]).expand(3, -1)
    for _ in range(4):
        _gradients(attached, active)
        attached.before_step()
        optimizer.step()
        attached.after_step()
    for name, parameter in module.named_parameters():
        moved = (parameter.detach() - before[name]).abs()
        if name == "rotation":
            assert moved[:, :2].max() > 1e-3
            product = (parameter.T @ parameter).detach()
            torch.testing.assert_close(product, torch.eye(4), rtol=0, atol=1e-6)
            assert moved[:, 2:].max() < moved[:, :2].max()
            continue
        assert bool((moved[:2].reshape(2, -1).amax(1) > 1e-3).all()), name
        assert torch.equal(parameter[2:], before[name][2:]), name


def _gradients(attached: Attached, active: Tensor) -> None:
    batch = small_batch()
    model: Any = attached.model.train()
    model.zero_grad(set_to_none=True)
    with attached.edits(batch.prompt_lengths, subspaces=active):
        model(input_ids=batch.input_ids, use_cache=False).logits.logsumexp(-1).sum().backward()


def test_subspaces_trained_apart_are_combined_at_use() -> None:
    """Trained on other records one after the other, each half acts alone as it did when it was trained."""
    options = {"rank": 4, "layers": "1", "subspaces": {"a": "0-1", "b": "2-3"}}
    attached: Any = attach("nodireft", lively(tiny_model()), options, seed=0)
    optimizer = torch.optim.SGD(attached.trainable().values(), lr=1e-3)
    masks = {name: attached.subspace_mask([name]).expand(3, -1) for name in ("a", "b")}
    _gradients(attached, masks["a"])
    optimizer.step()
    only_a = _logits(attached, subspaces=masks["a"])
    _gradients(attached, masks["b"])
    optimizer.step()
    assert torch.equal(_logits(attached, subspaces=masks["a"]), only_a)
    both, neither = _logits(attached), _logits(attached, subspaces=torch.zeros(3, 4, dtype=torch.bool))
    assert not torch.allclose(both, only_a)
    with attached.disabled():
        assert torch.equal(logits_of(attached, small_batch()), neither)
    assert gradients(attached, small_batch())  # without a choice all dimensions are trained


@torch.no_grad()
def _logits(attached: Attached, **options: Any) -> Tensor:
    batch = small_batch()
    model: Any = attached.model.eval()
    with attached.edits(batch.prompt_lengths, **options):
        return model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)[batch.label_index]


def test_an_adapter_that_is_not_there_is_named(folders: dict[str, Path]) -> None:
    adapters = load_adapters(tiny_model(), {"all": folders["all"]})
    with pytest.raises(ModelError, match="'missing' is not loaded; there are: all"):
        EditSettings(adapter="missing").of(adapters)
    assert EditSettings(adapter="all").of(adapters).adapter == "all"


@pytest.mark.parametrize("method", ["lora", "dora", "loreft"])
def test_switching_off_inside_off_leaves_it_off(method: str) -> None:
    """The inner context used to switch the adapter on again when it ended."""
    attached = attached_to(method)
    shake(attached)
    tokens = torch.randint(3, 300, (1, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attached.disabled():
        plain = attached.model(input_ids=tokens, use_cache=False).logits
        with attached.disabled():
            pass
        assert torch.equal(attached.model(input_ids=tokens, use_cache=False).logits, plain)
