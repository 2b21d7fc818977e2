"""The end-to-end tests use the server and the tiny model of the distributed ones."""

from tests.distributed.conftest import _nothing_is_left_running, model

__all__ = ["_nothing_is_left_running", "model"]
