"""Bases, strategies and memory levers: what is set is obeyed, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from leantune.config import grid, load_config, to_yaml, validate
from leantune.config.axes import DoraMethod, LoraMethod, LoreftMethod, LowRankMethod, parts_of
from leantune.config.yaml import parse_yaml_value
from leantune.errors import ConfigError

BASE: dict[str, Any] = {"model": "m", "data": {"train": "x.jsonl"}}
EIGHT_BIT = ["adamw_8bit", "paged_adamw_8bit"]
REFT = grid.REFT_METHODS


def problems_of(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate({**BASE, **changes})
    return caught.value.problems


def fsdp(**keys: Any) -> dict[str, Any]:
    return {"name": "fsdp", "devices": 4, **keys}


def test_a_base_may_be_a_word_a_section_or_an_override() -> None:
    assert validate({**BASE, "base": "nf4"}).base.model_dump() == {
        "name": "nf4",
        "keep_dense": (),
        "double_quant": False,
    }
    assert validate({**BASE, "base": "hqq"}).base.model_dump() == {
        "name": "hqq",
        "keep_dense": (),
        "bits": 4,
        "group_size": 64,
    }
    words = ["model=m", "data.train=x", "base=hqq", "base.bits=3", "base.keep_dense=[down_proj]"]
    assert load_config(None, words).base.model_dump(include={"bits", "keep_dense"}) == {
        "bits": 3,
        "keep_dense": ("down_proj",),
    }


def test_dora_has_the_keys_and_defaults_of_lora_but_one() -> None:
    """Written twice, a default would change in one of the two."""
    lora, dora = LoraMethod().model_dump(), DoraMethod().model_dump()
    assert lora.keys() - dora.keys() == {"implementation"}
    assert {key for key in dora if dora[key] != lora[key]} == {"name"}
    assert isinstance(LoraMethod(), LowRankMethod)


def test_the_name_comes_first_in_a_saved_run() -> None:
    """Shared fields stand in the class above; `name` must not sink below them in run.yaml."""
    config = validate({**BASE, "method": "dora", "base": "hqq", "strategy": "fsdp"})
    tree = parse_yaml_value(to_yaml(config))
    assert [next(iter(tree[axis])) for axis in ("method", "base", "strategy")] == ["name"] * 3


@pytest.mark.parametrize("method", grid.METHODS)
@pytest.mark.parametrize("base", grid.BASES)
@pytest.mark.parametrize("strategy", grid.STRATEGIES)
def test_every_cell_validates_and_reads_back_or_is_refused_by_the_table(
    method: str, base: str, strategy: str
) -> None:
    tree = {**BASE, "method": method, "base": base, "strategy": strategy}
    reason = grid.refusal(method, base, strategy)
    if reason is None:
        config = validate(tree)
        assert validate(parse_yaml_value(to_yaml(config))) == config
    else:
        assert problems_of(method=method, base=base, strategy=strategy) == [
            f"method {method} × base {base} × strategy {strategy} is refused: {reason}"
        ]


def test_only_training_packed_weights_themselves_is_refused() -> None:
    refused = {
        (method, base)
        for method in grid.METHODS
        for base in grid.BASES
        for strategy in grid.STRATEGIES
        if grid.refusal(method, base, strategy)
    }
    assert refused == {("full", "nf4"), ("full", "hqq")}


def test_devices_alone_stay_ddp() -> None:
    assert validate({**BASE, "strategy": {"devices": 2}}).strategy.name == "ddp"
    assert validate({**BASE, "strategy": "fsdp"}).strategy.devices == 2


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        (fsdp(devices=3, nodes=2), "strategy.devices: 3 is not a multiple of strategy.nodes 2"),
        (fsdp(shard_devices=2), "strategy.shard_devices: has no effect here"),
        (fsdp(sharding="grad_op", shard_devices=2), "strategy.shard_devices: has no effect here"),
        (fsdp(sharding="hybrid", shard_devices=3), "strategy.shard_devices: 3 does not divide"),
        (fsdp(sharding="hybrid", shard_devices=4), "strategy.shard_devices: 4 does not divide"),
        (fsdp(sharding="hybrid_grad_op", shard_devices=8), "strategy.shard_devices: 8 does not divide"),
        (fsdp(sharding="hybrid"), "strategy.sharding: hybrid on one node is a single shard group"),
        (fsdp(sharding="hybird"), "strategy.sharding: 'hybird' is not one of"),
        (fsdp(adapter="shared"), "strategy.adapter: 'shared' is not one of"),
    ],
)
def test_sharding_that_cannot_be_as_asked_is_refused(strategy: dict[str, Any], key: str) -> None:
    """Hybrid in one group is full sharding under another name, and was never asked for."""
    (problem,) = problems_of(strategy=strategy)
    assert problem.startswith(key)


@pytest.mark.parametrize(
    "strategy",
    [
        fsdp(sharding="hybrid", shard_devices=2),
        fsdp(sharding="hybrid", nodes=2),
        fsdp(sharding="hybrid_grad_op", nodes=2, shard_devices=1),
        fsdp(sharding="grad_op", cpu_offload=True, sync_every_micro_batch=True),
        fsdp(devices=1),
    ],
)
def test_sharding_that_is_possible_is_accepted(strategy: dict[str, Any]) -> None:
    config = validate({**BASE, "strategy": strategy})
    assert config.strategy.model_dump(include=set(strategy)) == strategy


@pytest.mark.parametrize("method", ["full", *REFT, "llama_pro"])
def test_a_place_for_an_adapter_that_is_not_there_is_refused(method: str) -> None:
    (problem,) = problems_of(method=method, strategy=fsdp(adapter="replicated"))
    assert problem.startswith(f"strategy.adapter: has no effect here, because method {method} has no LoRA")
    for other in ("lora", "dora"):
        assert validate({**BASE, "method": other, "strategy": fsdp(adapter="sharded")})


@pytest.mark.parametrize("optimizer", EIGHT_BIT)
@pytest.mark.parametrize("method", ["full", "lora", "dora", "llama_pro"])
def test_8_bit_states_of_sharded_parameters_are_refused(optimizer: str, method: str) -> None:
    """Saved by blocks of flat memory, they would be loaded into other rows on another number of ranks."""
    (problem,) = problems_of(method=method, strategy=fsdp(), train={"optimizer": optimizer})
    assert problem.startswith(f"train.optimizer.name: {optimizer} does not go with sharded parameters")
    assert ("strategy.adapter: replicated" in problem) == (method in ("lora", "dora"))


@pytest.mark.parametrize("optimizer", EIGHT_BIT)
@pytest.mark.parametrize(
    ("method", "strategy"),
    [
        ("lora", fsdp(adapter="replicated")),
        ("dora", fsdp(adapter="replicated")),
        ("loreft", fsdp()),
        ("full", {"name": "ddp"}),
        ("llama_pro", {"name": "single"}),
    ],
)
def test_8_bit_states_of_whole_parameters_are_accepted(
    optimizer: str, method: str, strategy: dict[str, Any]
) -> None:
    tree = {**BASE, "method": method, "strategy": strategy, "train": {"optimizer": optimizer}}
    assert validate(tree).train.optimizer.name == optimizer


def test_paged_states_without_a_gpu_to_page_from_are_refused() -> None:
    """bitsandbytes would only warn, and use ordinary memory."""
    (problem,) = problems_of(train={"optimizer": "paged_adamw_32bit", "device": "cpu"})
    assert "because train.device is cpu" in problem
    assert problem.endswith("use adamw")
    (problem,) = problems_of(strategy=fsdp(cpu_offload=True), train={"optimizer": "paged_adamw_32bit"})
    assert "because strategy.cpu_offload is true" in problem
    assert validate({**BASE, "train": {"optimizer": "paged_adamw_32bit"}})
    assert validate({**BASE, "train": {"optimizer": "adamw_8bit", "device": "cpu"}})


@pytest.mark.parametrize("optimizer", [*EIGHT_BIT, "paged_adamw_32bit"])
@pytest.mark.parametrize(("key", "value"), [("momentum", 0.9), ("rho", 0.5)])
def test_the_new_optimizers_refuse_what_they_do_not_have(optimizer: str, key: str, value: float) -> None:
    (problem,) = problems_of(train={"optimizer": {"name": optimizer, key: value}})
    assert problem == f"train.optimizer.{key}: {optimizer} has no {key}; remove the key"
    own = {"name": optimizer, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1}
    assert validate({**BASE, "train": {"optimizer": own}}).train.optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize(("key", "value"), [("checkpoint_every_blocks", 2), ("activation_offload", True)])
def test_levers_of_activation_checkpointing_need_it(key: str, value: Any) -> None:
    (problem,) = problems_of(train={key: value})
    assert problem == (
        f"train.{key}: has no effect here, because train.activation_checkpointing is false; remove the key"
    )
    config = validate({**BASE, "train": {key: value, "activation_checkpointing": True}})
    assert getattr(config.train, key) == value


@pytest.mark.parametrize("key", ["loss_chunk_tokens", "checkpoint_every_blocks"])
def test_levers_that_count_must_be_positive(key: str) -> None:
    (problem,) = problems_of(train={key: 0, "activation_checkpointing": True})
    assert problem.startswith(f"train.{key}: 0 is not valid: should be greater than 0")


@pytest.mark.parametrize(
    "written",
    ["lora+loreft", "lora + loreft", ["lora", "loreft"], {"name": "together", "parts": ["lora", "loreft"]}],
)
def test_methods_that_run_together_are_written_in_three_ways(written: Any) -> None:
    config = validate({**BASE, "method": written})
    assert config.method.name == "together"
    assert parts_of(config.method) == (LoraMethod(), LoreftMethod())
    assert validate(parse_yaml_value(to_yaml(config))) == config
    alone = validate({**BASE, "method": "lora"}).method
    assert parts_of(alone) == (alone,)


def test_parts_have_settings_of_their_own() -> None:
    parts = [{"name": "dora", "rank": 2}, {"name": "consreft", "layers": "1-2", "position": [0, -1]}]
    dora, reft = parts_of(validate({**BASE, "method": parts}).method)
    assert dora == DoraMethod(rank=2)
    assert reft.model_dump(include={"layers", "position", "rank"}) == {
        "layers": "1-2",
        "position": (0, -1),
        "rank": 8,
    }


def test_the_direft_of_the_paper_is_another_name() -> None:
    """pyreft and the paper mean two formulas by one name."""
    assert validate({**BASE, "method": "direft-paper"}).method.name == "nodireft"
    assert validate({**BASE, "method": {"name": "direft-paper", "rank": 2}}).method.name == "nodireft"
    assert [part.name for part in parts_of(validate({**BASE, "method": "lora+direft-paper"}).method)] == [
        "lora",
        "nodireft",
    ]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("lora+dora", "method: lora, dora do not go together; expected one of lora and dora and one ReFT"),
        (["loreft", "direft"], "method: loreft, direft do not go together"),
        (["lora"], "method: lora do not go together"),
        ({"name": "together", "parts": []}, "method: an empty list do not go together"),
        (["full", "loreft"], "method.parts.name: 'full' is not one of lora, dora, loreft"),
        (["lora", "lorefd"], "nodireft; did you mean loreft?"),
        (["lora", ["loreft"]], "method.parts.name: 'together' is not one of"),
        ([3, "loreft"], "method.parts: 3 is not a section"),
        (
            [{"name": "lora", "rnk": 3}, "loreft"],
            "method.parts[0].rnk: unknown key; did you mean method.parts.rank?",
        ),
        (["lora", {"name": "loreft", "rank": 0}], "method.parts[1].rank: 0 is not valid: should be greater"),
        (["lora", {"name": "loreft", "position": "g1"}], "method.position: 'g1' is not a position"),
        (
            [{"name": "lora", "train_embeddings": True}, {"name": "loreft", "train_embeddings": True}],
            "method.train_embeddings: set for both methods",
        ),
        (
            [{"name": "lora", "implementation": "peft"}, "loreft"],
            "method.implementation: peft does not go together",
        ),
    ],
)
def test_methods_that_do_not_go_together_are_refused(method: Any, expected: str) -> None:
    (problem,) = problems_of(method=method)
    assert expected in problem


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"layers": "8;;9"}, "method.layers: '8;;9' is not a list of layers"),
        ({"position": "f1l1"}, "method.position: 'f1l1' is not a position"),
        ({"position": "1;1"}, "method.position: position 1 is listed twice"),
        (
            {"position": "all", "tied": False},
            "method.tied: false, but position all has no first and last tokens",
        ),
        ({"position": "0;-1", "tied": False}, "method.tied: false, but position 0;-1 has no first"),
        ({"component": "block"}, "method.component: 'block' is not one of block_output, block_input"),
        ({"generation": "never"}, "method.generation: 'never' is not one of prompt, all or new"),
        (
            {"positions_convention": "pyreft"},
            "is not one of standard or pyreft-alpaca; did you mean pyreft-alpaca?",
        ),
        (
            {"subspaces": {"a": "0-8"}},
            "method.subspaces: a: dimension 8 does not exist; the rank is 8: 0 to 7",
        ),
        ({"subspaces": {"a": "0;x"}}, "method.subspaces: a: '0;x' is not a list of dimensions"),
        ({"subspaces": {"3": "0"}}, "method.subspaces: '3' is not a name"),
        ({"layers": "3", "interventions": [{"layers": "8"}]}, "method.layers: has no effect here"),
        ({"interventions": [{"layers": "8;;9"}]}, "method.interventions[0].layers: '8;;9' is not a list"),
        (
            {"interventions": [{"layers": "1"}, {"position": "g"}]},
            "method.interventions[1].position: 'g' is not a",
        ),
        ({"interventions": [{"rnk": 4}]}, "method.interventions[0].rnk: unknown key; did you mean"),
        ({"interventions": [{"position": "all"}], "tied": False}, "method.tied: false, but position all"),
    ],
)
@pytest.mark.parametrize("method", ["loreft", "lobireft"])
def test_places_that_cannot_be_are_refused(method: str, keys: dict[str, Any], expected: str) -> None:
    """Each would only be found when the model is built, after the data were read."""
    (problem,) = problems_of(method={"name": method, **keys})
    assert expected in problem


def test_places_may_be_groups_with_settings_of_their_own() -> None:
    groups = [
        {"layers": "8;19", "rank": 4, "position": "f1"},
        {"layers": 3, "component": "mlp_output", "tied": False},
        {"position": -1, "tied": True},
    ]
    method = {"name": "loreft", "rank": 2, "tied": False, "interventions": groups}
    config = validate({**BASE, "method": method})
    assert validate(parse_yaml_value(to_yaml(config))) == config
    written = config.method.model_dump(exclude_unset=True)["interventions"]
    assert written == ({**groups[0]}, {**groups[1], "layers": (3,)}, {**groups[2], "position": (-1,)})


@pytest.mark.parametrize("method", REFT)
def test_a_method_has_only_the_keys_that_its_formula_has(method: str) -> None:
    """A constant source has no activation, and only a free projection can have a bias."""
    keys = set(validate({**BASE, "method": method}).method.model_dump())
    assert ("activation" in keys) == (method not in ("consreft", "lobireft"))
    assert ("projection_bias" in keys) == (method == "noreft")
    assert {"rank", "layers", "component", "position", "tied", "interventions", "subspaces"} <= keys


@pytest.mark.parametrize("method", ["lora+loreft", "dora+nodireft"])
def test_methods_together_keep_the_rules_of_their_parts(method: str) -> None:
    """8-bit states follow sharded LoRA; the place of an adapter has an effect, as there is one."""
    assert validate({**BASE, "method": method, "strategy": fsdp(adapter="replicated")})
    (problem,) = problems_of(method=method, strategy=fsdp(), train={"optimizer": "adamw_8bit"})
    assert "strategy.adapter: replicated" in problem
    whole = {"method": method, "strategy": fsdp(adapter="replicated"), "train": {"optimizer": "adamw_8bit"}}
    assert validate({**BASE, **whole}).method.name == "together"
    tokens = {"name": "m", "add_tokens": ["<a>"]}
    (problem,) = problems_of(model=tokens, method=method)
    assert "leaves the embeddings frozen" in problem
    names = method.split("+")
    trained = [{"name": names[0], "train_embeddings": True}, names[1]]
    assert validate({**BASE, "model": tokens, "method": trained})
