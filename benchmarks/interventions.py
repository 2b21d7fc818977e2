"""The interventions of a large model alone, against the orthogonal parametrisation of torch.

    uv run python benchmarks/interventions.py              # about 3 minutes on a CPU, needs 6 GiB

LoReFT at 32 layers of a model with d = 4096, rank 8, tied, f7+l7 of 4 prompts: forward and backward of all
interventions from given hidden states. The other side computes the same formula with
`torch.nn.utils.parametrizations.orthogonal`, which keeps a d × d matrix for each of them. The sides
alternate, and the figure is the ratio of their median times; leantune's is given with the work that it has
once an optimizer step (tangent and orthonormalisation), and without. Bytes are counted, not sampled:
parameters, buffers, gradients and what autograd keeps for backward besides the hidden states, which are the
model's and equal on both sides.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from leantune.methods.interventions import Intervention
from leantune.ops.intervention import retract, tangent

from measure import table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.reference_reft import ReferenceLoreft

MIB = 2**20
Edit = Callable[[int, Tensor], Tensor]  # of a layer and its hidden states


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=4, help="each is edited at 14 positions")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def reference_of(mine: Sequence[Intervention]) -> list[ReferenceLoreft]:
    """The same with torch's parametrisation. Completing R to a d × d matrix takes seconds: done once, and the
    others get copies of that matrix."""
    first = ReferenceLoreft(mine[0].rotation, mine[0].weight, mine[0].bias)
    return [copy.deepcopy(first) for _ in mine]


def seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def forward(edit: Edit, hidden: Sequence[Tensor]) -> Tensor:
    """A scalar that depends on every edit."""
    return torch.stack([edit(layer, states).sum() for layer, states in enumerate(hidden)]).sum()


def held_bytes(modules: Sequence[nn.Module], edit: Edit, hidden: Sequence[Tensor]) -> dict[str, int]:
    """What a forward and backward pass holds: of the modules themselves, and saved for backward."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward(edit, hidden)
    loss.backward()
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    gradients = sum(p.grad.nbytes for m in modules for p in m.parameters() if p.grad is not None)
    given = {states.untyped_storage().data_ptr() for states in hidden}
    return {
        "parameters and buffers": sum(own.values()),
        "gradients": gradients,
        "saved for backward": sum(n for at, n in saved.items() if at not in own and at not in given),
    }


def step_work(modules: Sequence[Intervention]) -> None:
    """What `AttachedReft` does around an optimizer step."""
    rotations = [module.rotation for module in modules]
    frames = torch.stack([rotation.detach() for rotation in rotations])
    gradients = torch.stack([r.grad for r in rotations if r.grad is not None])
    moved = retract(frames, torch.stack([rotation.detach() for rotation in rotations]))
    for rotation, gradient, frame in zip(rotations, tangent(gradients, frames), moved, strict=True):
        rotation.grad = gradient
        rotation.detach().copy_(frame)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Alternate the sides and print a table; returns the ratios."""
    args = arguments().parse_args(argv)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    generator = torch.Generator().manual_seed(0)
    mine = [Intervention("loreft", args.dim, args.rank, generator).to(device) for _ in range(args.layers)]
    theirs = reference_of(mine)
    hidden = [
        torch.randn(14 * args.prompts, args.dim, generator=generator).to(device).requires_grad_()
        for _ in range(args.layers)
    ]

    def edit(layer: int, states: Tensor) -> Tensor:
        return states + mine[layer].delta(states, "linear", 0.0)

    def reference_edit(layer: int, states: Tensor) -> Tensor:
        theirs[layer].evaluated.clear()
        return theirs[layer](states)

    sides: dict[str, Callable[[], None]] = {
        "leantune": lambda: forward(edit, hidden).backward(),
        "once a step": lambda: step_work(mine),
        "torch": lambda: forward(reference_edit, hidden).backward(),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for warm in (edit, reference_edit):
        forward(warm, hidden[:2]).backward()
    forward(edit, hidden).backward()  # all have gradients for the work of a step
    for _ in range(args.rounds):
        for name, work in sides.items():
            times[name].append(seconds(work, device))
    for module in (*mine, *theirs):
        module.zero_grad(set_to_none=True)
    held = [held_bytes(mine, edit, hidden), held_bytes(theirs, reference_edit, hidden)]
    return report({name: statistics.median(values) for name, values in times.items()}, *held)


def report(times: dict[str, float], mine: dict[str, int], theirs: dict[str, int]) -> dict[str, float]:
    """Print times and bytes, and return their ratios."""
    alone, whole = times["leantune"], times["leantune"] + times["once a step"]
    rows = [
        {"": "forward and backward, ms", "leantune": 1e3 * alone, "torch": 1e3 * times["torch"]},
        {"": "with the work of a step, ms", "leantune": 1e3 * whole, "torch": 1e3 * times["torch"]},
        *({"": f"{key}, MiB", "leantune": mine[key] / MIB, "torch": theirs[key] / MIB} for key in mine),
    ]
    ratios = {
        "time": times["torch"] / alone,
        "time with step": times["torch"] / whole,
        "memory": sum(mine.values()) / sum(theirs.values()),
    }
    print(table(rows))
    print(
        f"\ntimes faster: {ratios['time']:.0f}, with the work of a step {ratios['time with step']:.0f} "
        "(goal: 20)"
    )
    print(f"memory: {100 * ratios['memory']:.2f} % (goal: below 1 %)")
    return ratios


if __name__ == "__main__":
    main()
