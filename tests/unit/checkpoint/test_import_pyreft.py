"""What pyreft saved becomes an adapter that computes the same, or is refused with the reason."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leantune.checkpoint.adapter import load_adapter, read_tensors
from leantune.checkpoint.import_pyreft import import_pyreft
from leantune.checkpoint.pyreft_payload import orthogonal_matrix
from leantune.errors import CheckpointError, ConfigError, LeantuneError, ModelError
from leantune.ops.intervention import CONSTANT, KINDS
from tests.models import tiny_model
from tests.pyreft_files import Saved, edited_logits, rotate_layer, save_like_pyreft, spelled

IDS = torch.randint(3, 320, (2, 12), generator=torch.Generator().manual_seed(0))
PROMPT = 9


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def logits_with(folder: Path, model: Any) -> Tensor:
    attached = load_adapter(model, folder)
    with torch.no_grad(), attached.edits(torch.tensor([PROMPT, PROMPT])):
        return model(input_ids=IDS, use_cache=False).logits


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder / "reft.safetensors")[0]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "reft_config.json").read_text())


def blocks_of(model: Any) -> Any:
    return model.model.layers


@pytest.mark.parametrize(
    ("kind", "act"),
    [*((kind, "linear") for kind in KINDS), *((kind, "relu") for kind in KINDS if kind not in CONSTANT)],
)
def test_logits_are_those_of_the_formula(kind: str, act: str, tmp_path: Path) -> None:
    """A factor transposed, an activation lost or a bias dropped changes what a model says."""
    saved = {layer: Saved(kind, bias=kind == "noreft", act=act) for layer in (0, 2)}
    places = [(layer, "block_output", intervention) for layer, intervention in saved.items()]
    folder = save_like_pyreft(tmp_path / "theirs", places)
    lines = import_pyreft(folder, tmp_path / "ours", position="f2+l1", activation=act)
    assert lines[0] == f"{kind} rank 4, position f2+l1, at block_output of blocks 0, 2"
    model = tiny_model()
    edits = [(blocks_of(model)[layer], (0, 1, PROMPT - 1), it) for layer, it in saved.items()]
    expected = edited_logits(model, IDS, edits)
    assert not torch.allclose(expected, model(input_ids=IDS).logits, atol=1e-3)
    torch.testing.assert_close(logits_with(tmp_path / "ours", model), expected, rtol=0, atol=2e-6)


def test_tensors_are_the_saved_ones_to_the_bit(tmp_path: Path) -> None:
    direft, loreft = Saved("direft", rank=3), Saved("loreft", rank=3)
    for name, it in (("d", direft), ("l", loreft)):
        save_like_pyreft(tmp_path / name, [(1, "block_output", it)])
        import_pyreft(tmp_path / name, tmp_path / f"{name}-ours", position="l1")
        tensors = tensors_of(tmp_path / f"{name}-ours")
        assert torch.equal(tensors["1.block_output.both.rotation"], it.rotate_layer.weight)
        assert torch.equal(tensors["1.block_output.both.weight"], it.learned_source.weight)
        assert torch.equal(tensors["1.block_output.both.bias"], it.learned_source.bias)


@pytest.mark.parametrize(
    ("shape", "trivialization"),
    [((12, 3), True), ((12, 1), True), ((5, 5), True), ((2, 1), True), ((12, 3), False), ((2, 1), False)],
)
def test_the_parametrisation_is_evaluated_as_torch_does(shape: tuple[int, int], trivialization: bool) -> None:
    """Torch takes another map for square matrices, and turns by a base unless told not to."""
    state = rotate_layer(*shape, trivialization=trivialization)
    tensors = state.state_dict()
    base = tensors.get("parametrizations.weight.0.base")
    assert (base is not None) is trivialization
    found = orthogonal_matrix(tensors["parametrizations.weight.original"], base)
    assert torch.equal(found, state.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [14, 13, 5, 2])
@pytest.mark.parametrize("old_keys", [True, False])
def test_both_key_styles_and_all_list_lengths_say_the_same(
    old_keys: bool, values: int, tmp_path: Path
) -> None:
    """Keys had dots until February 2025, and lists were shorter."""
    places = [(layer, "block_output", Saved("loreft")) for layer in (0, 2)]
    save_like_pyreft(tmp_path / "new", places)
    save_like_pyreft(tmp_path / "other", places, old_keys=old_keys, values=values)
    for name in ("new", "other"):
        import_pyreft(tmp_path / name, tmp_path / f"{name}-ours", position="f1")
    assert config_of(tmp_path / "other-ours") == config_of(tmp_path / "new-ours")
    left, right = tensors_of(tmp_path / "new-ours"), tensors_of(tmp_path / "other-ours")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("old_keys", [True, False])
@pytest.mark.parametrize(
    ("path", "component", "module"),
    [
        ("model.layers[1].output", "block_output", ""),
        ("model.layers[1].self_attn.output", "attention_output", "self_attn"),
        ("model.layers[1].mlp.output", "mlp_output", "mlp"),
        ("model.layers[1].mlp.act_fn.output", "mlp_activation", "mlp.act_fn"),
        ("attention_output", "attention_output", "self_attn"),
    ],
)
def test_components_and_paths_to_modules(
    path: str, component: str, module: str, old_keys: bool, config: bool, tmp_path: Path
) -> None:
    """pyreft's own examples name modules by their path, which has the layer in it."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    saved = Saved("loreft", dim=48 if component == "mlp_activation" else 32)
    save_like_pyreft(tmp_path / "theirs", [(1, path, saved)], old_keys=old_keys, config=config)
    options: dict[str, Any] = {} if config else {"base": str(tmp_path / "base"), "layers": "1"}
    import_pyreft(tmp_path / "theirs", tmp_path / "ours", position="l2", **options)
    places = config_of(tmp_path / "ours")["interventions"]
    assert [(place["layer"], place["component"]) for place in places] == [(1, component)]
    edited = blocks_of(model)[1].get_submodule(module)
    expected = edited_logits(model, IDS, [(edited, (PROMPT - 2, PROMPT - 1), saved)])
    torch.testing.assert_close(logits_with(tmp_path / "ours", model), expected, rtol=0, atol=2e-6)


def test_the_input_of_a_block_is_edited_at_its_input(tmp_path: Path) -> None:
    save_like_pyreft(tmp_path / "theirs", [(1, "block_input", saved := Saved("loreft"))])
    import_pyreft(tmp_path / "theirs", tmp_path / "ours", position="l1")
    model = tiny_model()
    expected = edited_logits(model, IDS, [(blocks_of(model)[0], (PROMPT - 1,), saved)])
    torch.testing.assert_close(logits_with(tmp_path / "ours", model), expected, rtol=0, atol=2e-6)


def test_two_interventions_at_a_layer_are_those_of_first_and_last_tokens(tmp_path: Path) -> None:
    """pyreft's scripts list all layers for the first tokens, and then all of them for the last."""
    saved = [Saved("loreft") for _ in range(4)]
    places = [(layer, "block_output", it) for layer, it in zip((0, 2, 0, 2), saved, strict=True)]
    save_like_pyreft(tmp_path / "theirs", places)
    import_pyreft(tmp_path / "theirs", tmp_path / "ours", position="f2+l1")
    model = tiny_model()
    first, last = (0, 1), (PROMPT - 1,)
    edits = [
        (blocks_of(model)[layer], columns, it)
        for (layer, _, it), columns in zip(places, (first, first, last, last), strict=True)
    ]
    expected = edited_logits(model, IDS, edits)
    torch.testing.assert_close(logits_with(tmp_path / "ours", model), expected, rtol=0, atol=2e-6)


def test_positions_of_the_alpaca_script_are_one_token_earlier(tmp_path: Path) -> None:
    save_like_pyreft(tmp_path / "theirs", [(1, "block_output", saved := Saved("loreft"))])
    import_pyreft(tmp_path / "theirs", tmp_path / "ours", position="l1", positions_convention="pyreft-alpaca")
    model = tiny_model()
    expected = edited_logits(model, IDS, [(blocks_of(model)[1], (PROMPT - 2,), saved)])
    torch.testing.assert_close(logits_with(tmp_path / "ours", model), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_without_a_change(dtype: torch.dtype, tmp_path: Path) -> None:
    """bf16 is what pyreft trains its linear layers in by default."""
    saved = Saved("nodireft", dtype=dtype, bias=True)
    save_like_pyreft(tmp_path / "theirs", [(1, "block_output", saved)])
    import_pyreft(tmp_path / "theirs", tmp_path / "ours", position="l1")
    tensors = tensors_of(tmp_path / "ours")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert torch.equal(tensors["1.block_output.both.weight"].to(dtype), saved.learned_source.weight)
    assert sorted(name.rpartition(".")[2] for name in tensors) == ["bias", "projection", "weight"]


def test_a_checkpoint_of_the_trainer_asks_for_base_and_layers(tmp_path: Path) -> None:
    """It has no config.json, so pyreft itself cannot load it."""
    tiny_model().save_pretrained(tmp_path / "base")
    checkpoint = tmp_path / "out" / "checkpoint-78"
    places = [(layer, "block_output", Saved("loreft")) for layer in (0, 2)]
    save_like_pyreft(checkpoint / "intervenable_model", places, config=False)
    torch.save({}, checkpoint / "intervenable_model" / "pytorch_model.bin")  # nothing of the model trained
    target = tmp_path / "ours"
    with pytest.raises(ConfigError, match=r"no config.json.*--base MODEL --layers '8;19'"):
        import_pyreft(checkpoint, target, position="l1")
    options: dict[str, Any] = {"base": str(tmp_path / "base"), "position": "l1"}
    for layers in ("0;1", "all"):
        with pytest.raises(ConfigError, match=rf"--layers {layers}: the folder has interventions at 0;2"):
            import_pyreft(checkpoint, target, layers=layers, **options)
    with pytest.raises(CheckpointError, match="name one of its checkpoints: checkpoint-78"):
        import_pyreft(tmp_path / "out", target, **options)
    import_pyreft(checkpoint, target, layers="0;2", **options)
    assert config_of(target)["base_model_name_or_path"] == str(tmp_path / "base")
    assert config_of(target)["method"] == "loreft"


def test_without_a_config_the_kind_is_asked_for_only_where_tensors_do_not_tell(tmp_path: Path) -> None:
    """ConsReFT and LobiReFT save the same tensors, and so do NoReFT and NodiReFT."""
    tiny_model().save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"base": str(tmp_path / "base"), "layers": [1], "position": "l1"}
    for kind in KINDS:
        folder = save_like_pyreft(tmp_path / kind, [(1, "block_output", Saved(kind))], config=False)
        if kind in ("loreft", "direft"):
            import_pyreft(folder, tmp_path / f"{kind}-ours", **options)
        else:
            with pytest.raises(ConfigError, match=r"--kind: the tensors fit \w+ and \w+; name what was"):
                import_pyreft(folder, tmp_path / f"{kind}-ours", **options)
            import_pyreft(folder, tmp_path / f"{kind}-ours", kind=kind, **options)
        assert config_of(tmp_path / f"{kind}-ours")["method"] == kind
    with pytest.raises(ConfigError, match="--kind noreft: the folder holds loreft"):
        import_pyreft(tmp_path / "loreft", tmp_path / "no", kind="noreft", **options)


def test_the_adapter_must_fit_the_base_model_that_is_named(tmp_path: Path) -> None:
    tiny_model(hidden_size=64).save_pretrained(tmp_path / "wider")
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "shallow")
    save_like_pyreft(tmp_path / "theirs", [(1, "block_output", Saved("loreft"))])
    with pytest.raises(CheckpointError, match=r"rotation is \(32, 4\), expected \(64, 4\)"):
        import_pyreft(tmp_path / "theirs", tmp_path / "a", position="l1", base=str(tmp_path / "wider"))
    with pytest.raises(ModelError, match="layer 1 does not exist"):
        import_pyreft(tmp_path / "theirs", tmp_path / "a", position="l1", base=str(tmp_path / "shallow"))
    assert not (tmp_path / "a").exists()


class Mischief:
    """Would run code if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("unpickled"),))


def only_file(folder: Path) -> Path:
    return next(folder.glob("intkey_*.bin"))


def payload(folder: Path, **changes: Tensor | None) -> None:
    """Change tensors of the file, or take some out (None)."""
    state = torch.load(only_file(folder), weights_only=True)
    torch.save({k: v for k, v in {**state, **changes}.items() if v is not None}, only_file(folder))


def settings(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))


def field(name: int, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        fields: list[Any] = [1, "block_output", "pos", 1, 4, *[None] * 9]
        fields[name] = value
        settings(folder, representations=[fields])

    return change


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickled": (lambda f: only_file(f).write_bytes(pickle.dumps(Mischief(), protocol=2)), "is not unpickled"),
    "object": (lambda f: torch.save({"weight": Mischief()}, only_file(f)), "is not unpickled"),
    "list": (lambda f: torch.save([torch.zeros(2)], only_file(f)), "expected a state dict"),
    "truncated": (lambda f: only_file(f).write_bytes(only_file(f).read_bytes()[:700]), "no file of tensors"),
    "empty": (lambda f: only_file(f).write_bytes(b""), "no file of tensors"),
    "missing": (lambda f: only_file(f).rename(f / "intkey_x.bin"), "nunit_1#0.bin is missing"),
    "extra": (lambda f: shutil.copy(only_file(f), f / "intkey_x.bin"), "has intkey_x.bin, which its config"),
    "skewed": (lambda f: payload(f, rotate_layer=torch.rand(32, 4)), r"not orthonormal \(largest deviation"),
    "stretched": (lambda f: payload(f, rotate_layer=1.1 * torch.eye(32, 4)), r"largest deviation 2.1e-01"),
    "NaN": (lambda f: payload(f, bias=torch.full((4,), torch.nan)), "are NaN"),
    "fine": (lambda f: payload(f, bias=torch.full((4,), 0.1, dtype=torch.float64)), "too fine for fp32"),
    "integers": (lambda f: payload(f, bias=torch.zeros(4, dtype=torch.int64)), "expected floating-point"),
    "shape": (lambda f: payload(f, weight=torch.zeros(4, 31)), r"is \(4, 31\), expected \(4, 32\)"),
    "transposed": (lambda f: payload(f, rotate_layer=torch.eye(4, 32)), r"expected \(32, 4\)"),
    "width": (lambda f: payload(f, embed_dim=torch.tensor(31)), "embed_dim is 31"),
    "lacking": (lambda f: payload(f, bias=None), "those of loreft are rotate_layer, weight, bias"),
    "unknown tensor": (lambda f: payload(f, gate=torch.zeros(4)), "has the tensors bias, gate"),
    "JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
    "model's config": (lambda f: (f / "config.json").write_text('{"vocab_size": 3}'), "is not pyreft's"),
    "counts": (lambda f: settings(f, intervention_types=[]), "intervention_types has not 1 values"),
    "class": (lambda f: settings(f, intervention_types=["<class 'x.SubloreftIntervention'>"]), "is unknown"),
    "dimension": (lambda f: settings(f, intervention_dimensions=[64]), "intervention_dimensions 64"),
    "rank": (field(4, 8), "low_rank_dimension 8, its tensors 4"),
    "text": (lambda f: settings(f, representations=["RepresentationConfig(layer=1)"]), "no list of 2 to 14"),
    "unit": (field(2, "h"), "unit is 'h'"),
    "units": (field(3, 2), "max_number_of_units is 2"),
    "partition": (field(7, [[0, 2], [2, 4]]), "subspace_partition"),
    "link": (field(9, 0), "intervention_link_key is 0"),
    "latent": (field(13, 8), "latent_dim is 8"),
    "model weights": (
        lambda f: torch.save({"score.weight": torch.zeros(2)}, f / "pytorch_model.bin"),
        r"1 trained weights of the model itself \(score.weight\)",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_broken_is_refused_and_leaves_nothing(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_like_pyreft(tmp_path / "theirs", [(1, "block_output", Saved("loreft"))])
    damage, message = BROKEN[fault]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        import_pyreft(folder, tmp_path / "ours", position="l1")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_base_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = save_like_pyreft(tmp_path / "theirs", [(1, "block_output", Saved("direft"))])
    payload(folder, **{"rotate_layer.parametrizations.weight.0.base": torch.eye(31)})
    with pytest.raises(CheckpointError, match=r"shapes \(32, 4\), \(31, 31\)"):
        import_pyreft(folder, tmp_path / "ours", position="l1")


@pytest.mark.parametrize(
    ("component", "layer"),
    [
        ("head_attention_value_output", 1),
        ("model.layers[1].self_attn.q_proj.output", 0),
        ("model.norm.output", 0),
    ],
)
def test_components_without_a_counterpart_are_refused(component: str, layer: int, tmp_path: Path) -> None:
    folder = save_like_pyreft(tmp_path / "theirs", [(layer, component, Saved("loreft"))])
    with pytest.raises(CheckpointError, match="has no counterpart here; a layer is edited at block_output"):
        import_pyreft(folder, tmp_path / "ours", position="l1")


def test_interventions_that_are_not_first_and_last_are_refused(tmp_path: Path) -> None:
    two = [(1, "block_output", Saved("loreft")) for _ in range(2)]
    save_like_pyreft(tmp_path / "two", two)
    save_like_pyreft(tmp_path / "three", [*two, two[0]])
    with pytest.raises(CheckpointError, match=r"layer 1 has 2 interventions; .* --position is l2"):
        import_pyreft(tmp_path / "two", tmp_path / "ours", position="l2")
    with pytest.raises(CheckpointError, match="layer 1 has 3 interventions"):
        import_pyreft(tmp_path / "three", tmp_path / "ours", position="f1+l1")


def test_a_folder_of_several_classes_is_refused(tmp_path: Path) -> None:
    places = [(0, "block_output", Saved("loreft")), (1, "block_output", Saved("direft"))]
    save_like_pyreft(tmp_path / "theirs", places)
    with pytest.raises(CheckpointError, match="mixes direft, loreft"):
        import_pyreft(tmp_path / "theirs", tmp_path / "ours", position="l1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--position: pyreft does not store which tokens were edited"),
        ({"position": "x1"}, "--position: 'x1' is not a position"),
        (
            {"position": "l1", "activation": "softplus"},
            "--activation: 'softplus' is unknown; expected one of",
        ),
        ({"position": "l1", "positions_convention": "alpaca"}, "--positions-convention: 'alpaca' is unknown"),
        ({"position": "l1", "dropout": 1.5}, "--dropout: 1.5 is no share"),
        ({"position": "l1", "activation": "relu"}, "--activation: consreft has none"),
        ({"position": "l1", "layers": "8-"}, "--layers: '8-' is not a list of layers"),
    ],
)
def test_what_is_not_stored_is_asked_for_and_checked(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A guessed position would go unnoticed: the model answers anyway."""
    folder = save_like_pyreft(tmp_path / "theirs", [(1, "block_output", Saved("consreft"))])
    with pytest.raises(ConfigError, match=message):
        import_pyreft(folder, tmp_path / "ours", **options)
    assert not (tmp_path / "ours").exists()


def test_a_folder_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    folder = save_like_pyreft(tmp_path / "theirs", [(1, "block_output", Saved("loreft"))])
    with pytest.raises(LeantuneError, match="exists already"):
        import_pyreft(folder, folder, position="l1")


def test_the_class_may_come_from_a_module_of_the_user(tmp_path: Path) -> None:
    """Scripts that define the classes themselves save `__main__.LoreftIntervention`."""
    own = spelled("loreft").replace("pyreft.interventions", "__main__")
    folder = save_like_pyreft(
        tmp_path / "theirs", [(1, "block_output", Saved("loreft"))], intervention_types=[own]
    )
    import_pyreft(folder, tmp_path / "ours", position="l1", dropout=0.05)
    assert config_of(tmp_path / "ours")["dropout"] == 0.05
