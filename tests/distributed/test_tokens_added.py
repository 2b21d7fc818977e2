"""Case 20 on several ranks: new rows and trained embeddings are sharded, and the result is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

import leantune
from leantune.checkpoint.run_folder import CONFIG
from leantune.config import to_yaml
from leantune.config.resume import resumed_config
from leantune.data.records import EncodedRecords
from tests.distributed.ranks import (
    assert_same_curve,
    assert_same_weights,
    make_records,
    make_run,
    observe,
    run,
    start,
    steps,
    weights,
)
from tests.fixtures import tiny_llama, tiny_tokenizer

ADDED = tuple(f"<new{i}>" for i in range(5))
METHODS: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "lora": {"name": "lora", "rank": 4, "train_embeddings": True},
    "dora": {"name": "dora", "rank": 4, "train_embeddings": True},
    "loreft": {"name": "loreft", "rank": 4, "position": "f2+l2", "layers": [1], "train_embeddings": True},
}
EMBEDDING = "model.embed_tokens.weight"


def rows_before() -> int:
    return len(tiny_tokenizer())


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied and an untied model whose tokenizer fills all rows."""
    folders: dict[str, Path] = {}
    for kind in ("tied", "untied"):
        folder = folders[kind] = tmp_path_factory.mktemp("model") / kind
        tokenizer = tiny_tokenizer()
        tiny_llama(vocab_size=len(tokenizer), hidden_size=64, tied=kind == "tied").save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def records() -> EncodedRecords:
    """Records in which every ninth token is one of the added ones."""
    plain = make_records([1 + (7 * i) % 40 for i in range(29)])
    tokens = plain.tokens.copy()
    tokens[::9] = rows_before() + np.arange(len(tokens[::9])) % len(ADDED)
    return replace(plain, tokens=tokens)


def sections(folder: Path, method: str, **more: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(folder), "add_tokens": list(ADDED)},
        "method": METHODS[method],
        "output": {"checkpoints": False},
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 12,
            "epochs": 2.0,
            "learning_rate": 1e-3,
        },
        **more,
    }


@pytest.mark.parametrize(
    ("method", "kind", "base", "ranks"),
    [
        ("lora", "tied", "dense", 2),
        ("lora", "untied", "nf4", 3),
        ("dora", "untied", "dense", 2),
        ("loreft", "tied", "nf4", 2),
        ("loreft", "untied", "dense", 2),
        ("full", "tied", "dense", 2),
    ],
)
def test_ranks_train_the_rows_of_added_tokens_as_one_process_does(
    method: str,
    kind: str,
    base: str,
    ranks: int,
    bases: dict[str, Path],
    records: EncodedRecords,
    tmp_path: Path,
) -> None:
    """New rows differed from rank to rank, the embeddings of a ReFT run were left out of the sharding or the
    sum over ranks, or rank 0 saved just its own rows."""
    common = sections(bases[kind], method, base=base)
    fsdp = {"name": "fsdp", "devices": ranks}
    started = [
        run(tmp_path / "one", bases[kind], records, **common),
        run(tmp_path / "ddp", bases[kind], records, **{**common, "strategy": {"name": "ddp", "devices": 2}}),
        run(tmp_path / "fsdp", bases[kind], records, **{**common, "strategy": fsdp}),
    ]
    one, *others = [r.finish() for r in started]
    losses = [row["loss"] for row in steps(one)]
    assert max(losses) - min(losses) > 1e-3, "nothing was learned, so nothing was compared"
    before = load_file(bases[kind] / "model.safetensors")[EMBEDDING]
    for other in others:
        assert_same_curve(one, other, rel=1e-5)
        assert_same_weights(one, other, atol=2e-4)
        (rows,) = [tensor for name, tensor in weights(other).items() if name.endswith(EMBEDDING)]
        assert rows.shape == (rows_before() + len(ADDED), 64)
        new = rows[rows_before() :]
        assert (np.abs(new - before.mean(0)) < 6e-3).all(), "new rows do not start as the mean"
        assert (np.abs(new - before.mean(0)).max(1) > 1e-4).all(), "new rows were not trained"
        folder = other.model if method == "full" else other.adapter
        assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(ADDED[0]) == rows_before()
        loaded: Any = leantune.load(folder, device="cpu").trained.model
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (kind == "tied")


def test_chunks_of_the_loss_and_offload_train_sharded_embeddings_alike(
    bases: dict[str, Path], records: EncodedRecords, tmp_path: Path
) -> None:
    """The head runs outside of the model's forward pass when the loss is cut, where its rows are sharded."""
    common = sections(bases["tied"], "lora")
    one = run(tmp_path / "one", bases["tied"], records, **common)
    chunked = {**common, "train": {**common["train"], "loss_chunk_tokens": 7}}
    strategy = {"name": "fsdp", "devices": 2, "cpu_offload": True}
    two = run(tmp_path / "two", bases["tied"], records, **{**chunked, "strategy": strategy})
    assert_same_curve(one.finish(), two.finish(), rel=1e-5)
    assert_same_weights(one.folder, two.folder, atol=2e-4)


@pytest.mark.parametrize("places", [("fsdp", "single"), ("single", "fsdp")], ids="-".join)
def test_a_run_with_added_tokens_continues_on_another_strategy(
    places: tuple[str, str], bases: dict[str, Path], records: EncodedRecords, tmp_path: Path
) -> None:
    """A checkpoint held one rank's rows of the embeddings, or none: they are no parameters of the adapter."""
    common = sections(bases["untied"], "loreft")
    reference = run(tmp_path / "reference", bases["untied"], records, **common)
    before, after = places
    strategy = {"name": before, "devices": 1 if before == "single" else 2}
    saving = {**common, "output": {"checkpoint_every_steps": 2}, "strategy": strategy}
    folder = make_run(tmp_path / "moved", bases["untied"], records, **saving)
    stopped = start(folder, before=observe, path=str(tmp_path), stop_at=(3, 0))
    assert set(stopped.wait()) == {143}, stopped.output()
    moved = resumed_config(folder.path / CONFIG, [f"strategy.name={after}"], {})
    folder.write_config(to_yaml(moved))
    start(folder).finish()
    assert_same_curve(reference.finish(), folder, rel=1e-5)
    assert_same_weights(reference.folder, folder, atol=2e-4)


def test_a_rank_may_hold_new_rows_alone(
    bases: dict[str, Path], records: EncodedRecords, tmp_path: Path
) -> None:
    """With more new tokens than old ones the last rank's rows all lie beyond the checkpoint's."""
    many = [f"<new{i}>" for i in range(rows_before() + 50)]
    common = sections(bases["untied"], "lora", model={"name": str(bases["untied"]), "add_tokens": many})
    one = run(tmp_path / "one", bases["untied"], records, **common)
    two = run(
        tmp_path / "two", bases["untied"], records, **{**common, "strategy": {"name": "fsdp", "devices": 2}}
    )
    assert_same_curve(one.finish(), two.finish(), rel=1e-5)
    assert_same_weights(one.folder, two.folder, atol=2e-4)


def test_the_log_says_what_is_sharded_and_what_is_whole(
    bases: dict[str, Path], records: EncodedRecords, tmp_path: Path
) -> None:
    common = sections(bases["tied"], "loreft", strategy={"name": "fsdp", "devices": 2})
    ranks = run(tmp_path / "run", bases["tied"], records, **common)
    ranks.finish()
    output = ranks.output()
    assert "the method's own parameters are whole on every rank" in output
    assert "the output head lm_head is tied to it and stays so" in output
    assert f"{rows_before() + 5} rows, 5 more than the checkpoint" in output


def test_ranks_that_add_other_tokens_do_not_start(
    bases: dict[str, Path], records: EncodedRecords, tmp_path: Path
) -> None:
    """Case 14: the same number of rows hides that two machines mean other tokens by them."""
    common = sections(bases["tied"], "lora", strategy={"name": "ddp", "devices": 2})
    mine = make_run(tmp_path / "mine", bases["tied"], records, **common)
    other = [token.upper() for token in ADDED]
    theirs = make_run(
        tmp_path / "theirs",
        bases["tied"],
        records,
        **{**common, "model": {"name": str(bases["tied"]), "add_tokens": other}},
    )
    ranks = start(mine, folders={1: theirs})
    assert 0 not in ranks.wait()
    assert "rank 1 and rank 0 differ in their settings" in ranks.output()


def test_the_mean_is_that_of_all_rows_however_they_are_read(bases: dict[str, Path]) -> None:
    """A mean over one rank's rows, or over the first slice, would differ from rank to rank."""
    from leantune.bases import filling, load_base
    from leantune.models.source import resolve_model
    from leantune.models.vocabulary import Growth

    rows = rows_before()
    source = resolve_model(str(bases["untied"]))
    whole: Any = load_base("dense", source, growth=Growth(rows, rows + 3))
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(filling, "_SLICE_VALUES", 64 * 7)
        sliced: Any = load_base("dense", source, growth=Growth(rows, rows + 3))
    for model in (whole, sliced):
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            expected = weight[:rows].double().mean(0).float()
            torch.testing.assert_close(weight[rows:], expected.expand(3, -1), rtol=1e-6, atol=1e-9)
