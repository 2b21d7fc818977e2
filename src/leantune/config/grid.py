"""The one table of cells of method × base × strategy that are refused, and why.

A cell that is not listed works. Rules that depend on more than the three names live in
`checks.py`.
"""

from __future__ import annotations

REFT_METHODS = ("loreft", "noreft", "consreft", "lobireft", "direft", "nodireft")
METHODS = ("full", "lora", "dora", *REFT_METHODS, "llama_pro", "together")
BASES = ("dense", "nf4", "hqq")
STRATEGIES = ("single", "ddp", "fsdp")

_NO_GRADIENT = (
    "packed weights are whole numbers and have no gradient; train lora, dora, a ReFT method or "
    "llama_pro on them, or use base dense"
)
# (method, base, strategy) -> reason; "*" stands for every value of that axis.
REFUSED: dict[tuple[str, str, str], str] = {
    ("full", "nf4", "*"): _NO_GRADIENT,
    ("full", "hqq", "*"): _NO_GRADIENT,
}


def refusal(method: str, base: str, strategy: str) -> str | None:
    """The reason why this cell is refused, or None if it works."""
    for cell, reason in REFUSED.items():
        if all(a in ("*", b) for a, b in zip(cell, (method, base, strategy), strict=True)):
            return reason
    return None
