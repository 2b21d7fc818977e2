"""What training leaves behind: an adapter folder or a whole model folder, re-read and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from leantune.checkpoint.atomic import write_folder
from leantune.checkpoint.compare import different_in_file, refuse_different, same_bits
from leantune.errors import CheckpointError
from leantune.methods import AdapterFiles, Attached, adapter_config_files, attach_saved, join
from leantune.methods.choice import AdapterSet
from leantune.methods.head import head_of
from leantune.models.shards import gather_rows, local_rows
from leantune.models.source import ModelSource, fingerprint, load_config, load_tokenizer
from leantune.models.vocabulary import Growth, embedding_rows
from leantune.models.weights import WeightFiles, WeightMap

FINGERPRINT = "base_fingerprint"
_STORAGE = "base_storage"  # the `base` section of the run, as JSON
_BASE_ROWS = "base_vocab_size"  # there if tokens were added: the rows that the base model's embeddings have


@dataclass(frozen=True)
class BaseOfModel:
    """What a whole model is saved with if memory holds it packed or sharded (see `bases.BuiltBase`)."""

    skeleton: Callable[[], PreTrainedModel]
    original: Callable[[str], Tensor]


def save_trained(
    attached: Attached,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    base_name: str,
    revision: str | None,
    *,
    base: BaseOfModel | None = None,
    growth: Growth | None = None,
    storage: Mapping[str, Any] | None = None,
    writes: bool = True,
) -> str:
    """Write what was trained, read it back, compare it bit for bit; returns the line that says so.

    An adapter goes into `folder` in its method's format; a method that trains whole weights
    writes a Hugging Face model folder with the tokenizer. With `growth` the tokenizer has added
    tokens, and goes along with an adapter too. `storage` is the `base` section of the run. Where tensors
    are sharded, every rank calls this and one of them `writes`. Raises `CheckpointError`, and keeps
    what was in `folder`, if the disk gives back something else than memory holds.
    """
    files = attached.adapter_files()
    model: Any = attached.model
    if not files:
        return save_model(model, tokenizer, folder, base=base, writes=writes)
    metadata = {"format": "pt", FINGERPRINT: fingerprint(model.config)}
    if storage is not None:
        metadata[_STORAGE] = json.dumps(storage)
    if growth is not None:
        metadata[_BASE_ROWS] = str(growth.before)
    named = {"base_model_name_or_path": base_name, "revision": revision}
    tensors = [gathered(one.tensors, writes) for one in files]
    if not writes:
        return ""
    return write_adapter(
        folder,
        [
            AdapterFiles(one.config_file, {**one.config, **named}, one.tensors_file, _unshared(whole))
            for one, whole in zip(files, tensors, strict=True)
        ],
        metadata,
        tokenizer if growth is not None else None,
    )


def write_adapter(
    folder: Path,
    files: Sequence[AdapterFiles],
    metadata: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> str:
    """Write the files of an adapter, read them back and compare; returns the line that says so."""

    def fill(target: Path) -> None:
        for one in files:
            (target / one.config_file).write_text(json.dumps(one.config, indent=2) + "\n")
            save_file(one.tensors, target / one.tensors_file, metadata=dict(metadata))
            refuse_different(folder, different_in_file(target / one.tensors_file, one.tensors))
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
            again = _saved_tokenizer(target, False)
            refuse_different(folder, [] if again.get_vocab() == tokenizer.get_vocab() else ["tokenizer"])

    write_folder(folder, fill)
    return _saved(folder, sum(len(one.tensors) for one in files))


def load_adapter(model: PreTrainedModel, folder: Path) -> Attached:
    """Attach the adapter in `folder` to its base model, with all of its parts.

    Raises `CheckpointError` if there is none, if it was trained on a model of another
    architecture, or if a tensor fits nothing in this model.
    """
    parts: list[Attached] = []
    for config_file in adapter_config_files():
        if not (folder / config_file).is_file():
            continue
        config = read_json(folder / config_file)
        _check_base(model, folder, config)
        attached = attach_saved(config_file, model, config)
        assert attached is not None
        files = attached.export()
        assert files is not None
        attached.load(read_tensors(folder / files.tensors_file)[0], str(folder))
        parts.append(attached)
    if not parts:
        raise CheckpointError(
            f"{folder} holds no adapter: expected one of {', '.join(adapter_config_files())}"
        )
    model.eval()  # the methods' own modules are new, and would drop out
    return join(parts)


def load_adapters(model: PreTrainedModel, folders: Mapping[str, Path]) -> AdapterSet:
    """Attach several adapters to one base model, to be chosen for each prompt by name.

    Raises `CheckpointError` for one that does not fit, or that trained the embeddings, which all share.
    """
    adapters = {name: load_adapter(model, folder) for name, folder in folders.items()}
    for name, adapter in adapters.items():
        if head_of(adapter) is not None:
            raise CheckpointError(
                f"{folders[name]} has a trained head, which adapters that are chosen for each prompt have no "
                "place for; use it alone"
            )
        if adapter.embeddings is not None:
            raise CheckpointError(
                f"{folders[name]} has trained embeddings, which all adapters of a model would share; "
                "use it alone"
            )
    return AdapterSet(model, adapters)


def saved_vocabulary(folder: Path, base: ModelSource) -> tuple[PreTrainedTokenizerBase, Growth] | None:
    """The tokenizer of an adapter whose training added tokens, and the rows they need; None if it added none.

    PEFT notes nothing about tokens: there it is an adapter with trained embeddings and a tokenizer.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return None
    noted = [_metadata(path).get(_BASE_ROWS) for path in sorted(folder.glob("*.safetensors"))]
    if any(noted):
        rows = int(next(filter(None, noted)))
    elif _config_of(folder).get("modules_to_save"):
        rows = embedding_rows(load_config(base))
    else:
        return None
    tokenizer = _saved_tokenizer(folder, base.trust_remote_code)
    return tokenizer, Growth(rows, max(rows, 1 + max(tokenizer.get_vocab().values())))


def saved_markers(folder: Path) -> tuple[str, str] | None:
    """The markers around the spans that an adapter edits; None if it does not go by markers."""
    files = [folder / name for name in adapter_config_files() if (folder / name).is_file()]
    noted = [read_json(path).get("markers") for path in files]
    return next((tuple(markers) for markers in noted if markers), None)


def saved_storage(folder: Path) -> dict[str, Any] | None:
    """The `base` section that an adapter was trained with; None if its files do not say."""
    noted = [_metadata(path).get(_STORAGE) for path in sorted(folder.glob("*.safetensors"))]
    text = next(filter(None, noted), None)
    return json.loads(text) if text else None


def _saved_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelSource(str(folder), str(folder), None, trust_remote_code))


def _config_of(folder: Path) -> dict[str, Any]:
    """The configuration of the adapter in a folder; empty if there is none."""
    present = [folder / name for name in adapter_config_files() if (folder / name).is_file()]
    return read_json(present[0]) if present else {}


def _check_base(model: PreTrainedModel, folder: Path, config: Mapping[str, Any]) -> None:
    """Before anything is attached: is this the kind of model that the tensors were trained on?"""
    for path in sorted(folder.glob("*.safetensors")):
        trained_on, mine = _metadata(path).get(FINGERPRINT), fingerprint(model.config)
        if trained_on not in (None, mine):
            raise CheckpointError(
                f"{folder} was trained on a model of another configuration "
                f"({config.get('base_model_name_or_path')}, fingerprint {trained_on}; this model's is "
                f"{mine}); load the model it was trained on"
            )


def is_adapter(folder: Path) -> bool:
    """Whether the folder looks like an adapter of a known method."""
    return any((folder / name).is_file() for name in adapter_config_files())


def adapter_base(folder: Path) -> tuple[str, str | None]:
    """The base model that an adapter names, and its revision."""
    for name in adapter_config_files():
        if (folder / name).is_file():
            config = read_json(folder / name)
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


def _metadata(path: Path) -> Mapping[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor under two names becomes two: in a file each name has its own data."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        separate[name] = tensor.clone() if id(tensor) in seen else tensor
        seen.add(id(tensor))
    return separate


def gathered(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU; a collective where they are sharded. Empty on ranks that do not `keep`.

    A tensor under two names stays one.
    """
    kept: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            whole = gather_rows(tensor, local_rows(tensor).local)
            made[id(tensor)] = whole.detach().cpu().contiguous() if keep else whole[:0]
        if keep:
            kept[name] = made[id(tensor)]
    return kept


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    base: BaseOfModel | None = None,
    writes: bool = True,
) -> str:
    """Write a whole model folder, read it back and compare; returns the line that says so.

    Packed layers are written as the checkpoint has them. Every rank calls this if the model is sharded.
    """
    dense = base.skeleton() if base else model
    names = list(dense.state_dict())
    here = model.state_dict(keep_vars=True)
    state = gathered({name: here[name] for name in names if name in here}, writes)
    if not writes:
        return ""
    if base is not None:
        state |= {name: base.original(name) for name in names if name not in here}
    dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    dense.config.dtype = max(dtypes, key=lambda dtype: dtype.itemsize)

    def fill(target: Path) -> None:
        dense.save_pretrained(target, state_dict=dict(state))
        tokenizer.save_pretrained(target)
        # Read by the model's names: transformers gives some tensors other names on disk.
        again = WeightMap(dense, WeightFiles(ModelSource(str(target), str(target))))
        held = {id(tensor): name for name, tensor in state.items() if name in again}
        different = [
            name
            for name, tensor in state.items()
            if id(tensor) not in held or not same_bits(tensor, again.whole(held[id(tensor)]))
        ]
        refuse_different(folder, different)

    write_folder(folder, fill)
    return _saved(folder, len(state))


def _saved(folder: Path, count: int) -> str:
    return f"saved {folder}: {count} tensors read back, equal to memory bit for bit"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `CheckpointError` if it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value
