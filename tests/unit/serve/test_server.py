"""The address: told, checked before anything is loaded, and a warning if others can reach it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from leantune.cli.main import main
from leantune.errors import ConfigError
from leantune.serve.engine import Limits
from leantune.serve.server import announcement, is_loopback, listen


def test_a_missing_package_is_named_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    assert main(["serve", "no/such/run"]) == 2
    assert "serve needs uvicorn: install leantune[serve]" in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error_of_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    """It used to take the time of loading a model to find out."""
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "no/such/run", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_only_a_loopback_address_goes_without_a_warning() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "192.168.0.7", "example", "::"))
    with listen("127.0.0.1", 0) as listener:
        assert len(announcement(listener, "127.0.0.1", ["a"])) == 2
        (models, address, warning) = announcement(listener, "0.0.0.0", ["a", "base"])
        assert models == "models: a, base"
        assert f":{listener.getsockname()[1]}/v1" in address
        assert "warning: 0.0.0.0 can be reached from other machines" in warning


def test_limits_that_cannot_be_are_listed_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Limits(max_batch=0, max_wait_ms=-1)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["max_batch", "max_wait_ms"]
    with pytest.raises(ConfigError, match="max_wait_ms: inf"):
        Limits(max_wait_ms=float("inf"))
