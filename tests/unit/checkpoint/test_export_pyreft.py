"""An adapter goes into pyreft's files and back without a change, or is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from leantune.checkpoint.adapter import load_adapter, read_tensors, save_trained
from leantune.checkpoint.compare import same_bits
from leantune.checkpoint.export_pyreft import export_pyreft
from leantune.checkpoint.import_pyreft import import_pyreft
from leantune.cli.main import main
from leantune.errors import CheckpointError
from leantune.ops.intervention import KINDS
from tests.batches import logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.methods import attached_to
from tests.models import tiny_model
from tests.pyreft_files import Saved, spelled

GROUPS = [
    {"layers": "0", "rank": 2},
    {"layers": "1", "rank": 4, "tied": False},
    {"layers": "2", "rank": 1, "component": "mlp_output"},
]


def adapter(folder: Path, method: str = "loreft", **settings: Any) -> Path:
    """An adapter folder that was trained on the tiny model."""
    attached = attached_to(method, **settings)
    shake(attached)
    save_trained(attached, folder, tiny_tokenizer(), "some/base", "main", storage={"name": "dense"})
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 4, "position": "f7+l7"},
        {"rank": 4, "layers": "0;2", "position": "f1+l1", "tied": False},
        {"rank": 4, "layers": "1", "position": "l1", "tied": False, "dropout": 0.1},
        {"interventions": GROUPS, "position": "f2+l3", "positions_convention": "pyreft-alpaca"},
    ],
)
@pytest.mark.parametrize("method", KINDS)
def test_the_way_there_and_back_changes_nothing(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Not a bit of a tensor, and nothing that pyreft itself does not store."""
    ours = adapter(tmp_path / "ours", method, **settings)
    export_pyreft(ours, tmp_path / "theirs")
    import_pyreft(tmp_path / "theirs", tmp_path / "again")
    before, metadata = read_tensors(ours / "reft.safetensors")
    after, noted = read_tensors(tmp_path / "again" / "reft.safetensors")
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    assert noted == metadata
    old, new = ((f / "reft_config.json").read_text() for f in (ours, tmp_path / "again"))
    assert json.loads(old) == json.loads(new)
    logits = [logits_of(load_adapter(tiny_model(), f), small_batch()) for f in (ours, tmp_path / "again")]
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], logits_of(attached_to("lora"), small_batch()))


def test_the_folder_has_the_structure_of_pyrefts(tmp_path: Path) -> None:
    """Untied: all layers for the first tokens, then all for the last; 14 values a representation."""
    ours = adapter(tmp_path / "ours", rank=4, layers="0;2", position="f1+l1", tied=False)
    lines = export_pyreft(ours, tmp_path / "theirs")
    keys = [f"layer_{layer}_comp_block_output_unit_pos_nunit_1#{n}" for n in (0, 1) for layer in (0, 2)]
    config = config_of(tmp_path / "theirs")
    assert config["sorted_keys"] == keys
    assert config["representations"] == [
        [layer, "block_output", "pos", 1, 4, *[None] * 9] for layer in (0, 2, 0, 2)
    ]
    assert config["intervention_types"] == [spelled("loreft")] * 4
    assert config["intervention_dimensions"] == [32] * 4
    assert config["intervention_constant_sources"] == [True] * 4
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert names == {"config.json", "manifest.json", *(f"intkey_{key}.bin" for key in keys)}
    assert lines[0] == f"4 interventions of {spelled('loreft')}, for position f1+l1"
    tensors, _ = read_tensors(ours / "reft.safetensors")
    last = torch.load(tmp_path / "theirs" / f"intkey_{keys[3]}.bin", weights_only=True)
    assert sorted(last) == ["bias", "rotate_layer", "weight"]
    assert torch.equal(last["rotate_layer"], tensors["2.block_output.last.rotation"])


@pytest.mark.parametrize("rank", [4, 32])
@pytest.mark.parametrize("method", [kind for kind in KINDS if kind != "loreft"])
def test_the_payload_loads_strictly_into_the_modules_of_the_class(
    method: str, rank: int, tmp_path: Path
) -> None:
    """Its buffers and the two tensors of the parametrisation were left out or named otherwise."""
    ours = adapter(tmp_path / "ours", method, rank=rank, layers="1", position="l1")
    export_pyreft(ours, tmp_path / "theirs")
    state = torch.load(next((tmp_path / "theirs").glob("intkey_*.bin")), weights_only=True)
    saved = Saved(method, rank=rank)
    saved.load_state_dict(state, strict=True)
    tensors, _ = read_tensors(ours / "reft.safetensors")
    factor = "projection" if method in ("noreft", "nodireft") else "rotation"
    layer = saved.proj_layer if factor == "projection" else saved.rotate_layer
    torch.testing.assert_close(layer.weight, tensors[f"1.block_output.both.{factor}"], rtol=0, atol=1e-7)


def test_a_projection_bias_goes_along(tmp_path: Path) -> None:
    ours = adapter(tmp_path / "ours", "noreft", rank=2, position="l1", projection_bias=True)
    export_pyreft(ours, tmp_path / "theirs")
    state = torch.load(next((tmp_path / "theirs").glob("intkey_*.bin")), weights_only=True)
    assert state["proj_layer.bias"].shape == (2,)
    import_pyreft(tmp_path / "theirs", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "reft_config.json").read_text())["projection_bias"] is True


def test_options_of_the_import_win_over_what_the_export_noted(tmp_path: Path) -> None:
    export_pyreft(adapter(tmp_path / "ours", rank=2, position="l2"), tmp_path / "theirs")
    import_pyreft(tmp_path / "theirs", tmp_path / "again", position="f3", activation="relu", dropout=0.2)
    config = json.loads((tmp_path / "again" / "reft_config.json").read_text())
    assert (config["activation"], config["dropout"]) == ("relu", 0.2)
    assert {place["position"] for place in config["interventions"]} == {"f3"}


def test_another_position_must_suit_the_interventions(tmp_path: Path) -> None:
    """Those of the first tokens would have been kept for a position that has none."""
    ours = adapter(tmp_path / "ours", rank=2, layers="1", position="f1+l1", tied=False)
    export_pyreft(ours, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"2 interventions; .* --position is l2"):
        import_pyreft(tmp_path / "theirs", tmp_path / "again", position="l2")


def test_a_note_that_does_not_belong_to_the_folder_is_refused(tmp_path: Path) -> None:
    export_pyreft(adapter(tmp_path / "ours", rank=2, layers="0;1", position="l2"), tmp_path / "theirs")
    config = config_of(tmp_path / "theirs")
    config["leantune"]["config"]["interventions"].pop()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has other places than its representations"):
        import_pyreft(tmp_path / "theirs", tmp_path / "again")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**config, "leantune": {"config": 1}}))
    with pytest.raises(CheckpointError, match="is not as an export writes it"):
        import_pyreft(tmp_path / "theirs", tmp_path / "again")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"position": "0;3"}, r"position \('0;3'|0;3"),
        ({"position": "all"}, "position all: it has"),
        ({"position": "markers"}, "position markers: it has"),
        (
            {"position": "f1", "interventions": [{"layers": "0"}, {"layers": "1", "position": "l1"}]},
            "position f1, l1: it has .* the same at all places",
        ),
        ({"position": "l1", "generation": "all"}, "generation: all"),
        ({"position": "l1", "subspaces": {"a": "0"}}, "subspaces: its classes"),
        ({"position": "l1", "train_embeddings": True}, "train_embeddings: trained embeddings are no inter"),
    ],
)
def test_what_pyreft_cannot_express_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """It would load, and edit something else."""
    ours = adapter(tmp_path / "ours", rank=2, **settings)
    with pytest.raises(CheckpointError, match=f"cannot be expressed in pyreft: .*{reason}"):
        export_pyreft(ours, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_adapters_of_other_methods_are_refused(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora", "lora", rank=2)
    with pytest.raises(CheckpointError, match="is no ReFT adapter"):
        export_pyreft(lora, tmp_path / "theirs")
    both = adapter(tmp_path / "both", rank=2, position="l1")
    for path in lora.glob("adapter_*"):
        path.rename(both / path.name)
    with pytest.raises(CheckpointError, match="they were trained together"):
        export_pyreft(both, tmp_path / "theirs")


def test_an_adapter_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    ours = adapter(tmp_path / "ours", rank=2, layers="0;1", position="l1")
    tensors, metadata = read_tensors(ours / "reft.safetensors")
    del tensors["1.block_output.both.bias"]
    save_file(tensors, ours / "reft.safetensors", metadata=dict(metadata))
    with pytest.raises(CheckpointError, match="those of loreft are rotate_layer, weight, bias"):
        export_pyreft(ours, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_adapters_of_the_first_format_are_exported_too(tmp_path: Path) -> None:
    """They name layers once, and tensors without a component."""
    ours = adapter(tmp_path / "ours", rank=2, layers="0;2", position="f1+l1", tied=False)
    tensors, metadata = read_tensors(ours / "reft.safetensors")
    older = {name.replace(".block_output", ""): tensor for name, tensor in tensors.items()}
    save_file(older, ours / "reft.safetensors", metadata=dict(metadata))
    config = {"format": "leantune-reft", "format_version": 1, "method": "loreft", "rank": 2, "layers": [0, 2]}
    config |= {"position": "f1+l1", "tied": False, "component": "block_output"}
    (ours / "reft_config.json").write_text(json.dumps(config))
    export_pyreft(ours, tmp_path / "theirs")
    import_pyreft(tmp_path / "theirs", tmp_path / "again")
    after, _ = read_tensors(tmp_path / "again" / "reft.safetensors")
    assert after.keys() == tensors.keys()
    assert all(same_bits(tensors[name], after[name]) for name in tensors)


def test_both_verbs_by_their_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    ours, theirs, again = (str(tmp_path / name) for name in ("ours", "theirs", "again"))
    adapter(tmp_path / "ours", rank=2, layers="0;2", position="f1+l1", tied=False)
    assert main(["export", ours, "--format", "pyreft", "--out", theirs]) == 0
    assert "equal to those of" in capsys.readouterr().out
    words = ["--base", str(tmp_path / "base"), "--layers", "0;2", "--kind", "loreft", "--activation", "relu"]
    assert main(["import-pyreft", theirs, "--out", again, *words, "--position", "f2+l2"]) == 0
    assert "loreft rank 2, position f2+l2" in capsys.readouterr().out
    assert main(["import-pyreft", theirs, "--out", again]) == 1
    assert "exists already" in capsys.readouterr().err
