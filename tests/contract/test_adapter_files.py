"""An adapter on disk that does not fit is refused by name, never half loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leantune.checkpoint.adapter import adapter_base, is_adapter, load_adapter, save_trained
from leantune.errors import CheckpointError, LeantuneError
from leantune.methods import adapter_config_files, method_names
from tests.batches import logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.methods import attached_to
from tests.models import tiny_model

# Methods that save an adapter; the others save a whole model.
METHODS = [name for name in method_names() if attached_to(name).export() is not None]
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


def saved(folder: Path, method: str, architecture: str = "llama", **settings: Any) -> Path:
    attached = attached_to(method, architecture, **settings)
    shake(attached)
    save_trained(attached, folder, tiny_tokenizer(vocab_size=300), "some/base", "v1")
    return folder


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> str:
    """Rewrite the tensors of an adapter; returns the name of the first one."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    first = sorted(tensors)[0]
    edit(tensors)
    save_file(tensors, path)
    return first


def refused(folder: Path, architecture: str = "llama", **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_adapter(tiny_model(architecture, **changes), folder)
    return str(caught.value)


@EVERY_METHOD
def test_a_missing_tensor_is_named(method: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", method)
    first = change(folder, lambda tensors: tensors.__delitem__(sorted(tensors)[0]))
    message = refused(folder)
    assert f"missing: {first} (1 in all)" in message
    assert str(folder) in message


@EVERY_METHOD
def test_a_tensor_that_matches_nothing_is_named(method: str, tmp_path: Path) -> None:
    """Case 5: such keys used to be skipped, and the adapter did nothing where they belonged."""
    folder = saved(tmp_path / "a", method)
    change(folder, lambda tensors: tensors.update({"model.layers.99.weight": torch.zeros(2)}))
    assert "matching nothing in the model: model.layers.99.weight (1 in all)" in refused(folder)


@EVERY_METHOD
def test_a_renamed_tensor_is_named_under_both_names(method: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", method)
    first = change(folder, lambda tensors: tensors.update({"other": tensors.pop(sorted(tensors)[0])}))
    message = refused(folder)
    assert f"missing: {first}" in message
    assert "matching nothing in the model: other" in message


@EVERY_METHOD
def test_a_tensor_of_another_shape_is_named_with_both_shapes(method: str, tmp_path: Path) -> None:
    """torch would broadcast a vector of one value without a word."""
    folder = saved(tmp_path / "a", method)
    first = change(folder, lambda tensors: tensors.update({sorted(tensors)[0]: torch.zeros(1)}))
    message = refused(folder)
    assert f"{first} is (1,), expected (" in message


@EVERY_METHOD
def test_another_configuration_of_the_model_is_refused(method: str, tmp_path: Path) -> None:
    """All shapes fit, but it is another model."""
    message = refused(saved(tmp_path / "a", method), vocab_size=400)
    assert "some/base" in message
    assert "another configuration" in message


@EVERY_METHOD
def test_another_architecture_is_refused_for_that_reason(method: str, tmp_path: Path) -> None:
    message = refused(saved(tmp_path / "a", method), "gpt2")
    assert "another configuration" in message
    assert "some/base" in message


@EVERY_METHOD
def test_a_model_with_fewer_layers_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(LeantuneError):
        load_adapter(tiny_model("llama", num_hidden_layers=2), saved(tmp_path / "a", method))


@EVERY_METHOD
def test_a_broken_file_is_refused(method: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", method)
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-7])
    assert f"{path} cannot be read as safetensors" in refused(folder)
    (config,) = folder.glob("*_config.json")
    config.write_text("{")
    assert f"{config} cannot be read as JSON" in refused(folder)


@EVERY_METHOD
def test_a_configuration_without_its_keys_is_refused(method: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", method)
    (path,) = folder.glob("*_config.json")
    config = json.loads(path.read_text())
    for key in [key for key in ("target_modules", "interventions") if key in config]:
        del config[key]
    path.write_text(json.dumps(config))
    assert "is missing" in refused(folder)


@EVERY_METHOD
def test_an_adapter_is_known_by_its_configuration_file(method: str) -> None:
    """A new method's adapters were none to `load`, because a list elsewhere lacked their file."""
    files = attached_to(method).export()
    assert files is not None
    assert files.config_file in adapter_config_files()


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    assert "holds no adapter" in refused(tmp_path)
    assert not is_adapter(tmp_path)


@EVERY_METHOD
def test_an_adapter_names_its_base(method: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", method)
    assert is_adapter(folder)
    assert adapter_base(folder) == ("some/base", "v1")


@EVERY_METHOD
def test_an_adapter_folder_holds_small_files_that_need_no_unpickling(method: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", method)
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("init_lora_weights", "pissa"),
        ("use_qalora", True),
        ("layers_pattern", ["h"]),
    ],
)
def test_peft_features_that_would_be_lost_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    """An adapter that is loaded without its other half gives other answers without a word."""
    folder = saved(tmp_path / "a", "lora")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert key in refused(folder)


def test_a_reft_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", "loreft")
    path = folder / "reft_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    assert "version 99 is not leantune-reft version 2" in refused(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reft_adapter_of_the_first_version_gives_what_it_gave(tied: bool, tmp_path: Path) -> None:
    """Its names had no component, and its configuration one position for all layers; it must not be lost."""
    settings = {"rank": 3, "layers": [0, 2], "position": "f2+l2", "tied": tied}
    attached = attached_to("loreft", **settings)
    shake(attached)
    folder = tmp_path / "a"
    save_trained(attached, folder, tiny_tokenizer(vocab_size=300), "some/base", "v1")
    path, file = folder / "reft_config.json", folder / "reft.safetensors"
    kept = ("format", "dropout", "activation", "dtype", "base_fingerprint", "hidden_size")
    now = json.loads(path.read_text())
    path.write_text(json.dumps({"format_version": 1, **{key: now[key] for key in kept}, **settings}))
    before = {name.replace(".block_output.", "."): value for name, value in load_file(file).items()}
    assert sorted(before)[0] == ("0.both.bias" if tied else "0.first.bias")
    save_file(before, file)
    loaded = load_adapter(tiny_model(), folder)
    batch = small_batch()
    assert torch.equal(logits_of(loaded, batch), logits_of(attached, batch))
    assert loaded.describe() == attached.describe()
    again = loaded.export()
    assert again is not None
    assert again.config["format_version"] == 2
    assert {name.split(".")[1] for name in again.tensors} == {"block_output"}


def test_a_reft_folder_of_an_unknown_method_or_half_a_place_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", "loreft")
    path = folder / "reft_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "method": "hireft"}))
    assert "method 'hireft' is unknown; expected one of loreft" in refused(folder)
    del config["interventions"][0]["component"]
    path.write_text(json.dumps(config))
    assert "lacks 'component'" in refused(folder)
