"""Names that people know for cells of the grid: a preset sets keys, and is never a path of its own."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """The keys that a name stands for. `known_as`: the train type of fsdp_qlora that is this cell."""

    method: str
    base: str
    implementation: str | None = None
    known_as: str | None = None

    def overrides(self) -> list[str]:
        """The preset as `section.key=value` texts."""
        own = [f"method.implementation={self.implementation}"] if self.implementation else []
        return [f"method.name={self.method}", *own, f"base.name={self.base}"]

    def describe(self) -> str:
        """The preset in words: `method lora, base nf4`."""
        own = " (implementation peft)" if self.implementation == "peft" else ""
        return f"method {self.method}{own}, base {self.base}"


PRESETS = {
    "full": Preset("full", "dense", known_as="full"),
    "lora": Preset("lora", "dense", "leantune", known_as="lora"),
    "custom_lora": Preset("lora", "dense", "leantune", known_as="custom_lora"),
    "peft_lora": Preset("lora", "dense", "peft", known_as="lora"),
    "qlora": Preset("lora", "nf4", "leantune", known_as="qlora"),
    "custom_qlora": Preset("lora", "nf4", "leantune", known_as="custom_qlora"),
    "peft_qlora": Preset("lora", "nf4", "peft", known_as="qlora"),
    "hqq_lora": Preset("lora", "hqq", "leantune", known_as="hqq_lora"),
    "qdora": Preset("dora", "nf4", known_as="bnb_dora"),
    "bnb_dora": Preset("dora", "nf4", known_as="bnb_dora"),
    "hqq_dora": Preset("dora", "hqq", known_as="hqq_dora"),
    "loreft": Preset("loreft", "dense"),
    "qreft": Preset("loreft", "nf4"),
    "hqq_reft": Preset("loreft", "hqq"),
    "llama_pro_nf4": Preset("llama_pro", "nf4", known_as="bnb_llama_pro"),
    "bnb_llama_pro": Preset("llama_pro", "nf4", known_as="bnb_llama_pro"),
    "llama_pro_hqq": Preset("llama_pro", "hqq", known_as="hqq_llama_pro"),
    "hqq_llama_pro": Preset("llama_pro", "hqq", known_as="hqq_llama_pro"),
}


def unknown_preset(name: str) -> str:
    """What is wrong with a name that is no preset."""
    close = difflib.get_close_matches(name, PRESETS, 1, 0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"preset: {name!r} is not one of {', '.join(PRESETS)}{hint}"


def preset_table_text() -> str:
    """One line for each preset, for a terminal."""
    width = max(map(len, PRESETS))
    return "\n".join(f"  {name.ljust(width)}  {preset.describe()}" for name, preset in PRESETS.items())


def preset_table_markdown() -> str:
    """The presets as a table for a document."""
    lines = ["| preset | method | base | train type of fsdp_qlora |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        own = ", `implementation: peft`" if preset.implementation == "peft" else ""
        known = f"`{preset.known_as}`" if preset.known_as else ""
        lines.append(f"| `{name}` | `{preset.method}`{own} | `{preset.base}` | {known} |")
    return "\n".join(lines)
