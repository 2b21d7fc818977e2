"""How the next token is chosen, as plain validated values. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from leantune.errors import ConfigError

_COLDEST = 1e-4  # below it is greedy decoding with a risk of overflow


@dataclass(frozen=True)
class Sampling:
    """How an answer is decoded.

    temperature 0 is greedy (or plain beam search); top_p 1 and top_k 0 keep every token;
    repetition_penalty 1 is none. `seed` makes sampling repeatable for the same prompts and
    batch size. Raises `ConfigError` with every value that cannot be obeyed.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    num_beams: int = 1
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        problems = [*self._type_problems()] or [*self._range_problems()]
        if problems:
            raise ConfigError(problems)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.temperature > 0

    def _type_problems(self) -> list[str]:
        whole = {name: getattr(self, name) for name in ("max_new_tokens", "top_k", "num_beams")}
        if self.seed is not None:
            whole["seed"] = self.seed
        real = {name: getattr(self, name) for name in ("temperature", "top_p", "repetition_penalty")}
        problems = [
            f"{name}: {value!r} is not a whole number"
            for name, value in whole.items()
            if not isinstance(value, int) or isinstance(value, bool)
        ]
        problems += [
            f"{name}: {value!r} is not a number"
            for name, value in real.items()
            if not isinstance(value, int | float) or isinstance(value, bool)
        ]
        return problems

    def _range_problems(self) -> list[str]:
        checks = [
            (self.max_new_tokens >= 1, "max_new_tokens", "at least 1"),
            (
                self.temperature == 0 or _COLDEST <= self.temperature < float("inf"),
                "temperature",
                f"0 (greedy), or {_COLDEST} and more",
            ),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (1 keeps every token)"),
            (self.top_k >= 0, "top_k", "0 (keep every token) or more"),
            (self.num_beams >= 1, "num_beams", "at least 1"),
            (
                0 < self.repetition_penalty < float("inf"),
                "repetition_penalty",
                "a positive number (1 is none)",
            ),
            (self.seed is None or 0 <= self.seed < 2**63, "seed", "0 to 2^63 - 1"),
        ]
        problems = [
            f"{name}: {getattr(self, name)!r} is out of range; expected {expected}"
            for good, name, expected in checks
            if not good
        ]
        if self.temperature == 0:
            unused = [name for name, off in (("top_p", 1), ("top_k", 0)) if getattr(self, name) != off]
            problems += [
                f"{name}: {getattr(self, name)!r} does nothing at temperature 0 (greedy); "
                f"set a temperature above 0, or leave {name} out"
                for name in unused
            ]
        return problems
