"""A rank's memory while a model loads: its own share and a little, never the whole model."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import ranks
from tests.fixtures import tiny_llama

MIB = 2**20


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 150 MiB in three files, its largest tensor 24 MiB: far above noise."""
    folder = tmp_path_factory.mktemp("model") / "big"
    sizes = {"hidden_size": 768, "num_layers": 6, "num_heads": 12, "num_kv_heads": 4}
    model = tiny_llama(vocab_size=8192, tied=True, **sizes)
    model.save_pretrained(folder, max_shard_size="60MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("base", "settings"),
    [("dense", {}), ("nf4", {}), ("nf4", {"double_quant": True}), ("hqq", {})],
    ids=["dense", "nf4", "nf4-double", "hqq"],
)
def test_a_rank_holds_its_share_and_no_more_than_two_tensors(
    base: str, settings: dict[str, Any], size: int, big: Path, tmp_path: Path
) -> None:
    """Each rank read or de-quantised the whole model before it kept its part. Mapped files do not count."""
    processes = [
        ranks.fork(_load, base, settings, str(big), rank, size, str(tmp_path)) for rank in range(size)
    ]
    peaks = [0] * size
    while any(process.is_alive() for process in processes):
        peaks = [max(peak, _anonymous(p.pid)) for peak, p in zip(peaks, processes, strict=True)]
        time.sleep(0.001)
    assert [process.exitcode for process in processes] == [0] * size
    for rank in range(size):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        peak = peaks[rank] - seen["before"]
        blocks = seen["whole"] - seen["largest"]  # the embeddings are whole on every rank
        assert seen["share"] < seen["largest"] + 1.1 * blocks / size
        assert seen["share"] < peak <= seen["share"] + 2 * seen["largest"], seen


def _load(base: str, settings: dict[str, Any], model: str, rank: int, size: int, place: str) -> None:
    """One rank: load, and write down how much memory it took."""
    ranks.settle(f"{place}/log-{rank}", ranks.rank_environ(rank, size, place))
    import torch

    from leantune.bases import build_base, fill
    from leantune.methods import attach
    from leantune.models.empty import materialise
    from leantune.models.precision import PRECISIONS
    from leantune.models.shards import local_rows
    from leantune.models.source import resolve_model
    from leantune.strategies import fsdp
    from leantune.strategies.process import join, leave

    world = join("cpu", 60.0)
    before = _anonymous(os.getpid())
    built = build_base(base, resolve_model(model), PRECISIONS["fp32"], settings=settings)
    attached = attach("loreft", built.model, {"layers": [2, 4]}, seed=0)
    fsdp.place(built.model, attached.trainable(), world, pinned=frozenset(attached.pinned()))
    materialise(built.model, world.device)
    fill(built, world.device)
    held = [*built.model.parameters(), *built.model.buffers()]
    shapes = [built.weights.shape(slot.source) for slot in built.slots if slot.source]
    facts = {
        "before": before,
        "share": sum(local_rows(tensor).local.nbytes for tensor in held),
        "whole": sum(tensor.numel() * tensor.element_size() for tensor in held),
        "largest": 4 * max(torch.Size(shape).numel() for shape in shapes),
    }
    Path(place, f"{rank}.json").write_text(json.dumps(facts))
    leave()


def _anonymous(pid: int) -> int:
    """RssAnon of a process, bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)
