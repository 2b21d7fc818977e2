"""A model without its weights: parameters on the meta device, buffers real; and giving it memory.

Buffers (rotary tables, masks) are computed by the model's own code as it is built, so nothing has
to be rebuilt afterwards; parameters never exist until they get just the memory that this rank needs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from leantune.errors import ModelError
from leantune.models.source import ModelSource


def empty_model(
    source: ModelSource,
    config: Any,
    *,
    weights: torch.dtype,
    buffers: torch.dtype | None = None,
    attention: str = "auto",
) -> PreTrainedModel:
    """A frozen model of this configuration with parameters of dtype `weights` on the meta device.

    `buffers` is the dtype of those buffers for which the model asks for none itself (default: weights).
    Raises `ModelError` if transformers cannot build it.
    """
    options: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if attention != "auto":
        options["attn_implementation"] = attention
    loader: Any = AutoModelForCausalLM
    try:
        with _parameters_on_meta():
            model: PreTrainedModel = loader.from_config(
                copy.deepcopy(config), dtype=buffers or weights, **options
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(f"model.name: cannot build {source.name}: {error}") from error
    for parameter in model.parameters():
        parameter.data = parameter.data.to(weights)
    model.config.dtype = weights
    _take_generation_config(model, source)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device, sharded: torch.device | None = None) -> None:
    """Give every parameter that is on the meta device memory on `device`, and move the others there.

    A sharded parameter gets memory for this rank's rows, on the device `sharded` if that is another one.
    Tied parameters stay one. Values are whatever the memory holds; loading fills them.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = _with_memory(parameter, device, sharded or device)
            if made[id(parameter)] is not parameter:
                setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))


def _with_memory(parameter: nn.Parameter, device: torch.device, sharded: torch.device) -> nn.Parameter:
    if isinstance(parameter, DTensor):
        if parameter.device.type != "meta":
            return parameter  # FSDP2 has placed it
        data: Tensor = DTensor.from_local(
            torch.empty_like(parameter.to_local(), device=sharded),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(data, requires_grad=parameter.requires_grad)
    if parameter.device.type == "meta":
        return nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    parameter.data = parameter.data.to(device)
    return parameter


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that modules register in this context are moved to the meta device at once."""

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta":
            return None
        return nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        handle.remove()


def _take_generation_config(model: PreTrainedModel, source: ModelSource) -> None:
    """The end tokens and sampling defaults that come with the weights, where there are any."""
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            source.location, revision=source.revision or "main"
        )
    except (OSError, ValueError):
        return  # without a file, those that transformers derives from the configuration stay
