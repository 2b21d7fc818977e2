"""What training leaves behind: an adapter folder or a whole model folder, re-read and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from leantune.checkpoint.atomic import write_folder
from leantune.errors import CheckpointError
from leantune.methods import Attached, attach_saved
from leantune.models.source import fingerprint

_FINGERPRINT = "base_fingerprint"


def save_trained(
    attached: Attached, folder: Path, tokenizer: PreTrainedTokenizerBase, base_name: str, revision: str | None
) -> str:
    """Write what was trained, read it back, compare it bit for bit; returns the line that says so.

    An adapter goes into `folder` in its method's format; a method that trains whole weights
    writes a Hugging Face model folder with the tokenizer. Raises `CheckpointError` if the
    disk gives back something else than memory holds.
    """
    files = attached.export()
    model: Any = attached.model
    if files is None:
        return save_model(model, tokenizer, folder)
    mark = fingerprint(model.config)
    config = {**files.config, "base_model_name_or_path": base_name, "revision": revision}
    if files.config_file != "adapter_config.json":  # PEFT's own file takes no keys of ours
        config[_FINGERPRINT] = mark
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in files.tensors.items()}

    def fill(target: Path) -> None:
        (target / files.config_file).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, target / files.tensors_file, metadata={"format": "pt", _FINGERPRINT: mark})

    write_folder(folder, fill)
    count = _compare(folder, tensors)
    return f"saved {folder}: {count} tensors read back, equal to memory bit for bit"


def load_adapter(model: PreTrainedModel, folder: Path) -> Attached:
    """Attach the adapter in `folder` to its base model.

    Raises `CheckpointError` if there is none, if it was trained on a model of another
    architecture, or if a tensor fits nothing in this model.
    """
    for config_path in sorted(folder.glob("*.json")):
        config = _read_json(config_path)
        attached = attach_saved(config_path.name, model, config)
        if attached is None:
            continue
        files = attached.export()
        assert files is not None
        tensors, metadata = read_tensors(folder / files.tensors_file)
        trained_on = metadata.get(_FINGERPRINT)
        if trained_on is not None and trained_on != fingerprint(model.config):
            raise CheckpointError(
                f"{folder} was trained on a model of another configuration "
                f"({config.get('base_model_name_or_path')}, fingerprint {trained_on}; this model's is "
                f"{fingerprint(model.config)}); load the model it was trained on"
            )
        attached.load(tensors, str(folder))
        return attached
    raise CheckpointError(
        f"{folder} holds no adapter: expected adapter_config.json (LoRA) or reft_config.json (ReFT)"
    )


def is_adapter(folder: Path) -> bool:
    """Whether the folder looks like an adapter of a known method."""
    return any((folder / name).is_file() for name in ("adapter_config.json", "reft_config.json"))


def adapter_base(folder: Path) -> tuple[str, str | None]:
    """The base model that an adapter names, and its revision."""
    for name in ("adapter_config.json", "reft_config.json"):
        if (folder / name).is_file():
            config = _read_json(folder / name)
            if config.get("base_model_name_or_path"):
                return str(config["base_model_name_or_path"]), config.get("revision")
    raise CheckpointError(f"{folder} does not say on which base model it was trained; name it with --base")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """All tensors of a safetensors file and its metadata; raises `CheckpointError` if it is broken."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Write a whole model folder, read it back and compare; returns the line that says so."""
    write_folder(folder, lambda target: _write_model(model, tokenizer, target))
    count = _compare(folder, dict(model.state_dict()), tied=True)
    return f"saved {folder}: {count} tensors read back, equal to memory bit for bit"


def _write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _compare(folder: Path, expected: Mapping[str, Tensor], tied: bool = False) -> int:
    """Compare a saved folder with memory; returns the number of tensors. Tied copies may be absent."""
    saved: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        saved.update(read_tensors(path)[0])
    storages = {expected[name].data_ptr() for name in saved if name in expected}
    for name, tensor in expected.items():
        if name not in saved:
            if tied and tensor.data_ptr() in storages:
                continue
            raise CheckpointError(f"{folder}: {name} was in memory but is not in the saved files")
        if saved[name].dtype != tensor.dtype or not torch.equal(saved[name], tensor.detach().cpu()):
            raise CheckpointError(f"{folder}: {name} differs from what was in memory; do not use this folder")
    return len(saved)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value

