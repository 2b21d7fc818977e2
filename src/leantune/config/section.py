"""What every section of the schema is made of: the base class, and the types that several fields share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One section of the run: no unknown keys, no silent conversions, no changes after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False
    )


def named(value: Any) -> Any:
    """Let `method: lora` stand for `method: {name: lora}`."""
    return {"name": value} if isinstance(value, str) else value


# Other names of methods.
_ALIASES = {"direft-paper": "nodireft"}


def named_method(value: Any) -> Any:
    """As `named`; `lora+loreft` and a list of methods stand for `{name: together, parts: [...]}`."""
    if isinstance(value, str) and "+" in value:
        value = [name.strip() for name in value.split("+")]
    if isinstance(value, list | tuple):
        return {"name": "together", "parts": value}  # pyright: ignore[reportUnknownVariableType]
    value = named(value)
    if isinstance(value, dict) and value.get("name") in _ALIASES:  # pyright: ignore[reportUnknownMemberType]
        return {**value, "name": _ALIASES[value["name"]]}  # pyright: ignore[reportUnknownVariableType]
    return value  # pyright: ignore[reportUnknownVariableType]


def off_is_text(value: Any) -> Any:
    """YAML reads `off` as false; a choice that has the word off means the word."""
    return "off" if value is False else value


def as_tuple(value: Any) -> Any:
    """YAML has lists only; fields of a frozen section are tuples."""
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]


def as_layers(value: Any) -> Any:
    """Let `layers: 8` stand for `layers: [8]`."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else as_tuple(value)


Strings = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Layers = Annotated[
    str | tuple[int, ...], BeforeValidator(as_layers, json_schema_input_type=str | int | list[int])
]
Betas = Annotated[tuple[float, float], BeforeValidator(as_tuple)]
PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
