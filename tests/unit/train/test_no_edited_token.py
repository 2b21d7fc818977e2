"""Batches, and whole data sets, in which there is nothing to edit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from leantune.errors import DataError
from leantune.methods import attach
from leantune.train.assemble import check_positions
from tests.batches import PROMPT_LENGTHS, gradients, small_batch
from tests.methods import attached_to
from tests.models import tiny_model


@pytest.mark.parametrize("settings", [{"position": "l1"}, {"position": "all", "component": "mlp_output"}])
def test_a_batch_without_an_edited_token_goes_backward_with_gradients_of_zero(
    settings: dict[str, str],
) -> None:
    """Its loss depended on nothing, and the whole run ended with torch's complaint."""
    attached = attached_to("loreft", **settings)
    lengths = torch.zeros(len(PROMPT_LENGTHS), dtype=torch.int64)
    found = gradients(attached, dataclasses.replace(small_batch(), prompt_lengths=lengths))
    own = {name: found[name] for name in attached.trainable()}
    assert all(gradient is not None and not gradient.any() for gradient in own.values())


def test_records_that_a_position_does_not_fit_are_counted_or_refused() -> None:
    from leantune.data.encode import random_records

    records = random_records(4, 16, list(range(3, 50)), seed=0)
    short = dataclasses.replace(records, prompt_lengths=np.array([1, 1, 6, 6]))
    ends, single = (
        attach("loreft", tiny_model(), {"position": position}, seed=0) for position in ("f2+l2", "0;5")
    )
    line = check_positions(ends, short)
    assert line == "2 of 4 records have no prompt token at method.position"
    assert check_positions(single, short) is None
    far = attach("loreft", tiny_model(), {"position": [90]}, seed=0)
    with pytest.raises(DataError, match="not in the prompts, of 1 to 6 tokens"):
        check_positions(far, short)
