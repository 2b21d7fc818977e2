"""The precisions: one table of words that the schema, the help and the document agree on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from leantune.config import validate
from leantune.config.describe import help_text
from leantune.config.precision import PRECISIONS, precision_table_markdown
from leantune.config.schema import TrainSection
from leantune.errors import ConfigError

DOCUMENT = Path(__file__).parents[3] / "docs" / "presets.md"


def test_the_table_and_the_schema_name_the_same_precisions() -> None:
    """A precision that may be set but is explained nowhere, or the other way round."""
    assert get_args(TrainSection.model_fields["precision"].annotation) == ("auto", *PRECISIONS)


@pytest.mark.parametrize("name", ["auto", *PRECISIONS])
def test_every_precision_goes_with_every_method(name: str) -> None:
    for method in ("full", "lora", "loreft"):
        tree = {"model": "m", "data": {"train": "x"}, "method": method, "train": {"precision": name}}
        assert validate(tree).train.precision == name


def test_another_precision_is_refused_with_a_suggestion() -> None:
    """By likeness alone, bf16 is nearer to fp16 than fp16_mixed is."""
    with pytest.raises(ConfigError, match=r"'fp16' is not one of .*; did you mean fp16_mixed\?"):
        validate({"model": "m", "data": {"train": "x"}, "train": {"precision": "fp16"}})


def test_mixed_precision_trains_in_fp32_and_only_that() -> None:
    trained = {name: row.trained for name, row in PRECISIONS.items()}
    assert trained == {
        "fp32": "fp32",
        "bf16": "bf16",
        "bf16_mixed": "fp32",
        "bf16_fp32_buffers": "bf16",
        "fp16_mixed": "fp32",
    }


def test_the_help_explains_each_precision_below_its_key() -> None:
    _, _, below = help_text().partition("  train.precision = auto\n")
    table, _, _ = below.partition("\n  train.device")
    for heading in ("frozen weights", "trained", "compute", "buffers"):
        assert heading in table
    for name, row in PRECISIONS.items():
        line = re.search(rf"^ +{name} +(.*)$", table, re.MULTILINE)
        assert line is not None, name
        assert re.split(r" {2,}", line[1]) == list(row)


def test_the_document_contains_the_table_as_it_is_generated() -> None:
    """A table written by hand would go on showing types that the code no longer uses."""
    assert precision_table_markdown() in DOCUMENT.read_text(encoding="utf-8")
