"""The verbs of the command line as typed functions, for notebooks and programs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from leantune.checkpoint.expand import expand_model
from leantune.checkpoint.export_pyreft import export_pyreft
from leantune.checkpoint.import_pyreft import import_pyreft as read_pyreft
from leantune.checkpoint.merge import merge_run
from leantune.checkpoint.run_folder import CONFIG, RunFolder
from leantune.checkpoint.trained import Trained, is_trained, load_trained
from leantune.config import RunConfig, apply_overrides, apply_preset, load_config, validate
from leantune.config.resume import resumed_config
from leantune.errors import ConfigError
from leantune.evaluate.compare import Comparison
from leantune.evaluate.compare import compare as compare_answers
from leantune.evaluate.heads import classify as class_of
from leantune.evaluate.heads import reward as reward_of
from leantune.evaluate.run import Evaluation, evaluate_model
from leantune.generate.decode import generate as decode
from leantune.generate.decode import stream as decode_stream
from leantune.generate.edits import AS_TRAINED, EditSettings
from leantune.generate.sampling import Sampling
from leantune.models.source import resolve_model
from leantune.train.events import Notify
from leantune.train.session import RunResult, resume_run, start_run

ConfigLike = RunConfig | Mapping[str, Any] | str | Path


class Model:
    """A loaded model with its adapter. `trained` gives access to the Hugging Face model and tokenizer."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.name = trained.name

    def generate(
        self,
        prompts: str | Sequence[str],
        sampling: Sampling | None = None,
        *,
        edits: EditSettings | Sequence[EditSettings] = AS_TRAINED,
        batch_size: int = 16,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[str]:
        """Answers to user prompts, rendered with the template that the model was trained with.

        `edits`: how the interventions of a ReFT adapter act, for all prompts or for each of them.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        rendered = [self.trained.template.user_prompt(text) for text in texts]
        return self.complete(rendered, sampling, edits=edits, batch_size=batch_size, on_progress=on_progress)

    def complete(
        self,
        rendered: Sequence[str],
        sampling: Sampling | None = None,
        *,
        edits: EditSettings | Sequence[EditSettings] = AS_TRAINED,
        batch_size: int = 16,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[str]:
        """Continuations of prompts that are rendered already; `edits` as in `generate`."""
        return decode(
            self.trained.model,
            self.trained.tokenizer,
            rendered,
            sampling or Sampling(),
            attached=self.trained.attached,
            stop_token_ids=self.trained.template.stop_token_ids,
            edits=edits,
            batch_size=batch_size,
            on_progress=on_progress,
        )

    def classify(self, texts: Sequence[str | tuple[str, str]], *, batch_size: int = 16) -> list[str]:
        """The class of each text, or pair of texts; for runs with objective classification."""
        return class_of(self.trained, texts, batch_size)

    def reward(self, prompts: Sequence[str], answers: Sequence[str], *, batch_size: int = 16) -> list[float]:
        """The reward of each answer to its prompt; for runs with objective reward."""
        return reward_of(self.trained, prompts, answers, batch_size)

    def stream(
        self, prompt: str, sampling: Sampling | None = None, *, edits: EditSettings = AS_TRAINED
    ) -> Iterator[str]:
        """The answer to one user prompt, piece by piece."""
        rendered = self.trained.template.user_prompt(prompt)
        parts = self.trained
        stops = parts.template.stop_token_ids
        return decode_stream(
            parts.model,
            parts.tokenizer,
            rendered,
            sampling or Sampling(),
            parts.attached,
            stop_token_ids=stops,
            edits=edits,
        )


def train(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
    name: str | None = None,
    notify: Notify | None = None,
    quiet: bool = False,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
) -> RunResult | None:
    """Train as a run file, a mapping of plain values, or a `RunConfig` says.

    `overrides` are `section.key=value` texts that win over a file or mapping; `preset` names a
    method and a base (such as qlora) that win over it too, but not over `overrides`. `notify` is
    called with each row of metrics, in this process, however many train. Returns None on machines
    other than the first. Raises `ConfigError` with every problem of the configuration, and
    SystemExit (130 or 143) if the run was interrupted.
    """
    if isinstance(config, str | Path):
        parsed = load_config(config, overrides, os.environ, preset)
        name = name or Path(config).stem
    elif isinstance(config, RunConfig):
        if overrides or preset:
            raise ConfigError("overrides and presets go with a run file; change the RunConfig itself instead")
        parsed = config
    else:
        tree = copy.deepcopy(dict(config))
        problems = apply_preset(tree, preset) + apply_overrides(tree, overrides)
        parsed = validate(tree, os.environ, problems=problems)
    node = {"node_rank": node_rank, "rdzv_endpoint": rdzv_endpoint}
    return start_run(parsed, name or preset or parsed.method.name, notify=notify, quiet=quiet, **node)


def resume(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    notify: Notify | None = None,
    quiet: bool = False,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
) -> RunResult | None:
    """Continue an interrupted run; `overrides` may change where it runs, not what it computes."""
    folder = RunFolder.open(run)
    config = resumed_config(folder.path / CONFIG, overrides, os.environ)
    node = {"node_rank": node_rank, "rdzv_endpoint": rdzv_endpoint}
    return resume_run(folder, config, notify=notify, quiet=quiet, **node)


def load(
    path: str | Path,
    *,
    base: str | None = None,
    device: str = "auto",
    template: str | None = None,
    system: str | None = None,
) -> Model:
    """Load a run folder, an adapter folder, a model folder, a hub id, or `demo` for use.

    Prompts are rendered with the run's template and system message, unless others are named.
    """
    return Model(load_trained(path, base, device, template, system))


def generate(
    path: str | Path,
    prompts: str | Sequence[str],
    sampling: Sampling | None = None,
    *,
    edits: EditSettings = AS_TRAINED,
    **options: Any,
) -> list[str]:
    """Load and answer; `edits` as in `Model.generate`, `options` are those of `load`."""
    return load(path, **options).generate(prompts, sampling, edits=edits)


def evaluate(
    path: str | Path | Model,
    data: str | None = None,
    metrics: Sequence[str] = (),
    **options: Any,
) -> Evaluation:
    """Score a model on records; see `leantune.evaluate.run.evaluate_model` for the options."""
    model = path if isinstance(path, Model) else load(path)
    return evaluate_model(model.trained, data, metrics, **options)


def compare(
    prompts: Sequence[str],
    models: Sequence[str | Path],
    sampling: Sampling | None = None,
    base: str | None = None,
    edits: EditSettings = AS_TRAINED,
) -> Comparison:
    """Answers of several models side by side.

    The word `base` stands for the model under the first run or adapter, which is asked with the same
    template, system message and tokenizer, so that training alone makes the difference. `edits`: how the
    interventions of the models beside it act.
    """
    named = [str(path) for path in models]
    if len(set(named)) != len(named):
        raise ConfigError(f"the same model is named twice: {', '.join(named)}")
    if base is not None and "base" not in named:
        raise ConfigError(f"base: {base}: none of the models is the word base; add it, or leave this out")
    columns: dict[str, list[str]] = {}
    metadata: dict[str, dict[str, str]] = {}
    for name in named:
        model = _base_of(named, base) if name == "base" else load(name)
        own = AS_TRAINED if name == "base" and len(named) > 1 else edits
        columns[name] = model.generate(prompts, sampling, edits=own)
        metadata[name] = _about(model.trained)
    return compare_answers(prompts, columns, metadata=metadata)


def merge(run: str | Path, target: str | Path, *, base: str | None = None) -> list[str]:
    """Write a run's or adapter's weights into a copy of its base model; returns lines of what was checked."""
    return merge_run(Path(run), Path(target), base)


def expand(model: str | Path, target: str | Path, *, blocks: int, revision: str | None = None) -> list[str]:
    """Write a copy of a model with new decoder blocks that add nothing yet; returns what was checked.

    Training them is Llama-Pro (arXiv 2401.02415). The copy is an ordinary Hugging Face folder.
    """
    return expand_model(resolve_model(str(model), revision), blocks, Path(target))


def import_pyreft(folder: str | Path, target: str | Path, **options: Any) -> list[str]:
    """Write what pyreft saved as an adapter folder; options: `leantune.checkpoint.import_pyreft`."""
    return read_pyreft(Path(folder), Path(target), **options)


def export(run: str | Path, target: str | Path, *, format: str = "pyreft") -> list[str]:
    """Write a run's or adapter's interventions in the files of another library; returns what was checked."""
    if format != "pyreft":
        raise ConfigError(f"format: {format!r} is unknown; expected pyreft")
    return export_pyreft(run, Path(target))


def _base_of(models: Sequence[str], base: str | None) -> Model:
    """The model under the first run or adapter, used as that is; or just the model `base`."""
    for name in models:
        if name != "base" and is_trained(name):
            return Model(load_trained(name, base, untouched=True))
    if base is not None:
        return load(base)
    raise ConfigError(
        "base: no run or adapter is named beside it, so there is no telling which model it is; "
        "use --base MODEL"
    )


def _about(trained: Trained) -> dict[str, str]:
    """What is worth knowing about a column: how it was trained, and how it was asked."""
    facts = {"template": trained.template.name}
    if trained.attached.name == "base":
        return facts
    adapter = sum(p.numel() for p in trained.attached.trainable().values())
    count = adapter or sum(p.numel() for p in trained.model.parameters())  # a whole model is loaded frozen
    return {"method": trained.attached.name, "trained parameters": f"{count:,}", **facts}
