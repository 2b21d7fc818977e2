"""The benchmarks of the grid run, and their arithmetic is right: one that nobody runs rots unseen."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leantune.strategies.process import World
from tests.fixtures import tiny_model_folder

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def benchmark(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Random weights that can be packed; without a tokenizer."""
    cells = benchmark("cells")
    return cells.random_llama(tmp_path / "llama", cells.LLAMA_TINY, torch.float32, CPU)


WITHOUT = (
    "import runpy, sys; sys.modules |= dict.fromkeys(('pydantic', 'datasets', 'bitsandbytes')); "
    "sys.path.insert(0, {folder!r}); sys.argv = ['gpu_check.py', *{arguments!r}]; "
    "runpy.run_path({script!r}, run_name='__main__')"
)


def test_the_gpu_check_needs_neither_pydantic_nor_datasets(tmp_path: Path) -> None:
    """The machine that it is for has neither; an import of either would end the check at its start."""
    arguments = ["--device", "cpu", "--tiny", "--only", "lora", "--steps", "1"]
    code = WITHOUT.format(
        folder=str(BENCHMARKS), arguments=arguments, script=str(BENCHMARKS / "gpu_check.py")
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpu_check.md").read_text(encoding="utf-8")
    assert page.strip() == done.stdout.strip()
    for base in ("dense", "nf4", "hqq"):
        for strategy in ("single", "ddp", "fsdp"):
            rows = [line for line in page.splitlines() if line.startswith(f"| lora | {base} | {strategy} |")]
            assert len(rows) == 2  # its losses, and its speed
    assert "FAILED" not in page
    assert "not run" not in page


def test_the_gpu_check_lists_what_it_has_no_time_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell that did not fit must not look like one that does not exist."""
    assert (
        benchmark("gpu_check").main(["--device", "cpu", "--tiny", "--only", "loreft", "--minutes", "0"]) == 0
    )
    page = capsys.readouterr().out
    assert page.count("not run: no time left") == 18
    assert not torch.distributed.is_initialized()


def test_the_gpu_check_fails_where_losses_differ_or_a_cell_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0 must mean that everything ran and agreed."""
    module = benchmark("gpu_check")
    report = module.Report(None, [])
    assert "FAILED: ValueError: broken" in module.why_failed(ValueError("broken"), "nf4", "fsdp", report)
    assert report.failed

    curves = iter([[1.0, 1.0], [1.0, 1.001]])
    monkeypatch.setattr(module, "losses", lambda *_: next(curves))
    report = module.Report(None, [])
    setting = module.Setting(CPU, "", 256, 1, 8, 1)
    module.compare_losses([("lora", "dense", "ddp")], setting, module.Clock(float("inf")), report)
    assert "TOO MUCH" in report.text()
    assert report.failed


def test_old_torch_refuses_sharded_packed_weights_and_that_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = benchmark("gpu_check")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    report = module.Report(None, [])
    error = module.ModelError("packed weights cannot be sharded")
    assert module.why_failed(error, "nf4", "fsdp", report) == "refused (1)"
    assert not report.failed
    assert "(1) packed weights cannot be sharded" in report.text()
    module.why_failed(error, "dense", "fsdp", report)
    assert report.failed


def test_flops_are_six_a_weight_if_all_is_trained_and_four_if_frozen(llama: Path) -> None:
    """A formula that is off would flatter the MFU of a machine."""
    cells = benchmark("cells")
    shape = cells.LLAMA_TINY
    hidden, wide, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    in_blocks = layers * (2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * wide)
    head = hidden * shape["vocab_size"]
    batch = cells.random_batch(shape["vocab_size"], 3, 20, CPU)
    tokens, labels = 60, 30
    attention = layers * 3 * 2 * tokens * 20 * hidden
    world = World(0, 0, 1, CPU)

    def flops(method: str, base: str, **settings: Any) -> float:
        cell = cells.build_cell(method, base, "single", str(llama), world, settings=settings)
        return cells.flops_of_step(cell, batch)

    assert flops("full", "dense") == 6 * (in_blocks * tokens + head * labels) + attention
    frozen = 4 * (in_blocks * tokens + head * labels) + attention
    assert flops("lora", "dense", rank=2) == frozen
    assert flops("lora", "nf4", rank=2) == frozen
    upper = flops("lora", "dense", rank=2, layers="1")  # block 0 is passed forward alone
    assert upper == frozen - 2 * in_blocks * tokens / 2 - attention / 3


@pytest.mark.parametrize("base", ["dense", "nf4", "hqq"])
def test_a_cell_learns(llama: Path, base: str) -> None:
    """A step that changed nothing would be measured as a fast one."""
    cells = benchmark("cells")
    world = World(0, 0, 1, CPU)
    cell = cells.build_cell("lora", base, "single", str(llama), world, learning_rate=1e-2)
    batch = cells.random_batch(256, 2, 16, CPU)
    losses = [float(cell.step(batch, clip=1.0)) for _ in range(6)]
    assert losses[-1] < 0.97 * losses[0]


def test_the_ratio_of_packed_to_dense_speed_is_measured(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios = benchmark("grid_ratios").main(["--model", str(llama), "--only", "nf4", "--rounds", "1"])
    assert ratios.keys() == {"nf4"}
    assert 0.01 < ratios["nf4"] < 100
    assert capsys.readouterr().out.count("| 96 |") == 1


def test_the_memory_of_packed_weights_is_counted_to_the_byte(llama: Path, tmp_path: Path) -> None:
    """codes half a byte, scales 1/16 byte a weight; the embedding and the head stay dense."""
    module, cells = benchmark("grid_ratios"), benchmark("cells")
    found: dict[str, dict[str, float]] = {}
    for base in ("dense", "nf4"):
        result = tmp_path / f"{base}.json"
        options = ["--worker", "memory", "--cell", base, "fsdp", "--result", str(result)]
        module.main(["--model", str(llama), *options])
        found[base] = json.loads(result.read_text())
    shape = cells.LLAMA_TINY
    hidden, wide, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    packed = layers * (3 * hidden * hidden + 3 * hidden * wide)
    saved = (found["dense"][module.HELD] - found["nf4"][module.HELD]) * 2**20
    assert saved == pytest.approx(packed * (4 - 0.5 - 1 / 16), abs=1)
    assert found["nf4"][module.EMBEDDING] * 2**20 == pytest.approx(4 * hidden * shape["vocab_size"])


def test_speeds_of_both_strategies_are_measured_in_one_process_group(llama: Path, tmp_path: Path) -> None:
    result = tmp_path / "speed.json"
    options = ["--worker", "speed", "--rounds", "1", "--result", str(result)]
    benchmark("grid_ratios").main(["--model", str(llama), *options])
    seconds = json.loads(result.read_text())
    assert {name: len(values) for name, values in seconds.items()} == {"ddp": 4, "fsdp": 4}


def test_a_train_type_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model_folder(tmp_path / "model")
    options = ["--only", "custom_lora", "--strategies", "ddp", "--processes", "1", "--steps", "2"]
    benchmark("train_types").main(["--model", str(model), *options])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| custom_lora |"))
    assert row.startswith("| custom_lora | lora | dense | ddp | ")
    assert 4.0 < float(row.split("|")[5]) < 8.0  # the loss of a random model with 300 to 400 tokens


def test_the_page_of_train_types_says_which_curves_come_apart() -> None:
    module = benchmark("train_types")
    args = module.arguments().parse_args([])
    curve = [2.0 - step / 20 for step in range(20)]
    late = [*curve[:19], curve[19] * (1 + 5e-4)]
    runs = {
        ("full", "ddp"): module.Finished(curve, 10.0, 1.0),
        ("full", "fsdp"): module.Finished([loss * (1 + 5e-6) for loss in curve], 10.0, 1.0),
        ("custom_lora", "ddp"): module.Finished(curve, 10.0, 1.0),
        ("custom_lora", "fsdp"): module.Finished(late, 10.0, 1.0),
    }
    page = module.page(runs, args)
    assert "| full | full | dense | ddp | 2.0000 | 1.8000 | 1.5500 | 1.3000 | 1.0500 | 10 | 1.00 |" in page
    assert "| full | 5.0e-06 | 5.0e-06 | yes |" in page
    assert "| custom_lora | 0.0e+00 | 5.0e-04 | NO |" in page


def test_every_train_type_of_fsdp_qlora_is_there() -> None:
    """The table is to show all ten, on the preset that is known by that name."""
    module = benchmark("train_types")
    known = {preset.known_as for preset in module.PRESETS.values()} - {None}
    assert len(known) == 10
    for name in known:
        assert module.PRESETS[module.TYPES[name].preset].known_as == name


def test_live_tensors_are_counted_to_the_byte() -> None:
    """A count that misses a release or a view would compare the wrong thing."""
    with benchmark("cells").TensorBytes() as count:
        first = torch.zeros(1000)
        second = first.view(10, 100) + 1.0
        del first
        third = torch.empty(250, dtype=torch.uint8)
        assert (count.live, count.peak) == (4250, 8000)
        del second, third
    assert (count.live, count.peak) == (0, 8000)


def test_the_peaks_of_both_lora_modules_are_compared(llama: Path) -> None:
    module = benchmark("train_types")
    text = module.exact_peaks(module.arguments().parse_args(["--model", str(llama)]))
    ratios = [
        float(line.split("|")[5]) for line in text.splitlines() if line.startswith(("| fp32", "| bf16"))
    ]
    assert len(ratios) == 4
    assert all(0.5 < ratio < 1.2 for ratio in ratios)


def test_interventions_are_compared_with_the_orthogonal_parametrisation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At d = 64 its matrices are small; the bytes are known: 2·d·r + r floats, twice with gradients."""
    options = ["--device", "cpu", "--dim", "64", "--rank", "2", "--layers", "3", "--rounds", "1"]
    ratios = benchmark("interventions").main(options)
    assert 0.0 < ratios["memory"] < 0.5
    assert ratios["time with step"] < ratios["time"]
    own = 4 * 3 * (2 * 64 * 2 + 2) / 2**20
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| gradients"))
    assert float(row.split("|")[2]) == pytest.approx(own, rel=1e-2)


def test_learning_is_compared_with_the_reference_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model_folder(tmp_path / "model")
    options = ["--model", str(model), "--layers", "0;1", "--records", "8", "--seeds", "2", "--threads", "1"]
    found = benchmark("same_learning").main(options)
    assert max(found["first step"]) < 1e-5
    assert found["leantune"] == pytest.approx(found["reference"], abs=1e-2)
    assert "| leantune - reference |" in capsys.readouterr().out


def test_the_overhead_of_interventions_is_measured(tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model")
    options = ["--model", str(model), "--layers", "1", "--batches", "1", "--batch-size", "2", "--rounds", "1"]
    ratios = benchmark("loreft_overhead").main([*options, "--max-length", "128"])
    assert ratios.keys() == {"processor", "wall"}
    assert all(0.5 < ratio < 50 for ratio in ratios.values())
