"""What every rank holds whole stays equal on all of them: checked at every step, without another message."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from leantune.errors import NumericsError
from leantune.train.agreement import check_drift, drift_terms
from tests.distributed.ranks import make_records, make_run, samples, spy, start, steps, weights
from tests.fixtures import tiny_llama, tiny_tokenizer

RECORDS = make_records([1 + (5 * i) % 12 for i in range(22)])
LOREFT = {"name": "loreft", "rank": 4, "position": "f2+l2"}
TOGETHER = {"name": "together", "parts": [{"name": "lora", "rank": 2}, LOREFT]}
STRATEGIES = {"ddp": {"name": "ddp", "devices": 2}, "fsdp": {"name": "fsdp", "devices": 2}}


def sections(method: dict[str, Any], strategy: str, base: str = "dense", **train: Any) -> dict[str, Any]:
    return {
        "method": method,
        "base": base,
        "strategy": STRATEGIES[strategy],
        "output": {"checkpoints": False},
        "train": {"micro_batch_size": 2, "global_batch_size": 8, "epochs": 2.0, "max_steps": 5, **train},
    }


def tamper(path: str, at: int, rank: str) -> None:
    """In one rank, change one number of an intervention after some step; note all checksums of all ranks."""
    from leantune.methods.reft import AttachedReft

    plain = AttachedReft.after_step
    calls = 0

    def after_step(self: AttachedReft) -> None:
        nonlocal calls
        plain(self)
        calls += 1
        parameters = [p for module in self.interventions().values() for p in module.parameters()]
        if calls == at and os.environ["RANK"] == rank:
            with torch.no_grad():
                parameters[-1].view(-1)[0].add_(1e-6)
        with Path(path, f"terms-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(drift_terms(parameters).tolist()) + "\n")

    AttachedReft.after_step = after_step


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", [LOREFT, TOGETHER], ids=["loreft", "together"])
def test_a_rank_whose_interventions_drift_ends_the_job(
    method: dict[str, Any], strategy: str, model: Path, tmp_path: Path
) -> None:
    """Ranks with other rotations trained on and saved those of rank 0, which nobody had trained."""
    folder = make_run(tmp_path / "run", model, RECORDS, devices=2, **sections(method, strategy))
    ranks = start(folder, before=tamper, path=str(tmp_path), at=2, rank="1")
    assert ranks.wait() == [1, 1], ranks.output()
    for log in ranks.logs:
        message = log.read_text().splitlines()[-1]
        assert "step 3: the trained parameters differ between the 2 ranks" in message
        assert "Nothing was updated in this step" in message
    assert len(steps(folder)) == 2
    assert not folder.adapter.exists()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("base", ["dense", "nf4", "hqq"])
def test_interventions_are_equal_on_all_ranks_after_every_step(
    base: str, strategy: str, tmp_path: Path
) -> None:
    """By their bits, not within some tolerance: ranks that differ a little differ more and more."""
    wide = tmp_path / "wide"
    tiny_llama(vocab_size=len(tiny_tokenizer()), hidden_size=64).save_pretrained(wide)
    tiny_tokenizer().save_pretrained(wide)
    options = sections(TOGETHER, strategy, base, optimizer={"name": "adamw", "weight_decay": 0.1})
    folder = make_run(tmp_path / "run", wide, RECORDS, devices=2, **options)
    start(folder, before=tamper, path=str(tmp_path), at=-1, rank="0").finish()
    one, two = ((tmp_path / f"terms-{rank}.jsonl").read_text().splitlines() for rank in (0, 1))
    assert len(one) == 5
    assert one == two
    assert len(set(one)) == 5, "nothing was trained, so nothing was compared"


def count(path: str) -> None:
    """Write down how many collectives each step of this rank has, and of how many tensors in one."""
    import torch.distributed as dist

    from leantune.train import loop

    plain_reduce, plain_step = dist.all_reduce, loop.train_step
    seen: list[int] = []

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(tensor.numel())
        return plain_reduce(tensor, *args, **kwargs)

    def train_step(*args: Any) -> bool:
        seen.clear()
        stop = plain_step(*args)
        with Path(path, f"reduced-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(seen) + "\n")
        return stop

    dist.all_reduce, loop.train_step = all_reduce, train_step


@pytest.mark.parametrize("method", [LOREFT, TOGETHER], ids=["loreft", "together"])
def test_a_step_of_ddp_is_one_sum_over_ranks(method: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """Loss, stop, checksum and gradients travel in one flat tensor, however many micro-batches there are."""
    folder = make_run(
        tmp_path / "run", model, RECORDS, devices=2, **sections(method, "ddp", micro_batch_size=1)
    )
    start(folder, before=count, path=str(tmp_path)).finish()
    trained = sum(value.size for value in weights(folder).values())
    for rank in (0, 1):
        lines = [json.loads(line) for line in (tmp_path / f"reduced-{rank}.jsonl").read_text().splitlines()]
        assert lines == [[trained + 2 + 8]] * 5


def test_the_order_is_another_one_in_each_epoch_and_the_same_on_all_ranks(
    model: Path, tmp_path: Path
) -> None:
    """A sampler whose epoch nobody set gave every epoch the order of the first."""
    seen: dict[int, list[list[int]]] = {}
    for devices in (1, 2):
        place = tmp_path / str(devices)
        place.mkdir()
        # By length, three windows have few orders; and a cache would look at some records beforehand.
        plain = {"group_by_length": False, "cache_frozen_prefix": "off", "reshuffle": "records"}
        options = sections(LOREFT, "ddp", max_steps=None, epochs=3.0, **plain)
        options["strategy"] = {"devices": devices}
        folder = make_run(place / "run", model, RECORDS, devices=devices, **options)
        start(folder, before=spy, path=str(place)).finish()
        seen[devices] = samples(place)
    assert seen[1] == seen[2]
    epochs = [seen[2][start : start + 3] for start in (0, 3, 6)]
    assert len(seen[2]) == 9
    for epoch in epochs:
        assert sorted(index for window in epoch for index in window) == list(range(22))
    assert epochs[0] != epochs[1]
    assert epochs[1] != epochs[2]
    assert epochs[0] != epochs[2]


def test_the_checksum_tells_values_signs_and_tensors_apart() -> None:
    """Sums over ranks of small whole numbers, exact in fp32 for as many ranks as there may be."""
    first = [torch.randn(5, 3), torch.randn(4)]
    same = drift_terms([p.clone() for p in first])
    assert torch.equal(same, drift_terms(first))
    flipped, nudged = ([p.clone() for p in first] for _ in range(2))
    flipped[1][2] *= -1
    nudged[1].view(torch.int32)[0] += 1
    for other in (flipped, nudged, [first[1], first[0]]):
        assert not torch.equal(drift_terms(other), same)
    for world in (2, 3, 256):
        check_drift(same * world, world, 1)
        for other in (flipped, nudged):
            with pytest.raises(NumericsError, match=f"differ between the {world} ranks"):
                check_drift(same * (world - 1) + drift_terms(other), world, 1)
