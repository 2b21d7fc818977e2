"""Sampling settings that cannot be obeyed are refused, all at once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from leantune.errors import ConfigError
from leantune.generate.draw import draw
from leantune.generate.sampling import Sampling


def test_every_bad_value_is_named_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(max_new_tokens=0, temperature=-1.0, top_p=1.5, top_k=-1, num_beams=0, repetition_penalty=0)
    named = [problem.split(":")[0] for problem in caught.value.problems]
    assert named == ["max_new_tokens", "temperature", "top_p", "top_k", "num_beams", "repetition_penalty"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("seed", -1),
        ("seed", "7"),
    ],
)
def test_a_bad_value_is_named_with_its_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        Sampling(**{"temperature": 0.5, field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}])
def test_a_setting_that_greedy_decoding_would_ignore_is_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="temperature 0"):
        Sampling(**setting)  # pyright: ignore[reportArgumentType]


def test_good_settings_are_kept_and_cannot_change() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, seed=1)
    assert sampling.samples
    assert not Sampling().samples
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.seed = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_a_temperature_that_would_overflow_is_refused_and_the_least_one_is_greedy() -> None:
    """Logits over 1e-60 are infinite, and one such request took its whole batch along."""
    with pytest.raises(
        ConfigError, match=r"temperature: 1e-60 is out of range; expected 0 \(greedy\), or 0.0001"
    ):
        Sampling(temperature=1e-60)
    logits = torch.tensor([3e4, -3e4, 1e4])
    assert draw(logits, Sampling(temperature=1e-4), torch.Generator().manual_seed(0)) == 0
