"""Bodies of requests: obeyed or refused, never ignored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from leantune.errors import ConfigError
from leantune.generate.sampling import Sampling
from leantune.serve.errors import RequestError
from leantune.serve.schema import _NEUTRAL, ChatRequest, CompletionRequest

TURN = [{"role": "user", "content": "hello"}]


def chat(**keys: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": TURN, **keys})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("store", True),
        ("reasoning_effort", "low"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: Any) -> None:
    """An ignored parameter gives an answer that was not asked for."""
    with pytest.raises(RequestError, match=f"{key}: .* is not supported") as caught:
        chat(**{key: value})
    assert (caught.value.status, caught.value.param) == (400, key)


def test_what_asks_for_nothing_is_accepted() -> None:
    """Clients write out defaults."""
    neutral = {
        "n": 1,
        "presence_penalty": 0.0,
        "tools": [],
        "response_format": {"type": "text"},
        "store": False,
    }
    request = chat(**neutral, logit_bias=None, user="me", metadata={"a": "b"}, temperature=0, top_p=1.0)
    assert request.sampling(7) == Sampling(max_new_tokens=7)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temprature": 1}, "temprature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last turn is assistant's"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "mean the same"),
        ({"stream_options": {"include_usage": True}}, "goes with stream"),
        ({"stop": ["a", ""]}, "empty string"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "at most 4"),
        ({"strength": "much"}, "strength"),
        ({"generation": "sometimes"}, "generation"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        chat(**keys)


def test_the_values_of_sampling_are_checked_as_everywhere() -> None:
    with pytest.raises(ConfigError, match=r"top_p: 0\.5 does nothing at temperature 0"):
        chat(top_p=0.5).sampling(4)
    drawn = chat(temperature=0.7, top_p=0.5, top_k=9, seed=3).sampling(4)
    assert drawn == Sampling(4, temperature=0.7, top_p=0.5, top_k=9, seed=3)


def test_the_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    found = [message.as_message() for message in chat(messages=messages).messages]
    assert found == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}]


def test_how_long_an_answer_may_be_has_two_names() -> None:
    assert chat(max_tokens=5).asked_tokens == chat(max_completion_tokens=5).asked_tokens == 5
    assert chat().asked_tokens is None
    assert CompletionRequest(model="m", prompt="x", max_tokens=5).asked_tokens == 5


def test_the_page_names_what_is_refused_and_nothing_else() -> None:
    """A parameter that the page forgets would surprise whoever moves over."""
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    listed = page.split("never ignored: ")[1].split(". A key")[0]
    assert re.findall(r"`(\w+)`", listed) == list(_NEUTRAL)
    taken = {name for request in (ChatRequest, CompletionRequest) for name in request.model_fields}
    assert {
        name for name in taken if f"`{name}`" not in page and f"`{name}.include_usage`" not in page
    } == set()
