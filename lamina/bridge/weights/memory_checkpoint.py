"""A transformers model in memory, presented as the checkpoint that it would save; no tensor is copied to make it so.

transformers keeps some weights in memory in another form than in checkpoints (all experts of a layer in one tensor, for
example) and converts them when it saves. The same conversion is run here with one change: a slice stays a view. So
what was only renamed or cut shares its memory with the model.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from lamina.checkpoint.folder import plain_float
from lamina.checkpoint.source import Checkpoint
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.checkpoint.tokenizer import Tokenizer


class MemoryCheckpoint(Checkpoint):
    """The configuration and the weights of a transformers model, under the names that its checkpoints have."""

    def __init__(self, hf_model: PreTrainedModel) -> None:
        self.path = Path(hf_model.name_or_path or type(hf_model).__name__)
        self.config = config_of(hf_model)
        self.generation_config = generation_config_of(hf_model)
        weights = {name: tensor.detach() for name, tensor in hf_model.state_dict().items()}
        for name in hf_model._keys_to_ignore_on_save or ():
            weights.pop(name, None)
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
        self._weights = as_saved(hf_model, weights)
        self.aliases = second_names(self._weights)

    @property
    def names(self) -> Set[str]:
        return self._weights.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.read(name).shape)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._weights[name]

    def shares(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is stored in memory of the transformers model."""
        return tensor.untyped_storage().data_ptr() in self.storages

    def tokenizer(self) -> Tokenizer | None:
        return None


def as_saved(hf_model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under the names and in the shapes in which transformers saves them."""
    from transformers.core_model_loading import revert_weight_conversion

    with KeepViews(), torch.no_grad():
        return revert_weight_conversion(hf_model, weights)


class KeepViews(TorchFunctionMode):
    """While it is active, `tensor.contiguous()` returns the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def second_names(weights: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that exist under another name too: tied weights.

    >>> table = torch.zeros(3, 2)
    >>> second_names({"embedding": table, "norm": torch.ones(2), "head": table})
    ['embedding', 'head']
    """
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in weights.items():
        found.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), []).append(name)
    return [name for names in found.values() if len(names) > 1 for name in names]


def config_of(hf_model: PreTrainedModel) -> dict[str, Any]:
    """The contents of the config.json that the model would save."""
    values = json.loads(hf_model.config.to_json_string(use_diff=True), object_hook=plain_float)
    return values | {"dtype": str(hf_model.dtype).removeprefix("torch.")}


def generation_config_of(hf_model: PreTrainedModel) -> dict[str, Any]:
    """The contents of the generation_config.json that the model would save."""
    settings = getattr(hf_model, "generation_config", None)
    return {} if settings is None else json.loads(settings.to_json_string(), object_hook=plain_float)
