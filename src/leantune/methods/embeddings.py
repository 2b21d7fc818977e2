"""Training the embeddings along with an adapter: the one part of it that changes weights of the model itself.

The input embedding and the output head are trained whole, in place; where the head is tied to the
embedding, they are one weight and stay one. They are saved with the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leantune.errors import CheckpointError, ModelError
from leantune.models.vocabulary import last_names, vocabulary_modules, vocabulary_names


class TrainedEmbeddings:
    """The input embedding and output head of a frozen model, made trainable in fp32.

    Hidden states keep the dtype that they have with frozen embeddings. Raises `ModelError` for a head
    that is tied and has parameters of its own besides.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._embedding, self._head = vocabulary_modules(model)
        self._embedding_name, self._head_name = vocabulary_names(model)
        weight = self._embedding.weight
        assert isinstance(weight, nn.Parameter)
        self._stored = weight.dtype
        self.tied = self._head.weight is weight
        extra = [name for name, p in self._head.named_parameters() if p is not weight]
        if self.tied and extra:
            raise ModelError(
                f"method.train_embeddings: the output head of {type(model).__name__} is tied to the "
                f"embeddings and has a {extra[0]} of its own, which adapter files have no place for; use "
                "method full"
            )
        for parameter in self.parameters().values():
            parameter.data = parameter.data.float()
        self.require_gradients()
        self._embedding.register_forward_hook(self._to_stored)
        self._head.register_forward_pre_hook(self._to_trained)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by their full names; a tied one under both."""
        modules = {self._embedding_name: self._embedding, self._head_name: self._head}
        return {
            f"{name}.{key}": parameter
            for name, module in modules.items()
            for key, parameter in module.named_parameters(recurse=False)
        }

    def require_gradients(self) -> None:
        """Make the parameters trainable."""
        for parameter in self.parameters().values():
            parameter.requires_grad_(True)

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """The parameters' own storage by prefix and full name; a tied one is one tensor under both names."""
        detached: dict[int, Tensor] = {}
        named = self.parameters()
        return {f"{prefix}{n}": detached.setdefault(id(p), p.detach()) for n, p in named.items()}

    def peft_config(self) -> dict[str, Any]:
        """What a PEFT configuration says of them."""
        config: dict[str, Any] = {"modules_to_save": last_names(self._model, vocabulary_names(self._model))}
        return {**config, "ensure_weight_tying": True} if self.tied else config

    def check_peft(self, saved: Sequence[str]) -> None:
        """Raise `CheckpointError` if the `modules_to_save` of a PEFT configuration are other modules."""
        mine = (self._embedding_name, self._head_name)
        meant = [next((name for name in mine if f".{name}".endswith(f".{s}")), None) for s in saved]
        needed = {self._embedding_name} if self.tied else set(mine)
        if None in meant or not needed <= set(meant):
            raise CheckpointError(
                f"adapter_config.json: modules_to_save = {list(saved)} is not supported here; expected "
                f"{' and '.join(mine)}, which are trained together; load it with PEFT"
            )

    def describe(self) -> str:
        """A line about what is trained, and whether the head is tied."""
        rows, dim = (int(size) for size in self.parameters()[f"{self._embedding_name}.weight"].shape)
        line = f"embeddings trained: {self._embedding_name}, {rows} × {dim}"
        if self.tied:
            return f"{line}; the output head {self._head_name} is tied to it and stays so"
        return f"{line}, and the output head {self._head_name}, which is not tied to it"

    def _to_stored(self, _module: nn.Module, _args: tuple[Any, ...], out: Tensor) -> Tensor:
        return out.to(self._stored)

    def _to_trained(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Without autocast nobody else brings hidden states to the precision of the trained head."""
        hidden: Tensor = args[0]
        if torch.is_autocast_enabled(hidden.device.type):
            return None
        weight = self._head.weight
        assert isinstance(weight, Tensor)
        return (hidden.to(weight.dtype), *args[1:])
