"""Resuming: a run may move to other devices, but not become another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leantune.config import to_yaml, validate
from leantune.config.resume import resumed_config
from leantune.errors import ConfigError


def saved_run(folder: Path, **changes: Any) -> Path:
    """The run.yaml that a run leaves behind: everything resolved."""
    train = {"micro_batch_size": 4, "global_batch_size": 8, **changes.pop("train", {})}
    path = folder / "run.yaml"
    config = validate({"model": "m", "data": {"train": "x"}, "train": train, **changes})
    path.write_text(to_yaml(config))
    return path


def test_without_overrides_the_configuration_is_the_same(tmp_path: Path) -> None:
    path = saved_run(tmp_path, strategy={"devices": 2, "timeout_seconds": 60.0})
    config = resumed_config(path, [], {})
    assert to_yaml(config) == path.read_text()


@pytest.mark.parametrize(
    "override",
    [
        "train.learning_rate=1e-3",
        "train.global_batch_size=16",
        "train.seed=1",
        "train.epochs=9",
        "method.rank=2",
        "data.max_length=64",
        "model=n",
        "train.optimizer.name=sgd",
        "train.precision=fp32",
        "train.micro_batch_sizes=2",
        "output.dir=elsewhere",
    ],
)
def test_what_changes_the_outcome_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed_config(saved_run(tmp_path), [override], {})
    key = override.partition("=")[0]
    assert any(p.startswith(f"{key}: cannot change when a run is resumed") for p in caught.value.problems)


def test_where_it_runs_may_change(tmp_path: Path) -> None:
    overrides = [
        "train.micro_batch_size=2",
        "train.activation_checkpointing=true",
        "train.checkpoint_every_blocks=2",
        "train.activation_offload=true",
        "train.loss_chunk_tokens=256",
        "train.device=cpu",
        "eval.micro_batch_size=7",
        "output.keep_checkpoints=5",
        "output.trackers=[tensorboard]",
    ]
    config = resumed_config(saved_run(tmp_path), overrides, {})
    assert (config.train.micro_batch_size, config.train.activation_checkpointing) == (2, True)
    assert (config.train.checkpoint_every_blocks, config.train.activation_offload) == (2, True)
    assert config.train.loss_chunk_tokens == 256
    assert (config.eval.micro_batch_size, config.output.trackers) == (7, ("tensorboard",))


def test_devices_alone_decide_between_one_process_and_several(tmp_path: Path) -> None:
    several = saved_run(tmp_path, strategy={"devices": 2})
    assert resumed_config(several, ["strategy.devices=1"], {}).strategy.name == "single"
    one = saved_run(tmp_path)
    assert resumed_config(one, ["strategy.devices=2"], {}).strategy.name == "ddp"
    under_torchrun = resumed_config(one, [], {"WORLD_SIZE": "2"})
    assert (under_torchrun.strategy.name, under_torchrun.strategy.devices) == ("ddp", 2)


def test_the_timeout_survives_a_move(tmp_path: Path) -> None:
    path = saved_run(tmp_path, strategy={"devices": 2, "timeout_seconds": 60.0})
    moved = resumed_config(path, ["strategy.devices=4"], {})
    assert moved.strategy.model_dump() == {"name": "ddp", "devices": 4, "nodes": 1, "timeout_seconds": 60.0}


FSDP = {"name": "fsdp", "devices": 2, "timeout_seconds": 60.0, "sharding": "grad_op", "cpu_offload": True}


@pytest.mark.parametrize("word", ["strategy.name=fsdp", "strategy=fsdp"])
def test_a_run_goes_on_under_another_strategy_with_its_devices(tmp_path: Path, word: str) -> None:
    path = saved_run(tmp_path, strategy={"devices": 4, "nodes": 2, "timeout_seconds": 60.0})
    strategy = resumed_config(path, [word, "strategy.sharding=grad_op"], {}).strategy
    assert strategy.model_dump(include={"name", "devices", "nodes", "timeout_seconds", "sharding"}) == {
        "name": "fsdp",
        "devices": 4,
        "nodes": 2,
        "timeout_seconds": 60.0,
        "sharding": "grad_op",
    }


def test_the_keys_of_fsdp_do_not_stand_in_the_way_of_ddp(tmp_path: Path) -> None:
    """The saved run.yaml names every key of fsdp; ddp knows none of them."""
    path = saved_run(tmp_path, strategy=FSDP)
    strategy = resumed_config(path, ["strategy.name=ddp"], {}).strategy
    assert strategy.model_dump() == {"name": "ddp", "devices": 2, "nodes": 1, "timeout_seconds": 60.0}


def test_single_and_several_devices_leave_their_number_behind(tmp_path: Path) -> None:
    several = saved_run(tmp_path, strategy=FSDP)
    assert resumed_config(several, ["strategy.name=single"], {}).strategy.devices == 1
    config = resumed_config(saved_run(tmp_path, train={"global_batch_size": 4}), ["strategy.name=fsdp"], {})
    assert (config.strategy.name, config.strategy.devices) == ("fsdp", 2)
    assert config.train.micro_batch_size == 2, "the micro-batches follow the default number of devices"


def test_another_number_of_devices_leaves_fsdp_as_it_was(tmp_path: Path) -> None:
    """It became ddp or single by the number alone, and a model that needs sharding ran out of memory."""
    path = saved_run(tmp_path, strategy=FSDP)
    for overrides, environ, devices in (
        (["strategy.devices=4"], {}, 4),
        (["strategy.devices=1"], {}, 1),
        ([], {"WORLD_SIZE": "4"}, 4),
    ):
        strategy = resumed_config(path, overrides, environ).strategy
        assert strategy.model_dump(include=set(FSDP)) == {**FSDP, "devices": devices}


def test_an_unknown_strategy_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fspd' is not one of single, ddp, fsdp; did you mean fsdp"):
        resumed_config(saved_run(tmp_path), ["strategy.name=fspd"], {})


def test_a_broken_world_size_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE: 'two'"):
        resumed_config(saved_run(tmp_path), [], {"WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("records", "devices", "micro"), [(8, 1, 4), (8, 2, 4), (8, 4, 2), (8, 8, 1), (12, 4, 3), (12, 3, 4)]
)
def test_micro_batches_shrink_so_that_a_step_keeps_its_records(
    tmp_path: Path, records: int, devices: int, micro: int
) -> None:
    path = saved_run(tmp_path, train={"global_batch_size": records})
    config = resumed_config(path, [f"strategy.devices={devices}"], {})
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (records, micro)


def test_more_devices_than_records_of_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a multiple of micro_batch_size 1 × devices 3"):
        resumed_config(saved_run(tmp_path), ["strategy.devices=3"], {})


def test_torchruns_number_must_be_that_of_the_override(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torchrun started 2 processes"):
        resumed_config(saved_run(tmp_path), ["strategy.devices=4"], {"WORLD_SIZE": "2"})
