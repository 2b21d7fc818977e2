"""The verbs of the command line as typed functions, for notebooks and programs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from leantune.checkpoint.expand import expand_model
from leantune.checkpoint.merge import merge_run
from leantune.checkpoint.run_folder import CONFIG, RunFolder
from leantune.checkpoint.trained import Trained, is_trained, load_trained
from leantune.config import RunConfig, apply_overrides, apply_preset, load_config, validate
from leantune.config.resume import resumed_config
from leantune.errors import ConfigError
from leantune.evaluate.compare import Comparison
from leantune.evaluate.compare import compare as compare_answers
from leantune.evaluate.run import Evaluation, evaluate_model
from leantune.generate.decode import generate as decode
from leantune.generate.decode import stream as decode_stream
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
        batch_size: int = 16,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[str]:
        """Answers to user prompts, rendered with the template that the model was trained with."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        rendered = [self.trained.template.user_prompt(text) for text in texts]
        return self.complete(rendered, sampling, batch_size=batch_size, on_progress=on_progress)

    def complete(
        self,
        rendered: Sequence[str],
        sampling: Sampling | None = None,
        *,
        batch_size: int = 16,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[str]:
        """Continuations of prompts that are rendered already."""
        return decode(
            self.trained.model,
            self.trained.tokenizer,
            rendered,
            sampling or Sampling(),
            attached=self.trained.attached,
            stop_token_ids=self.trained.template.stop_token_ids,
            batch_size=batch_size,
            on_progress=on_progress,
        )

    def stream(self, prompt: str, sampling: Sampling | None = None) -> Iterator[str]:
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
    path: str | Path, prompts: str | Sequence[str], sampling: Sampling | None = None, **options: Any
) -> list[str]:
    """Load and answer; `options` are those of `load`."""
    return load(path, **options).generate(prompts, sampling)


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
) -> Comparison:
    """Answers of several models side by side.

    The word `base` stands for the model under the first run or adapter, which is asked with the same
    template, system message and tokenizer, so that training alone makes the difference.
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
        columns[name] = model.generate(prompts, sampling)
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
