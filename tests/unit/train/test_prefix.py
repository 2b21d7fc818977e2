"""The frozen prefix in a run: equal to the bit, bounded, safe on disk, refused where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from leantune.checkpoint.run_folder import RunFolder
from leantune.config import load_config, validate
from leantune.config.schema import TrainSection
from leantune.data.batches import cut_window, epoch_windows
from leantune.errors import ConfigError
from leantune.models.anatomy import decoder_blocks
from leantune.train.prefix_choice import check_prefix, choose_reshuffle
from leantune.train.prefix_store import DiskStore, MemoryStore, prepare_folder, used_bytes
from leantune.train.session import resume_run
from leantune.train.steps import plan_steps
from tests.distributed.ranks import evaluations, make_records, make_run, steps, weights
from tests.fixtures import tiny_model_folder
from tests.methods import attached_to
from tests.models import tiny_model

RECORDS = make_records([1 + (7 * i) % 20 for i in range(13)])
UPPER: dict[str, dict[str, Any]] = {
    "lora": {"name": "lora", "rank": 4, "dropout": 0.2, "layers": [2]},
    "dora": {"name": "dora", "rank": 4, "layers": [2]},
    "loreft": {"name": "loreft", "rank": 2, "layers": [1, 2], "position": "f2+l2", "dropout": 0.2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of three blocks."""
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


def trained(path: Path, model: Path, method: str = "lora", **train: Any) -> RunFolder:
    """A run over three epochs, in this process."""
    settings = {"epochs": 3.0, "micro_batch_size": 2, "global_batch_size": 4, **train}
    folder = make_run(
        path, model, RECORDS, RECORDS, method=UPPER[method], train=settings, output={"keep_checkpoints": 1}
    )
    resume_run(folder, load_config(folder.config), quiet=True)
    return folder


def curve(folder: RunFolder) -> list[float]:
    """All losses, of training and of validation."""
    return [row["loss"] for row in steps(folder)] + [row["eval_loss"] for row in evaluations(folder)]


def assert_equal(one: RunFolder, other: RunFolder) -> None:
    """The same losses and weights, to the bit."""
    assert len(set(curve(one))) > 5
    assert curve(one) == curve(other)
    first, second = weights(one), weights(other)
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that compute, by index, in the order of their passes."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    from leantune.train import prefix_choice

    seen: list[int] = []
    plain = prefix_choice.FrozenPrefix

    def watched(model: nn.Module, num_blocks: int) -> Any:
        for index, block in enumerate(decoder_blocks(model).values()):
            mlp = next(m for m in block.modules() if isinstance(m, LlamaMLP))
            mlp.register_forward_hook(lambda *_, index=index: seen.append(index))
        return plain(model, num_blocks)

    monkeypatch.setattr(prefix_choice, "FrozenPrefix", watched)
    return seen


@pytest.mark.parametrize("method", UPPER)
@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_losses_and_weights_are_those_without_it(
    method: str, mode: str, model: Path, tmp_path: Path, passes: list[int]
) -> None:
    """Other micro-batches round otherwise, dropout shifted, or later epochs computed it all again."""
    off = trained(tmp_path / "off", model, method, cache_frozen_prefix="off")
    assert not passes
    kept = trained(tmp_path / "kept", model, method, cache_frozen_prefix=mode)
    assert_equal(off, kept)
    # 7 micro-batches of training and 7 of validation once, and a pass of the trial.
    assert [passes.count(block) for block in range(3)] == [15, 15, 2 + 3 * 14]
    assert not kept.prefix.exists()


@pytest.mark.parametrize("extra", [{"activation_checkpointing": True}, {"loss_chunk_tokens": 3}])
def test_it_goes_with_what_computes_again(extra: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """Blocks and heads that run twice in a step met a prefix that was already put away."""
    off = trained(tmp_path / "off", model, cache_frozen_prefix="off", **extra)
    assert_equal(off, trained(tmp_path / "kept", model, cache_frozen_prefix="memory", **extra))


def test_shuffled_records_are_equal_to_rounding_and_said_to_be(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each sequence is kept by itself and meets others in the next epoch."""
    off = trained(tmp_path / "off", model, reshuffle="records", cache_frozen_prefix="off")
    settings = {"epochs": 3.0, "micro_batch_size": 2, "global_batch_size": 4, "reshuffle": "records"}
    folder = make_run(
        tmp_path / "kept",
        model,
        RECORDS,
        RECORDS,
        method=UPPER["lora"],
        train={**settings, "cache_frozen_prefix": "memory"},
    )
    resume_run(folder, load_config(folder.config))
    assert (
        "train.reshuffle is records, so losses are those without it up to rounding" in capsys.readouterr().out
    )
    np.testing.assert_allclose(curve(off), curve(folder), rtol=1e-5)


def test_what_does_not_fit_is_computed(model: Path, tmp_path: Path, passes: list[int]) -> None:
    """A bound that is only looked at in the beginning, or a full store that gives up what it has."""
    off = trained(tmp_path / "off", model, cache_frozen_prefix="off")
    tight = 20 * 1024 / 2**30  # a part of the 62 KiB of all states
    kept = trained(tmp_path / "kept", model, cache_frozen_prefix="memory", prefix_cache_gib=tight)
    assert_equal(off, kept)
    assert 15 < passes.count(0) < 1 + 3 * 14
    passes.clear()
    assert_equal(off, trained(tmp_path / "auto", model, prefix_cache_gib=tight))
    assert passes.count(0) == 2 + 3 * 14 - 1, "auto keeps all or nothing"


def test_auto_says_what_it_chose(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(**sections: Any) -> str:
        train = {"epochs": 2.0, "micro_batch_size": 4, "max_steps": 4, **sections.pop("train", {})}
        number = len([*tmp_path.glob("run-*")])
        folder = make_run(tmp_path / f"run-{number}", model, RECORDS, train=train, **sections)
        resume_run(folder, load_config(folder.config))
        out = capsys.readouterr().out.splitlines()
        (found,) = [line for line in out if line.startswith("frozen prefix: ")]
        return found.removeprefix("frozen prefix: ")

    assert line(method=UPPER["lora"], train={"max_steps": 5}).startswith("2 of 3 blocks are computed once")
    assert line(method=UPPER["lora"]) == "not kept, because no record comes twice"
    assert "no decoder block lies below" in line(method={"name": "lora", "rank": 2})
    assert "train.reshuffle is records" in line(
        method=UPPER["lora"], train={"max_steps": 5, "reshuffle": "records"}
    )
    tight = {"max_steps": 5, "prefix_cache_gib": 1e-6}
    assert "GiB a rank where 0.00 GiB may be used" in line(method=UPPER["lora"], train=tight)


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_what_cannot_be_kept_is_refused(mode: Any) -> None:
    """Before a run begins; the settings that auto would leave are an error if they were asked for."""
    train = TrainSection(cache_frozen_prefix=mode)
    for attached, words in (
        (attached_to("lora", rank=2), "no decoder block lies below everything that is trained"),
        (attached_to("lora", rank=2, layers=[2], train_embeddings=True), "no decoder block lies below"),
        (attached_to("lora", "gpt2", rank=2, layers=[2]), r"drop values at random \(transformer.drop"),
    ):
        with pytest.raises(ConfigError, match=rf"train\.cache_frozen_prefix: {mode}, but .*{words}"):
            check_prefix(train, attached)
        check_prefix(TrainSection(), attached)
    check_prefix(train, attached_to("lora", rank=2, layers=[2], dropout=0.3))


def test_blocks_that_cannot_be_given_back_are_refused_or_left(tmp_path: Path) -> None:
    """Bloom's return more than hidden states; that shows only when they compute."""
    from tests.fixtures import tiny_tokenizer
    from tests.models import save_tiny

    bloom = save_tiny(
        tmp_path / "bloom", tiny_tokenizer(), "bloom", hidden_dropout=0.0, attention_dropout=0.0
    )
    with pytest.raises(ConfigError, match="memory, but decoder blocks return more than hidden states"):
        trained(tmp_path / "asked", bloom, cache_frozen_prefix="memory")
    off = trained(tmp_path / "off", bloom, cache_frozen_prefix="off")
    assert_equal(off, trained(tmp_path / "auto", bloom))


def test_a_bound_for_nothing_is_refused() -> None:
    tree = {"model": "demo", "data": {"train": "x.json"}}
    with pytest.raises(ConfigError, match=r"train\.prefix_cache_gib: has no effect here"):
        validate({**tree, "train": {"cache_frozen_prefix": "off", "prefix_cache_gib": 1.0}})


def test_windows_stay_together_and_change_their_order() -> None:
    """Micro-batches of later epochs must be those of the first, each once."""
    lengths = np.random.default_rng(0).integers(5, 60, 50)

    def epoch(number: int) -> list[tuple[int, ...]]:
        windows = epoch_windows(lengths, 8, 3, number, True, "windows")
        return [tuple(window.tolist()) for window in windows]

    first = epoch(0)
    assert first == [tuple(w.tolist()) for w in epoch_windows(lengths, 8, 3, 0, True)]
    assert sorted(epoch(1)) == sorted(epoch(2)) == sorted(first)
    assert len({tuple(epoch(number)) for number in range(4)}) == 4
    assert epoch(2) == epoch(2)
    chunks = [
        {tuple(c) for w in epoch(n) for c in cut_window(RECORDS, np.array(w) % 13, 2).chunks} for n in (0, 1)
    ]
    assert chunks[0] == chunks[1]


@pytest.mark.parametrize(
    ("epochs", "layers", "asked", "expected"),
    [
        (2.0, [2], "auto", "windows"),
        (1.0, [2], "auto", "records"),
        (2.0, "all", "auto", "records"),
        (2.0, [2], "records", "records"),
        (1.0, "all", "windows", "windows"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "memory", "off"])
def test_the_order_does_not_depend_on_what_is_kept(
    epochs: float, layers: Any, asked: Any, expected: str, mode: Any
) -> None:
    """Runs with and without it could not be compared otherwise."""
    train = TrainSection(epochs=epochs, reshuffle=asked, cache_frozen_prefix=mode)
    attached = attached_to("lora", model=tiny_model(), rank=2, layers=layers)
    assert choose_reshuffle(train, plan_steps(train, 20, 1), attached) == expected


def test_a_memory_store_stays_below_its_limit() -> None:
    store = MemoryStore(1000)
    for number in range(20):
        store.write(str(number), torch.zeros(25))
    assert store.size == 1000
    assert [store.read(str(number)) is not None for number in range(20)] == [True] * 10 + [False] * 10


def test_files_come_back_as_they_were_or_not_at_all(tmp_path: Path) -> None:
    """A torn, changed or foreign file went into the model as hidden states."""
    folder = prepare_folder(tmp_path / "prefix", "aa")
    store = DiskStore(folder, "aa", 10_000)
    tensor = torch.randn(2, 3, 4).bfloat16()
    store.write("one", tensor)
    found = DiskStore(folder, "aa", 10_000).read("one")
    assert found is not None
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, tensor)
    assert store.read("two") is None
    assert DiskStore(folder, "bb", 10_000).read("one") is None
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for broken in (whole[:-1], whole[:20], b"", whole[:-1] + bytes([whole[-1] ^ 1]), b"x" * 100):
        file.write_bytes(broken)
        assert store.read("one") is None
    store.write("one", tensor)
    again = store.read("one")
    assert again is not None
    assert torch.equal(again, tensor)


def test_files_stay_below_their_limit_and_a_full_disk_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leantune.errors import CheckpointError
    from leantune.train import prefix_store

    store = DiskStore(tmp_path, "aa", 250)
    for name in "abc":
        store.write(name, torch.zeros(25))
    assert [store.read(name) is not None for name in "abc"] == [True, True, False]
    assert used_bytes(tmp_path) >= 200

    def full(*_: Any) -> None:
        raise CheckpointError("no space left on the disk")

    monkeypatch.setattr(prefix_store, "write_file", full)
    store = DiskStore(tmp_path, "aa", 10_000)
    store.write("d", torch.zeros(25))
    monkeypatch.undo()
    store.write("e", torch.zeros(25))
    assert store.read("d") is None
    assert store.read("e") is None


def test_files_of_another_key_are_removed(tmp_path: Path) -> None:
    """Of a model, a batch size or a version that the run no longer has."""
    for key in ("aa", "bb"):
        DiskStore(prepare_folder(tmp_path, key), key, 1000).write("one", torch.zeros(3))
    assert [path.name for path in tmp_path.iterdir()] == ["bb"]
    assert len([*prepare_folder(tmp_path, "bb").iterdir()]) == 1


def test_the_key_knows_what_decides_about_the_states(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of other weights, records or batches were taken for those of this run."""
    from leantune.train import prefix_choice

    keys: list[str] = []
    plain = prefix_choice._key
    monkeypatch.setattr(prefix_choice, "_key", lambda *parts: keys.append(plain(*parts)) or keys[-1])

    def run(name: str, weights: Path = model, **train: Any) -> None:
        trained(tmp_path / name, weights, cache_frozen_prefix="disk", max_steps=1, **train)

    run("one")
    run("again")
    assert keys[0] == keys[1]
    run("micro", micro_batch_size=1)
    run("seed", seed=1)
    run("precision", precision="bf16")
    other = tiny_model_folder(tmp_path / "other", seed=1)
    run("weights", other)
    assert len(set(keys)) == 5


def test_a_run_with_files_can_be_replaced(model: Path, tmp_path: Path) -> None:
    """A killed run left files that output.overwrite took for somebody else's."""
    from leantune.checkpoint.replace_run import make_room

    folder = make_run(tmp_path / "run", model, RECORDS)
    store = DiskStore(prepare_folder(folder.prefix, "aa"), "aa", 1000)
    store.write("0" * 32, torch.zeros(3))
    stranger = folder.prefix / "aa" / "mine.txt"
    stranger.write_text(json.dumps("mine"))
    with pytest.raises(ConfigError, match=r"mine\.txt"):
        make_room(folder.path, True)
    stranger.unlink()
    make_room(folder.path, True)
    assert not folder.prefix.exists()
