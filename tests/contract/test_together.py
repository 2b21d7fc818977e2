"""LoRA or DoRA and interventions in one run: both learn, lie in one folder, and come back together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from leantune.checkpoint.adapter import load_adapter, save_trained
from leantune.checkpoint.merge import merge_run
from leantune.errors import LeantuneError
from leantune.generate.decode import Sampling, generate
from leantune.methods import Attached, attach
from leantune.methods.together import AttachedTogether
from tests.batches import gradients, lively, logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.models import save_tiny, tiny_model

BATCH = small_batch()
PAIRS: dict[str, list[dict[str, Any]]] = {
    "lora+loreft": [
        {"name": "lora", "rank": 4},
        {"name": "loreft", "rank": 3, "layers": "1-2", "position": "f2+l2"},
    ],
    "dora+consreft": [
        {"name": "dora", "rank": 2, "target_modules": ["q_proj", "down_proj"]},
        {"name": "consreft", "rank": 2, "layers": "0-1", "component": "mlp_output", "tied": False},
    ],
}
EVERY_PAIR = pytest.mark.parametrize("pair", PAIRS)


def attached_to(pair: str, model: Any = None) -> Attached:
    return attach("together", model or lively(tiny_model()), {"parts": PAIRS[pair]}, seed=0)


def train(attached: Attached, steps: int = 3, optimizer: Any = None) -> Any:
    """Steps of AdamW on one batch, as the loop takes them."""
    spared = attached.decay_free()
    named = attached.trainable()
    if optimizer is None:
        groups = [
            {"params": [p for n, p in named.items() if n not in spared], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if n in spared], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(steps):
        gradients(attached, BATCH)
        attached.before_step()
        optimizer.step()
        attached.after_step()
    return optimizer


def values(attached: Attached) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in attached.trainable().items()}


@EVERY_PAIR
def test_both_are_trained(pair: str) -> None:
    """One of the two was attached and left alone, or its hooks around the step were forgotten."""
    attached = attached_to(pair)
    assert isinstance(attached, AttachedTogether)
    assert attached.name == pair
    assert [part.name for part in attached.parts()] == pair.split("+")
    found = gradients(attached, BATCH)
    assert {name for name, gradient in found.items() if gradient is not None} == set(attached.trainable())
    before = values(attached)
    train(attached)
    still = [name for name, value in values(attached).items() if torch.equal(value, before[name])]
    assert still == []
    rotations = [p for name, p in attached.trainable().items() if name.endswith("rotation")]
    assert rotations
    for rotation in rotations:
        product = (rotation.T @ rotation).detach()
        torch.testing.assert_close(product, torch.eye(rotation.shape[1]), rtol=0, atol=1e-6)
    reft = attached.parts()[1]
    assert attached.pinned() == reft.own() < set(attached.trainable())
    assert {n for n in attached.trainable() if n.endswith("rotation")} <= attached.decay_free()
    assert not any(name.endswith((".A", ".B")) for name in attached.decay_free())


@EVERY_PAIR
def test_each_has_the_effect_that_it_has_alone(pair: str) -> None:
    """Disabled, nothing is left of either; and neither is hidden by the other."""
    attached = attached_to(pair)
    shake(attached, 0.5)
    both = logits_of(attached, BATCH)
    base = logits_of(Attached("base", lively(tiny_model())), BATCH)
    alone: list[Tensor] = []
    for part, other in zip(attached.parts(), reversed(attached.parts()), strict=True):
        with other.disabled():
            alone.append(logits_of(attached, BATCH))
        single = attach(part.name, lively(tiny_model()), _settings(pair, part.name), seed=0)
        files, own = part.export(), single.export()
        assert files is not None
        assert own is not None
        single.load(files.tensors, "here")
        torch.testing.assert_close(alone[-1], logits_of(single, BATCH))
    with attached.disabled():
        assert torch.equal(logits_of(attached, BATCH), base)
    assert torch.equal(logits_of(attached, BATCH), both)
    for one in (*alone, base):
        assert not torch.allclose(one, both, atol=1e-3)


def _settings(pair: str, name: str) -> dict[str, Any]:
    return {k: v for part in PAIRS[pair] if part["name"] == name for k, v in part.items() if k != "name"}


@EVERY_PAIR
def test_one_folder_holds_both_and_gives_both_back(pair: str, tmp_path: Path) -> None:
    """To the bit; the files are those that each method has alone."""
    attached = attached_to(pair)
    train(attached)
    line = save_trained(attached, tmp_path / "a", tiny_tokenizer(vocab_size=300), "some/base", None)
    assert "equal to memory bit for bit" in line
    configs = {"adapter_config.json", "reft_config.json"}
    tensors = {"adapter_model.safetensors", "reft.safetensors"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == configs | tensors | {"manifest.json"}
    for name in configs:
        assert json.loads((tmp_path / "a" / name).read_text())["base_model_name_or_path"] == "some/base"
    loaded = load_adapter(lively(tiny_model()), tmp_path / "a")
    assert (loaded.name, loaded.describe()) == (attached.name, attached.describe())
    mine, theirs = values(attached), values(loaded)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert torch.equal(logits_of(loaded, BATCH), logits_of(attached, BATCH))
    tokenizer, prompts = tiny_tokenizer(vocab_size=320), ["SELECT name", "the old man said"]
    sampling = Sampling(max_new_tokens=5)
    answers = [
        generate(each.model, tokenizer, prompts, sampling, attached=each) for each in (attached, loaded)
    ]
    assert answers[0] == answers[1]


@EVERY_PAIR
def test_peft_loads_its_half_of_the_folder(pair: str, tmp_path: Path) -> None:
    """The interventions beside it do not disturb PEFT, which gives what the factors do alone."""
    attached = attached_to(pair)
    shake(attached, 0.3)
    save_trained(attached, tmp_path / "a", tiny_tokenizer(vocab_size=300), "some/base", None)
    peft: Any = PeftModel.from_pretrained(lively(tiny_model()), str(tmp_path / "a")).eval()
    with torch.no_grad():
        logits = peft(input_ids=BATCH.input_ids).logits.flatten(0, 1)[BATCH.label_index]
    with attached.parts()[1].disabled():
        torch.testing.assert_close(logits, logits_of(attached, BATCH), rtol=1e-4, atol=1e-5)


@EVERY_PAIR
def test_training_goes_on_where_it_was(pair: str, tmp_path: Path) -> None:
    """Three steps, loaded onto a fresh base with the optimizer's states, two more: as five in a row."""
    straight = attached_to(pair)
    train(straight, 5)
    first = attached_to(pair)
    optimizer = train(first, 3)
    save_trained(first, tmp_path / "a", tiny_tokenizer(vocab_size=300), "some/base", None)
    second = load_adapter(lively(tiny_model()), tmp_path / "a")
    again = train(second, 0)
    again.load_state_dict(optimizer.state_dict())
    train(second, 2, again)
    expected, found = values(straight), values(second)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@EVERY_PAIR
def test_a_folder_that_lost_a_file_is_refused(pair: str, tmp_path: Path) -> None:
    """Half of what was trained is another model: without its tensors a configuration means nothing."""
    attached = attached_to(pair)
    save_trained(attached, tmp_path / "a", tiny_tokenizer(vocab_size=300), "some/base", None)
    (tmp_path / "a" / "reft.safetensors").unlink()
    with pytest.raises(LeantuneError, match=r"reft\.safetensors"):
        load_adapter(lively(tiny_model()), tmp_path / "a")


def test_edits_cannot_be_merged_and_nothing_is_written(tmp_path: Path) -> None:
    """Merging LoRA alone would leave out the interventions without a word."""
    base = save_tiny(tmp_path / "base", tiny_tokenizer(vocab_size=320))
    attached = attached_to("lora+loreft", tiny_model())
    save_trained(attached, tmp_path / "a", tiny_tokenizer(vocab_size=320), str(base), None)
    with pytest.raises(LeantuneError, match="loreft"):
        merge_run(tmp_path / "a", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_parts_say_what_they_are_and_what_they_edit() -> None:
    attached = attached_to("lora+loreft")
    assert attached.edits_states
    # A run whose prompts have nothing to edit would train its LoRA half alone, without a word.
    assert (attached.num_edited(5), attached.num_edited(1)) == (4, 0)
    assert [line.split()[0] for line in attached.describe()] == ["LoRA", "LoReFT"]
    assert attached.frozen_blocks() == 0
    upper = [{"name": "lora", "layers": "2"}, {"name": "loreft", "layers": "1"}]
    joined = attach("together", tiny_model(), {"parts": upper}, seed=0)
    assert joined.frozen_blocks() == 2  # the edit of block 1's output comes after it


def test_parameters_of_a_part_start_as_they_do_alone() -> None:
    """Another start because of the company would make runs with and without it incomparable."""
    for part in attached_to("dora+consreft", tiny_model()).parts():
        single = attach(part.name, tiny_model(), _settings("dora+consreft", part.name), seed=0)
        mine, alone = part.export(), single.export()
        assert mine is not None
        assert alone is not None
        assert all(torch.equal(alone.tensors[name], mine.tensors[name]) for name in alone.tensors)
