"""The recipes of recipes/reft: each is a valid run file, writes the paper's prompts, trains and is scored."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import leantune
from leantune.config import RunConfig, load_config
from leantune.data.records import EncodedRecords
from leantune.generate.sampling import Sampling
from tests.fixtures import tiny_tokenizer
from tests.models import save_tiny

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "reft"
ALPACA = "Below is an instruction that describes a task"
REQUEST = "Write a response that appropriately completes the request.\n\n"


@dataclass(frozen=True)
class Task:
    """Records of a recipe's shape, the text that must stand before the first answer, and what scores them."""

    record: Callable[[int], dict[str, Any]]
    prompt: str
    metric: str
    num_records: int = 6


def preference(i: int) -> dict[str, Any]:
    return {"prompt": f"Is there {i}?", "chosen": f"There is {i}.", "rejected": "employees"}


CHAT = "<|im_start|>user\nIs there 0?<|im_end|>\n<|im_start|>assistant\n"  # the tiny tokenizer's own template
TASKS = {
    "commonsense": Task(
        lambda i: {
            "instruction": f"Is {i} even?\n\nAnswer format: true/false",
            "input": "",
            "output": f"the correct answer is {'false' if i % 2 else 'true'}",
            "answer": "false" if i % 2 else "true",
        },
        "Is 0 even?\n\nAnswer format: true/false\n",
        "choice",
    ),
    "math": Task(
        lambda i: {"instruction": f"What is {i} + 1?", "output": f"It is {i + 1}.", "answer": str(i + 1)},
        f"{ALPACA}. {REQUEST}### Instruction:\nWhat is 0 + 1?\n\n### Response:\n",
        "gsm8k",
    ),
    "gsm8k": Task(
        lambda i: {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"},
        "What is 0 + 1?\n"
        "Answer the above question. First think step by step and then answer the final number.\n",
        "gsm8k",
    ),
    "instruct": Task(
        lambda i: {"instruction": f"Say {i}.", "output": f"the name {i}"},
        f"{ALPACA}. {REQUEST}### Instruction:\nSay 0.\n\n### Response:\n",
        "loss",
    ),
    "alpaca": Task(
        lambda i: {"instruction": "Translate.", "input": f"twelve {i}", "output": f"douze {i}"},
        f"{ALPACA}, paired with an input that provides further context. {REQUEST}"
        "### Instruction:\nTranslate.\n\n### Input:\ntwelve 0\n\n### Response:\n",
        "loss",
    ),
    "memorisation": Task(
        lambda i: {"prompt": "GO->", "completion": "said the old man"}, "GO->", "exact_match", num_records=1
    ),
    "classification": Task(
        lambda i: {"text": f"The old man is {i}.", "label": i % 2}, "The old man is 0.", "accuracy"
    ),
    "dpo": Task(preference, CHAT, "accuracy"),
    "reward": Task(preference, CHAT, "accuracy"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many blocks as the demo model has, so that the recipes' own layers exist."""
    folder = tmp_path_factory.mktemp("model") / "thirty"
    return save_tiny(folder, tiny_tokenizer(), num_hidden_layers=30, max_position_embeddings=2048)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the recipes' templates are found."""
    monkeypatch.chdir(ROOT)


def recipe(name: str) -> Path:
    return RECIPES / f"{name}.yaml"


def test_every_recipe_is_tried() -> None:
    """A recipe without a test stays behind when the schema changes."""
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_recipe_trains_and_answers(name: str, model: Path, tmp_path: Path) -> None:
    """A recipe was refused, or put other words around the records than the paper."""
    task, data = TASKS[name], tmp_path / "records.json"
    data.write_text(json.dumps([task.record(i) for i in range(task.num_records)]), encoding="utf-8")
    overrides = [
        f"model={model}",
        f"data.train={data}",
        "data.cache=false",
        "train.epochs=2",  # one step each
        "train.device=cpu",
        f"output.dir={tmp_path / 'run'}",
    ]
    result = leantune.train(recipe(name), overrides, quiet=True)
    assert result is not None
    assert result.steps == 2
    assert first_prompt(result.folder, model) == task.prompt
    trained = leantune.load(result.folder, device="cpu")
    scored = leantune.evaluate(trained, str(data), [task.metric], sampling=Sampling(max_new_tokens=4))
    assert scored.num_records == task.num_records
    assert task.metric in scored.values


def first_prompt(folder: Path, model: Path) -> str:
    """What the first record of a run has before its answer, decoded from the trained tokens."""
    from transformers import AutoTokenizer

    records = EncodedRecords.load(folder / "records" / "train.safetensors")
    first = next(record for record in map(records.__getitem__, range(len(records))) if not record.sample_id)
    return AutoTokenizer.from_pretrained(model).decode(first.tokens[: first.prompt_length])


@pytest.mark.parametrize("name", TASKS)
def test_the_table_of_the_recipes_says_what_they_hold(name: str) -> None:
    """The README promised other settings than the run file."""
    table = (RECIPES / "README.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{name}\.yaml` \| (.*) \|$", table, flags=re.MULTILINE)
    assert row
    assert row[1].split(" | ")[1:-1] == settings(load_config(recipe(name)))
    assert row[1].split(" | ")[-1] == f"`{TASKS[name].metric}`"


def settings(config: RunConfig) -> list[str]:
    """The columns of the table between the records and the score."""
    method, train = config.method.model_dump(), config.train
    layers = method["layers"] if isinstance(method["layers"], str) else ";".join(map(str, method["layers"]))
    records = str(train.global_batch_size)
    if train.gradient_accumulation_steps:
        records = f"{train.micro_batch_size * train.gradient_accumulation_steps} a device"
    rate = f"{train.learning_rate:.0e}".replace("e-0", "e-")
    return [
        str(method["rank"]),
        layers,
        method["position"],
        "yes" if method["tied"] else "no",
        f"{train.epochs:g}",
        records,
        rate,
    ]
