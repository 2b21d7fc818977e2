"""What cannot be trained is refused before anything is written or removed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from leantune.checkpoint.lock import LOCK
from leantune.config import RunConfig, validate
from leantune.errors import CheckpointError, ConfigError, DataError, LeantuneError, ModelError
from leantune.methods import method_names
from leantune.models.source import load_config, resolve_model
from leantune.models.weights import WeightFiles
from leantune.train.prepare import prepare_run
from tests.fixtures import tiny_tokenizer
from tests.methods import NEEDED
from tests.models import ARCHITECTURES, save_tiny

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}{{ eos_token }}\n{% endfor %}"


@pytest.fixture(scope="module", params=["llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder; of Llama's kind, unless a test asks for another one."""
    folder = tmp_path_factory.mktemp("model") / request.param
    return save_tiny(folder, tiny_tokenizer(vocab_size=300), request.param)


def config(model: Path, place: Path, *, words: int = 3, **sections: Any) -> RunConfig:
    """A run on four records, the last of them with so many words in its answer."""
    records = [{"prompt": f"number {i}", "completion": "Paris"} for i in range(3)]
    records.append({"prompt": "number", "completion": "Paris " * words})
    (place / "r.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tree = {
        "model": str(model),
        "train": {"device": "cpu"},
        "output": {"dir": str(place / "run"), "overwrite": True},
        **sections,
        "data": {"train": str(place / "r.jsonl"), "cache": False, **sections.get("data", {})},
    }
    return validate(tree)


def silent(_line: str) -> None:
    pass


def prepared(model: Path, place: Path, **sections: Any) -> Path:
    folder = prepare_run(config(model, place, **sections), "run", silent)
    folder.lock.release()
    return folder.path


@pytest.mark.parametrize("model", ["llama", "gpt2"], indirect=True)
def test_records_longer_than_the_models_positions_are_refused(model: Path, tmp_path: Path) -> None:
    """GPT-2 ended in the first step with an index error; others trained on positions they never saw."""
    long = {"words": 400, "data": {"max_length": 257}}
    with pytest.raises(ConfigError, match=r"longest record has 257 tokens, but the model has 256 positions"):
        prepared(model, tmp_path, **long)
    assert not (tmp_path / "run").exists()
    prepared(model, tmp_path, words=400, data={"max_length": 256})
    prepared(model, tmp_path, data={"max_length": 4096})  # the records are short


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"method": {"name": "lora", "target_modules": ["q_porj"]}}, "did you mean 'q_proj'"),
        ({"method": {"name": "lora", "layers": "7"}}, "layer 7 does not exist"),
        ({"method": {"name": "loreft", "rank": 64}}, "method.rank: 64"),
        ({"method": {"name": "loreft"}, "data": {"format": "text", "columns": {"text": "prompt"}}}, "prompt"),
    ],
)
def test_a_method_that_does_not_fit_costs_no_older_run(
    sections: dict[str, Any], words: str, model: Path, tmp_path: Path
) -> None:
    """output.overwrite removed the old run first, and then both were lost."""
    run = prepared(model, tmp_path)
    (run / "result.json").write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(LeantuneError, match=words) as caught:
        prepared(model, tmp_path, **sections)
    assert not isinstance(caught.value, ConfigError | CheckpointError)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("model", list(ARCHITECTURES), indirect=True)
def test_every_architecture_is_checked_without_its_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be built without weights would silently be checked too late."""

    def read(*_args: Any, **_options: Any) -> None:
        raise AssertionError("values of weights were read")

    monkeypatch.setattr(WeightFiles, "whole", read)
    monkeypatch.setattr(WeightFiles, "rows", read)
    with pytest.raises(LeantuneError, match="nothing_like_it"):
        prepared(model, tmp_path, method={"name": "lora", "target_modules": ["nothing_like_it"]})
    for method in method_names():
        prepared(
            model,
            tmp_path,
            method={"name": method, **NEEDED.get(method, {})},
            train={"device": "cpu", "activation_checkpointing": True},
        )


@pytest.mark.parametrize("method", ["lora", "full", "llama_pro"])
@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (None, r"lacks 1 weights of LlamaForCausalLM: model\.norm\.weight"),
        (torch.ones(31), r"model\.norm\.weight is \(31,\) in the checkpoint"),
    ],
)
def test_a_broken_model_costs_no_older_run(
    method: str, weight: Tensor | None, words: str, model: Path, tmp_path: Path
) -> None:
    """It was found out when the weights were loaded, after the old run had been removed."""
    settings = {"name": method, **NEEDED.get(method, {})}
    run = prepared(model, tmp_path, method=settings)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = {**load_file(broken / "model.safetensors"), "model.norm.weight": weight}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=words):
        prepared(broken, tmp_path, method=settings)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_run_that_is_being_prepared_or_trained_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    """A second start with output.overwrite=true removed a run that was still training."""
    first = prepare_run(config(model, tmp_path), "run", silent)
    assert (first.path / LOCK).exists()
    before = first.config.read_bytes()
    with pytest.raises(CheckpointError, match="is in use by process"):
        prepared(model, tmp_path)
    assert first.config.read_bytes() == before
    first.lock.release()
    prepared(model, tmp_path)


def test_a_template_file_is_kept_with_the_run(model: Path, tmp_path: Path) -> None:
    """The run's prompts could not be rendered again once the user's file had moved or changed."""
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE)
    run = prepared(model, tmp_path, data={"template": str(file)})
    assert (run / "template.jinja").read_text() == TEMPLATE
    again = prepared(model, tmp_path)
    assert again == run
    assert not (again / "template.jinja").exists(), "another run's template is left behind"


def test_a_run_that_cannot_be_written_leaves_its_place_free(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk left a claimed and locked folder in the way of the next try."""
    from leantune.data.records import EncodedRecords

    def full(self: EncodedRecords, path: Path) -> None:
        raise DataError("no space left on the disk")

    monkeypatch.setattr(EncodedRecords, "save", full)
    with pytest.raises(DataError, match="no space"):
        prepared(model, tmp_path)
    monkeypatch.undo()
    assert not (tmp_path / "run").exists()
    prepared(model, tmp_path)


def test_the_check_is_cheap(model: Path, tmp_path: Path) -> None:
    """A check that loads weights would double the start of a large model; this one's file is all holes."""
    large = tmp_path / "large"
    shutil.copytree(model, large)
    settings = json.loads((large / "config.json").read_text())
    settings |= {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "head_dim": 128}
    (large / "config.json").write_text(json.dumps(settings))
    _write_holes(large / "model.safetensors", load_config(resolve_model(str(large))))
    began = time.monotonic()
    prepared(large, tmp_path, method={"name": "lora", "rank": 2, "target_modules": ["q_proj"]})
    assert time.monotonic() - began < 10


def _write_holes(path: Path, model_config: Any) -> None:
    """A safetensors file with all names and shapes of a model, and no values: it takes no room on disk."""
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in LlamaForCausalLM(model_config).state_dict().items()}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_an_optimizer_that_would_not_obey_is_refused_before_a_run_begins() -> None:
    """It was refused when the run had begun, and a run that `resume` could not continue was left."""
    from leantune.errors import ConfigError
    from leantune.train.optimizer import check_optimizer

    with pytest.raises(ConfigError, match="pages optimizer states between GPU and host memory"):
        check_optimizer("paged_adamw_8bit", {"cpu"})
    check_optimizer("adamw", {"cpu"})
