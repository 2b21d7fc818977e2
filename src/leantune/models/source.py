"""Where a model comes from: a local folder, a hub id, or the demo model; its tokenizer and config."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from leantune.errors import ModelError
from leantune.models.demo import DEMOS, demo_folder

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

# What the fingerprint is made of: a fixed list, since every version of transformers brings new keys.
_ARCHITECTURE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded. `location` is a folder or hub id; `name` is what the user wrote."""

    name: str
    location: str
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` of this source takes."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def resolve_model(name: str, revision: str | None = None, trust_remote_code: bool = False) -> ModelSource:
    """Find a model; raises `ModelError` for a path that does not exist, or a revision of a local model."""
    path = Path(name).expanduser()
    if revision is not None and (name in DEMOS or path.is_dir()):
        raise ModelError(
            f"model.revision: {revision!r}: {name} is a local model, and only hub models have revisions; "
            "remove the key"
        )
    if name in DEMOS:
        return ModelSource(name, str(demo_folder(name)))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model.name: {name} has no config.json; expected a Hugging Face model folder")
        return ModelSource(name, str(path), None, trust_remote_code)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model.name: {name} is not a model folder on this machine")
    return ModelSource(name, name, revision, trust_remote_code)


def load_config(source: ModelSource) -> Any:
    """The model's configuration; raises `ModelError` if it cannot be read or fetched."""
    try:
        return AutoConfig.from_pretrained(source.location, **source.options)
    except (OSError, ValueError) as error:
        raise ModelError(_unreadable(source, "config", error)) from error


def load_tokenizer(source: ModelSource, tokenizer: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model, or the one named; raises `ModelError` if there is none.

    Code that comes with a named tokenizer runs if the model's may.
    """
    where = replace(source, name=tokenizer, location=tokenizer, revision=None) if tokenizer else source
    try:
        return AutoTokenizer.from_pretrained(where.location, **where.options)
    except (OSError, ValueError) as error:
        raise ModelError(_unreadable(where, "tokenizer", error)) from error


def check_vocabulary(config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every token id must have an embedding row; raises `ModelError` naming the first that has none."""
    rows = int(config.get_text_config(decoder=True).vocab_size)
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= rows)
    if beyond:
        index, token = beyond[0]
        raise ModelError(
            f"model.tokenizer: token {token!r} has id {index}, but the model has {rows} embedding rows "
            f"(ids 0 to {rows - 1}); {len(beyond)} token(s) were added without rows. Use the model's own "
            "tokenizer, map the token to an existing one (for example pad_token = eos_token), or name it in "
            "model.add_tokens and train the embeddings"
        )


def fingerprint(config: Any) -> str:
    """A short hash of what makes the architecture: equal for copies of a model in other folders."""
    decoder = config.get_text_config(decoder=True)
    facts = {key: getattr(decoder, key, None) for key in _ARCHITECTURE_KEYS}
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unreadable(source: ModelSource, part: str, error: Exception) -> str:
    if Path(source.location).is_dir():
        return f"model.name: cannot read the {part} in {source.location}: {error}"
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"model.name: {source.name!r} is neither a local folder nor a model that the hub gave: {first_line} "
        "(offline? download it first and give its folder; `demo` needs no network)"
    )
