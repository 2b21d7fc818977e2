"""Every cell of the grid gives the loss curve of one process, on two and where it matters on four."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leantune
from leantune.checkpoint.run_folder import CONFIG
from leantune.config import to_yaml
from leantune.config.grid import BASES, METHODS, REFT_METHODS, refusal
from leantune.config.resume import resumed_config
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

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "lora": {"name": "lora", "rank": 4},
    "dora": {"name": "dora", "rank": 4},
    "loreft": {"name": "loreft", "rank": 4, "position": "f2+l2", "layers": [1, 2]},
    # The other kinds differ in their formula alone; this one has no orthonormal factor.
    "nodireft": {"name": "nodireft", "rank": 4, "component": "mlp_output", "generation": "all"},
    "together": {
        "name": "together",
        "parts": [
            {"name": "lora", "rank": 4},
            {"name": "loreft", "rank": 4, "tied": False, "layers": [0, 1]},
        ],
    },
    "llama_pro": {"name": "llama_pro", "blocks": 2},
}
RATES = {"full": 1e-3, "llama_pro": 1e-3}
# 29 records do not divide into windows of 8: in some passes a rank has no records.
RECORDS = make_records([1 + (7 * i) % 40 for i in range(29)])
CELLS = [cell for cell in itertools.product(SETTINGS, BASES) if refusal(*cell, "fsdp") is None]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose layers can be packed (64 columns), with an odd number of rows and tied embeddings."""
    folder = tmp_path_factory.mktemp("model") / "wide"
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer) + 1, hidden_size=64, tied=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(method: str, base: Any = "dense", **train: Any) -> dict[str, Any]:
    batches = {"micro_batch_size": 2, "global_batch_size": 8, "epochs": 2.0}
    return {
        "method": SETTINGS[method],
        "base": base,
        "output": {"checkpoints": False},
        "train": {**batches, "max_steps": 6, "learning_rate": RATES.get(method, 1e-2), **train},
    }


def test_every_method_is_tried_or_differs_in_its_formula_alone() -> None:
    assert set(METHODS) - set(REFT_METHODS) <= set(SETTINGS)


@pytest.mark.parametrize(("method", "base"), CELLS)
def test_ddp_and_fsdp_give_the_curve_of_one_process(
    method: str, base: str, wide: Path, tmp_path: Path
) -> None:
    """Sharded gradients were averaged, packed rows mixed up, or a rank without records left the others."""
    common = settings(method, base)
    started = [
        run(tmp_path / "one", wide, RECORDS, **common),
        run(tmp_path / "ddp", wide, RECORDS, devices=2, strategy={"name": "ddp", "devices": 2}, **common),
        run(tmp_path / "fsdp", wide, RECORDS, devices=2, strategy={"name": "fsdp", "devices": 2}, **common),
    ]
    one, *others = [ranks.finish() for ranks in started]
    losses = [row["loss"] for row in steps(one)]
    assert max(losses) - min(losses) > 1e-3, "nothing was learned, so nothing was compared"
    for other in others:
        assert_same_curve(one, other, rel=1e-5)
        assert_same_weights(one, other, atol=2e-4)


VARIANTS: dict[str, dict[str, Any]] = {
    "grad_op": {"sharding": "grad_op"},
    "cpu_offload": {"cpu_offload": True},
    "adapter sharded": {"adapter": "sharded"},
    "adapter replicated": {"adapter": "replicated"},
    "communication in each pass": {"adapter": "sharded", "sync_every_micro_batch": True},
    "three ranks": {"devices": 3, "adapter": "sharded"},
    "hybrid": {"devices": 4, "sharding": "hybrid", "shard_devices": 2, "adapter": "sharded"},
    "hybrid_grad_op": {"devices": 4, "sharding": "hybrid_grad_op", "shard_devices": 2},
    "one device": {"devices": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base", ["dense", "nf4"])
def test_every_kind_of_sharding_gives_the_curve_of_one_process(
    variant: str, base: str, wide: Path, tmp_path: Path
) -> None:
    """With clipping, decay and dropout: the norm is that of all ranks, of sharded and of whole gradients."""
    common = settings(
        "dora",
        {"name": base} if base == "dense" else {"name": base, "double_quant": True},
        max_grad_norm=0.01,
        micro_batch_size=1,
        global_batch_size=12,
        optimizer={"name": "adamw", "weight_decay": 0.1},
    )
    common["method"] = {**common["method"], "dropout": 0.1}
    strategy = {"name": "fsdp", "devices": 2, **VARIANTS[variant]}
    one = run(tmp_path / "one", wide, RECORDS, **common)
    many = run(
        tmp_path / "many", wide, RECORDS, devices=strategy["devices"], **{**common, "strategy": strategy}
    )
    assert_same_curve(one.finish(), many.finish(), rel=1e-5)
    assert_same_weights(one.folder, many.folder, atol=2e-4)


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed", "bf16_fp32_buffers", "fp16_mixed"])
@pytest.mark.parametrize(("method", "base"), [("full", "dense"), ("lora", "nf4"), ("llama_pro", "hqq")])
def test_lower_precisions_learn_alike_on_shards(
    method: str, base: str, precision: str, wide: Path, tmp_path: Path
) -> None:
    """Gathered weights, block scales or gradients were cast otherwise than on one process."""
    common = settings(method, base, precision=precision)
    common["output"] = {"checkpoint_every_steps": 3}
    sharded = {"name": "fsdp", "devices": 2, "adapter": "sharded" if method == "lora" else "auto"}
    started = [
        run(tmp_path / "one", wide, RECORDS, **common),
        run(tmp_path / "two", wide, RECORDS, devices=2, **{**common, "strategy": sharded}),
    ]
    one, two = [[row["loss"] for row in steps(ranks.finish())] for ranks in started]
    np.testing.assert_allclose(one, two, rtol=0.01)
    assert one[-1] < one[0] - 0.05


@pytest.mark.parametrize(
    ("method", "base"), [("full", "dense"), ("lora", "nf4"), ("together", "hqq"), ("llama_pro", "nf4")]
)
@pytest.mark.parametrize("places", [("fsdp", "single"), ("single", "fsdp"), ("fsdp", "ddp")], ids="-".join)
def test_a_run_is_stopped_on_one_strategy_and_continued_on_another(
    method: str, base: str, places: tuple[str, str], wide: Path, tmp_path: Path
) -> None:
    """Case 6: a checkpoint held the shards of some number of ranks, or of rank 0 alone."""
    common = settings(method, base)
    reference = run(tmp_path / "reference", wide, RECORDS, **common)
    before, after = places
    spread = {"adapter": "sharded"} if method in ("lora", "together") and before == "fsdp" else {}
    devices = 1 if before == "single" else 2
    saving = {**common, "output": {"checkpoint_every_steps": 2}}
    strategy = {"name": before, "devices": devices, **spread}
    folder = make_run(tmp_path / "moved", wide, RECORDS, devices=devices, **{**saving, "strategy": strategy})
    stopped = start(folder, before=observe, path=str(tmp_path), stop_at=(3, 0))
    assert set(stopped.wait()) == {143}, stopped.output()
    moved = resumed_config(folder.path / CONFIG, [f"strategy.name={after}"], {})
    folder.write_config(to_yaml(moved))
    start(folder).finish()
    assert moved.strategy.name == after
    assert_same_curve(reference.finish(), folder, rel=1e-5)
    assert_same_weights(reference.folder, folder, atol=2e-4)


def test_an_adapter_saved_from_shards_is_whole(wide: Path, tmp_path: Path) -> None:
    """Case 1: rank 0 wrote its own rows, under the names of the wrapped modules."""
    common = settings("dora", {"name": "nf4", "double_quant": True}, max_steps=2)
    strategy = {"name": "fsdp", "devices": 2, "adapter": "sharded"}
    folder = run(tmp_path / "run", wide, RECORDS, devices=2, **{**common, "strategy": strategy}).finish()
    folder.write_json("data.json", {"format": "text", "template": "plain"})
    loaded = leantune.load(folder.path, device="cpu").trained
    saved = weights(folder)
    for name, factors in loaded.attached.factors().items():
        prefix = f"base_model.model.{name}."
        assert saved[f"{prefix}lora_A.weight"].shape == factors.A.shape
        assert saved[f"{prefix}lora_B.weight"].shape == factors.B.shape
        assert saved[f"{prefix}lora_magnitude_vector"].shape == (factors.B.shape[0],)
        assert not np.allclose(saved[f"{prefix}lora_B.weight"], 0)
    assert not list(folder.adapter.glob("*rank*"))
