"""YAML as people write it: numbers are numbers, keys stand once, errors know their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from leantune.config import load_config
from leantune.config.yaml import parse_yaml_value, read_yaml
from leantune.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("2.5e-5", 2.5e-5),
        ("-1e3", -1000.0),
        ("+1e3", 1000.0),
        (".5e-3", 0.5e-3),
        ("1.e-3", 1e-3),
        ("1.0e-4", 1e-4),
        ("3", 3),
        ("0.1", 0.1),
    ],
)
def test_every_spelling_of_a_number_is_a_number(text: str, value: float) -> None:
    """Case 19: PyYAML reads `learning_rate: 1e-4` as a string."""
    parsed = parse_yaml_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["1e-4x", "e-4", "1e", "8;19", "f7+l7", "8-9", "1e4-7b"])
def test_what_is_no_number_stays_text(text: str) -> None:
    assert parse_yaml_value(text) == text


def test_keys_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "# a comment\nmodel: m\ntrain:\n  optimizer: {name: sgd,\n    momentum: 0.9}\n  epochs: 2\n"
    )
    tree, lines = read_yaml(path)
    assert tree == {"model": "m", "train": {"optimizer": {"name": "sgd", "momentum": 0.9}, "epochs": 2}}
    assert lines == {
        "model": 2,
        "train": 3,
        "train.optimizer": 4,
        "train.optimizer.name": 4,
        "train.optimizer.momentum": 5,
        "train.epochs": 6,
    }


def test_a_key_that_stands_twice_is_an_error_with_both_lines(tmp_path: Path) -> None:
    """YAML readers keep the last one without a word."""
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ntrain:\n  epochs: 1\n  seed: 2\n  epochs: 3\nmodel: n\n")
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert caught.value.problems == [
        "train.epochs: stands twice, on line 3 and line 5; keep one",
        "model: stands twice, on line 1 and line 6; keep one",
    ]


def test_the_same_key_in_two_sections_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: m}\nmethod: {name: lora}\ndata: {train: x}\n")
    assert load_config(path).method.name == "lora"


def test_a_byte_order_mark_and_crlf_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: m\r\ndata:\r\n  train: x\r\ntrain:\r\n  learning_rate: 1e-4\r\n")
    config = load_config(path)
    assert (config.model.name, config.train.learning_rate) == ("m", 1e-4)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "must be a mapping of sections"),
        (b"- a\n- b\n", "must be a mapping of sections"),
        (b"model: [m\ndata: x\n", "is not valid YAML"),
        (b"model: \xff\xfe\n", "is not UTF-8 text"),
        (b"model: 2024-13-01\n", "is not valid YAML"),
        (b"model: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_run_says_what_it_is(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        read_yaml(path)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")
