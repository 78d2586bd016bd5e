"""Fingerprints: a cheap test of whether a cache file was saved by this model.

A fingerprint has the family, the specs of each layer, the configuration (without settings that do not affect a cache),
the number of parameters, and 16 evenly spaced values of each parameter. It reads a few thousand values, however large
the model is. Two models with the same fingerprint could still differ, but not by training, merging or configuration,
which change some of the sampled values.

If the model is loaded in another dtype than it was saved in, sampled values may differ by rounding.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lamina.config import config_of
from lamina.weights.inventory import named_weights
from lamina.weights.packed import Packed

if TYPE_CHECKING:
    from lamina.model import Model

SAMPLE = 16  # values of each parameter
NEUTRAL = {
    "_name_or_path", "architectures", "attention_dropout", "attention_probs_dropout_prob", "attn_implementation",
    "auto_map", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id", "dropout",
    "dropout_rate", "dtype", "embedding_dropout", "eos_token_id", "hidden_dropout", "hidden_dropout_prob", "id2label",
    "initializer_factor", "initializer_range", "label2id", "max_length", "mlp_dropout", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "resid_pdrop", "return_dict", "router_aux_loss_coef",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Settings of a configuration that do not affect what a cache holds."""


@dataclass(frozen=True)
class Fingerprint:
    """Plain values only, so that it can be stored as JSON."""

    family: str
    vocab: int
    specs: list[dict[str, str]]
    config: dict[str, Any]
    parameters: int
    dtype: str
    sample: str  # [parameters, SAMPLE] float32, in base64

    @staticmethod
    def of(model: Model) -> Fingerprint:
        known = {name: value for name, value in config_of(model).values.items() if name not in NEUTRAL}
        sampled = [torch.zeros(0, SAMPLE), *(_sample(weight)[None] for _, weight in _weights(model))]
        return Fingerprint(
            type(model).__name__,
            model.vocab,
            [{name: describe(spec) for name, spec in entry.items()} for entry in model.specs],
            json.loads(json.dumps(known, default=str)),
            sum(weight.numel() for _, weight in _weights(model)),
            dtype_name(model.dtype),
            base64.b64encode(torch.cat([one.cpu() for one in sampled]).numpy().tobytes()).decode(),
        )

    def as_values(self) -> dict[str, Any]:
        return asdict(self)

    def difference(self, model: Model) -> str | None:
        """The first difference between the model with this fingerprint and `model`, in words; None if there is none.

        >>> Fingerprint.of(model).difference(other)                    # doctest: +SKIP
        'with 30 layers, this one has 32'
        """
        own = Fingerprint.of(model)
        if self.family != own.family:
            return f"of the family {self.family}, this one is of {own.family}"
        if len(self.specs) != len(own.specs):
            return f"with {len(self.specs)} layers, this one has {len(own.specs)}"
        if self.vocab != own.vocab:
            return f"with a vocabulary of {self.vocab}, this one's has {own.vocab}"
        for i, (entry, ours) in enumerate(zip(self.specs, own.specs, strict=True)):
            if entry != ours:
                return f"whose layer {i} remembers {_listed(entry)}, this one's {_listed(ours)}"
        for name in sorted(self.config.keys() | own.config.keys()):
            said, says = self.config.get(name), own.config.get(name)
            if said != says:
                return f"with {name}={said!r} in its configuration, this one has {says!r}"
        if self.parameters != own.parameters:
            return f"with {self.parameters:,} parameters, this one has {own.parameters:,}"
        for same, (name, _) in zip(self._same_values(own).tolist(), _weights(model), strict=True):
            if not same:
                return f"with other weights, of which {name} is the first that differs"
        return None

    def _same_values(self, own: Fingerprint) -> Tensor:
        """[parameters] True where the sampled values are equal, or within the rounding of the coarser dtype."""
        a, b = (torch.from_numpy(one._values()) for one in (self, own))
        if self.dtype == own.dtype:
            return (a.view(torch.int32) == b.view(torch.int32)).all(1)
        info = max((torch.finfo(getattr(torch, one.dtype)) for one in (self, own)), key=lambda info: info.eps)
        return ((a - b).abs() <= info.eps * torch.maximum(a.abs(), b.abs()) + info.smallest_normal).all(1)

    def _values(self) -> np.ndarray:
        """[parameters, SAMPLE]"""
        return np.frombuffer(base64.b64decode(self.sample), np.float32).reshape(-1, SAMPLE).copy()


def _sample(weight: Tensor | Packed) -> Tensor:
    """[SAMPLE] float32, evenly spaced from the first value to the last"""
    index = torch.linspace(0, weight.numel() - 1, SAMPLE, dtype=torch.float64).long()
    if isinstance(weight, Packed):  # the values that a plain model would have
        return weight.take(index).float()
    return weight.detach().take(index.to(weight.device)).float()


def _weights(model: Model) -> Iterator[tuple[str, Tensor | Packed]]:
    """Name and weight of each; of a model of transformers, its parameters."""
    return named_weights(model) if isinstance(model, nn.Module) else model.named_parameters()


def dtype_name(dtype: torch.dtype) -> str:
    """
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def describe(value: Any) -> str:
    """A spec and its fields as text that is the same in every process.

    >>> from lamina.cache.spec import Attention
    >>> describe(Attention(2, 8, 8))
    'Attention(kv_heads=2, key_dim=8, value_dim=8, window=Full())'
    """
    if is_dataclass(value):
        inside = ", ".join(f"{field.name}={describe(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inside})"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _listed(entry: dict[str, str]) -> str:
    return ", ".join(f"{name}: {spec}" for name, spec in entry.items()) or "nothing"
