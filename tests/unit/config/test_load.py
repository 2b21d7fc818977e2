"""Run files and overrides: every problem in one message, nothing dropped, nothing half understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leantune.config import apply_overrides, grid, load_config, to_tree, to_yaml, validate
from leantune.errors import ConfigError

BASE: dict[str, Any] = {"model": "m", "data": {"train": "x.jsonl"}}


def problems_of(changes: dict[str, Any], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate({**BASE, **changes}, environ)
    return caught.value.problems


def test_all_problems_of_a_file_come_in_one_message(tmp_path: Path) -> None:
    """Case 19: people fixed one mistake per start, and each start took seconds."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\ndata: {train: x.jsonl}\n"
        "method:\n  name: loreft\n  rank: -4\n  postion: f1\n"
        "train:\n  learning_rat: 1e-4\n  micro_batch_size: 4\n  global_batch_size: 6\n"
        "eval:\n  early_stop_patience: 2\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert text.startswith(f"5 problems in {path}:")
    for expected in (
        "method.rank (line 5): -4 is not valid: should be greater than 0",
        "method.postion (line 6): unknown key; did you mean method.position?",
        "train.learning_rat (line 8): unknown key; did you mean train.learning_rate?",
        "train.global_batch_size: 6 is not a multiple of micro_batch_size 4",
        "eval.early_stop_patience: there are no validation records",
    ):
        assert expected in text


def test_a_missing_section_does_not_hide_the_other_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"eval": {"every_steps": 3}})
    assert [p.partition(":")[0] for p in caught.value.problems] == ["model", "data", "eval.every_steps"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trian": {"epochs": 1}}, "trian: unknown key; did you mean train?"),
        ({"train": {"optimiser": "sgd"}}, "train.optimiser: unknown key; did you mean train.optimizer?"),
        ({"train": {"rank": 3}}, "train.rank: unknown key; did you mean method.rank?"),
        ({"strategy": {"devices": 2, "timeout": 5}}, "did you mean strategy.timeout_seconds?"),
        (
            {"method": "lorra"},
            "method.name: 'lorra' is not one of full, lora, dora, loreft, noreft, consreft, lobireft, "
            "direft, nodireft, llama_pro, together; did you mean lora?",
        ),
        ({"base": "nf44"}, "base.name: 'nf44' is not one of dense, nf4, hqq; did you mean nf4?"),
        ({"base": {"name": "hqq", "bit": 4}}, "base.bit: unknown key; did you mean base.bits?"),
        ({"base": {"name": "nf4", "rank": 4}}, "base.rank: unknown key; did you mean method.rank?"),
        ({"method": {"name": "lora", "bits": 4}}, "method.bits: unknown key; did you mean base.bits?"),
        ({"train": {"schedule": "cosin"}}, "did you mean cosine?"),
        ({"output": {"trackers": ["tensorbord"]}}, "did you mean tensorboard?"),
        ({"method": {"name": "full", "rank": 3}}, "method.rank: unknown key; known here: name"),
        ({"method": {"rank": 3}}, "method: name is missing"),
    ],
)
def test_a_misspelt_name_is_an_error_with_a_suggestion(changes: dict[str, Any], expected: str) -> None:
    (problem,) = problems_of(changes)
    assert expected in problem


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": {"name": "lora", "rank": 0}}, "method.rank"),
        ({"method": {"name": "lora", "rank": "8"}}, "method.rank"),
        ({"method": {"name": "lora", "rank": 8.0}}, "method.rank"),
        ({"method": {"name": "lora", "rank": True}}, "method.rank"),
        ({"method": {"name": "lora", "dropout": 1.0}}, "method.dropout"),
        ({"method": {"name": "lora", "target_modules": []}}, "method.target_modules"),
        ({"method": {"name": "lora", "target_modules": "(("}}, "method.target_modules"),
        ({"method": {"name": "lora", "target_modules": [3]}}, "method.target_modules"),
        ({"method": {"name": "lora", "layers": "8;x"}}, "method.layers"),
        ({"method": {"name": "lora", "layers": [1, "a"]}}, "method.layers"),
        ({"method": {"name": "lora", "layers": -1}}, "method.layers"),
        ({"method": {"name": "loreft", "position": "m3"}}, "method.position"),
        ({"method": {"name": "dora", "target_modules": "(("}}, "method.target_modules"),
        ({"method": {"name": "dora", "layers": "8;x"}}, "method.layers"),
        ({"method": {"name": "dora", "implementation": "peft"}}, "method.implementation"),
        ({"method": {"name": "llama_pro", "blocks": 0}}, "method.blocks"),
        ({"method": None}, "method"),
        ({"base": {"bits": 4}}, "base"),
        ({"base": {"name": "hqq", "bits": 5}}, "base.bits"),
        ({"base": {"name": "hqq", "group_size": 0}}, "base.group_size"),
        ({"base": {"name": "hqq", "group_size": 12}}, "base.group_size"),
        ({"base": {"name": "nf4", "keep_dense": "lm_head"}}, "base.keep_dense"),
        ({"train": None}, "train"),
        ({"train": {"learning_rate": "fast"}}, "train.learning_rate"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate"),
        ({"train": {"learning_rate": float("inf")}}, "train.learning_rate"),
        ({"train": {"seed": -1}}, "train.seed"),
        ({"train": {"optimizer": {"betas": [0.9]}}}, "train.optimizer.betas"),
        ({"train": {"optimizer": {"betas": [0.9, 1.5]}}}, "train.optimizer.betas"),
        ({"train": {"optimizer": {"name": "sgd", "rho": 0.5}}}, "train.optimizer.rho"),
        ({"train": {"schedule": {"warmup_steps": 3, "warmup_share": 0.1}}}, "train.schedule"),
        ({"train": {"schedule": {"name": "constant", "floor": 0.1}}}, "train.schedule.floor"),
        ({"train": {"max_steps": 3, "schedule": {"warmup_steps": 4}}}, "train.schedule.warmup_steps"),
        ({"data": {"train": "x", "max_length": 1}}, "data.max_length"),
        ({"data": {"train": "dummy", "columns": {"instruction": "q"}}}, "data.columns"),
        ({"strategy": {"devices": 3, "nodes": 2}}, "strategy.devices"),
        ({"strategy": {"name": "single", "devices": 2}}, "strategy.devices"),
        ({"output": {"checkpoints": False, "checkpoint_every_steps": 5}}, "output.checkpoint_every_steps"),
        ({3: {}}, "3"),
    ],
)
def test_a_value_that_cannot_be_obeyed_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    (problem,) = problems_of(changes)
    assert problem.startswith((f"{key}:", f"{key} "))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"base": {"name": "nf4", "bits": 3}},
            "base.bits: unknown key; known here: double_quant, ",
        ),
        ({"base": {"name": "nf4", "bits": 3}}, "; bits belongs to hqq"),
        ({"method": {"name": "full", "rank": 3}}, "; rank belongs to lora, dora, loreft"),
        ({"strategy": {"devices": 4, "shard_devices": 2}}, "; shard_devices belongs to fsdp"),
    ],
)
def test_a_key_of_another_value_of_the_axis_says_whose_it_is(changes: dict[str, Any], expected: str) -> None:
    """`shard_devices` under ddp was taken for a misspelt `devices`."""
    (problem,) = problems_of(changes)
    assert expected in problem


def test_a_list_says_which_member_is_wrong_and_not_that_it_is_no_text() -> None:
    (problem,) = problems_of({"method": {"name": "lora", "layers": [1, "a"]}})
    assert problem == "method.layers: 'a' is not valid: should be a valid integer"


def test_an_impossible_cell_of_the_grid_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 19: the table of refused cells is asked for every configuration."""
    monkeypatch.setitem(grid.REFUSED, ("loreft", "*", "ddp"), "for the sake of this test")
    (problem,) = problems_of({"method": "loreft", "strategy": {"devices": 2}})
    assert problem == "method loreft × base dense × strategy ddp is refused: for the sake of this test"
    assert grid.refusal("loreft", "dense", "single") is None


def test_shorthands_stand_for_their_sections() -> None:
    short = {**BASE, "method": "loreft", "strategy": {"devices": 2}, "train": {"optimizer": "sgd"}}
    config = validate(short)
    assert (config.method.name, config.strategy.name, config.strategy.devices) == ("loreft", "ddp", 2)
    assert (config.model.name, config.train.optimizer.name) == ("m", "sgd")
    one = validate({**BASE, "method": {"name": "lora", "layers": 8}})
    assert one.method.name == "lora"
    assert one.method.layers == (8,)


def test_a_configuration_cannot_be_changed_afterwards() -> None:
    config = validate(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.train.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_resolved_yaml_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = validate(
        {
            **BASE,
            "data": {"train": "naïve ünï.jsonl", "columns": {"instruction": "q"}, "system": "a: b # c\nd"},
            "method": {"name": "lora", "target_modules": ["q_proj", "v_proj"], "layers": [0, 3]},
            "strategy": {"devices": 4, "nodes": 2},
            "train": {
                "learning_rate": 1e-5,
                "optimizer": {"name": "adam", "betas": [0.9, 0.95], "eps": 1e-10},
            },
            "output": {"trackers": ["tensorboard"], "dir": "runs/on"},
        }
    )
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config
    assert validate(to_tree(config)) == config


def test_overrides_win_over_the_file_and_have_its_types(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: x}\nmethod: lora\ntrain: {epochs: 3}\n")
    overrides = [
        "train.epochs=0.5",
        "train.learning_rate=1e-4",
        "method.rank=4",
        "method.target_modules=[q_proj, v_proj]",
        "data.template=a=b.jinja",
        "eval.keep_best=false",
        "train.max_steps=null",
    ]
    config = load_config(path, overrides)
    assert (config.train.epochs, config.train.learning_rate, config.train.max_steps) == (0.5, 1e-4, None)
    assert config.method.model_dump(include={"rank", "target_modules"}) == {
        "rank": 4,
        "target_modules": ("q_proj", "v_proj"),
    }
    assert (config.data.template, config.eval.keep_best) == ("a=b.jinja", False)


def test_overrides_alone_make_a_configuration() -> None:
    config = load_config(None, ["model=m", "data.train=x", "method=loreft", "method.position=l1"])
    assert (config.model.name, config.method.name) == ("m", "loreft")


@pytest.mark.parametrize(
    "override", ["train.epochs", "=3", "train.epochs=[1", "data.train=2024-13-01", "--epochs 3"]
)
def test_an_override_that_cannot_be_read_is_a_problem(override: str) -> None:
    tree: dict[str, Any] = {}
    (problem,) = apply_overrides(tree, [override])
    assert override in problem
    assert tree == {}


def test_an_override_below_a_value_does_not_silently_replace_it() -> None:
    """`train: 5` in the file and `train.epochs=2` used to train with the 5 forgotten."""
    tree: dict[str, Any] = {"train": 5}
    (problem,) = apply_overrides(tree, ["train.epochs=2"])
    assert "train is 5 in the run file" in problem
    assert tree == {"train": 5}


class TestWorldSize:
    """The number of devices inside workers that somebody's torchrun started."""

    def test_it_is_taken_where_the_file_leaves_it_open(self) -> None:
        for strategy in ({}, {"strategy": "ddp"}, {"strategy": {"timeout_seconds": 9.0, "name": "ddp"}}):
            config = validate({**BASE, **strategy}, {"WORLD_SIZE": "3"})
            assert (config.strategy.name, config.strategy.devices) == ("ddp", 3)

    def test_fsdp_takes_it_and_keeps_its_keys(self) -> None:
        strategy = {"strategy": {"name": "fsdp", "sharding": "grad_op"}}
        config = validate({**BASE, **strategy}, {"WORLD_SIZE": "4"})
        assert config.strategy.model_dump(include={"name", "devices", "sharding"}) == {
            "name": "fsdp",
            "devices": 4,
            "sharding": "grad_op",
        }
        assert validate({**BASE, "strategy": "fsdp"}, {}).strategy.devices == 2

    def test_a_named_strategy_of_one_process_runs_in_the_one_that_torchrun_started(self) -> None:
        """It was refused: 2 devices, but 1 process; add the key, which was not there, or remove it."""
        for name in ("ddp", "fsdp"):
            config = validate({**BASE, "strategy": name}, {"WORLD_SIZE": "1"})
            assert (config.strategy.name, config.strategy.devices) == (name, 1)

    def test_another_number_under_fsdp_is_refused(self) -> None:
        (problem,) = problems_of({"strategy": {"name": "fsdp", "devices": 4}}, {"WORLD_SIZE": "2"})
        assert "4, but torchrun started 2 processes; add strategy.devices=2" in problem

    def test_one_process_is_single(self) -> None:
        assert validate(BASE, {"WORLD_SIZE": "1"}).strategy.name == "single"
        assert validate(BASE, {}).strategy.name == "single"

    @pytest.mark.parametrize(("devices", "world"), [(4, 2), (2, 1), (2, 4)])
    def test_another_number_in_the_file_is_refused(self, devices: int, world: int) -> None:
        (problem,) = problems_of({"strategy": {"devices": devices}}, {"WORLD_SIZE": str(world)})
        assert f"strategy.devices: {devices}, but torchrun started {world} process" in problem
        assert f"strategy.devices={world}" in problem

    def test_single_under_several_processes_is_refused_once(self) -> None:
        (problem,) = problems_of({"strategy": "single"}, {"WORLD_SIZE": "2"})
        assert problem.startswith("strategy: single, but torchrun started 2 processes")

    def test_batches_are_checked_with_torchruns_number(self) -> None:
        train = {"train": {"micro_batch_size": 4, "global_batch_size": 16}}
        assert validate({**BASE, **train}, {"WORLD_SIZE": "2"}).strategy.devices == 2
        (problem,) = problems_of(train, {"WORLD_SIZE": "3"})
        assert "micro_batch_size 4 × devices 3 = 12" in problem

    def test_a_broken_variable_is_a_clear_error(self) -> None:
        (problem,) = problems_of({}, {"WORLD_SIZE": "two"})
        assert problem.startswith("WORLD_SIZE: 'two'")


def test_batch_sizes_that_contradict_each_other_are_refused() -> None:
    (problem,) = problems_of(
        {"train": {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "global_batch_size": 8}}
    )
    assert "2 × devices 1 × gradient_accumulation_steps 3 = 6" in problem
    agreeing = {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "global_batch_size": 8}
    assert validate({**BASE, "train": agreeing}).train.global_batch_size == 8


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data": {"train": "x.jsonl", "generated_records": 5}}, "data.generated_records"),
        ({"data": {"train": "dummy", "train_on": "all"}}, "data.train_on"),
        ({"data": {"train": "x.jsonl", "validation_split": "dev"}}, "data.validation_split"),
        ({"eval": {"early_stop_min_delta": 0.1}}, "eval.early_stop_min_delta"),
        ({"output": {"checkpoints": False, "keep_checkpoints": 5}}, "output.keep_checkpoints"),
        ({"output": {"project": "mine"}}, "output.project"),
    ],
)
def test_keys_that_nothing_would_obey_are_refused(changes: dict[str, Any], key: str) -> None:
    """A setting that was accepted and then ignored."""
    problems = problems_of(changes)
    assert [problem for problem in problems if problem.startswith(f"{key}: has no effect here")]


def test_fewer_records_a_step_than_devices_are_refused() -> None:
    (problem,) = problems_of({"train": {"global_batch_size": 1}, "strategy": {"devices": 2}})
    assert "is less than strategy.devices 2" in problem
