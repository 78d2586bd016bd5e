"""What tells one model from another, cheaply: is this the model that a cache was made by?

A fingerprint is the family, what each layer remembers, the configuration (but for what changes no number), how many
parameters there are, and a few numbers of each of them, evenly spread. Reading it costs a few thousand numbers, however
large the model is. Two models with the same fingerprint could still differ, but not by training, merging or another
configuration: those touch some of the numbers looked at.

A model may be loaded in another dtype than it was saved in: then numbers need only be as near as rounding explains.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lamina.config import config_of

if TYPE_CHECKING:
    from lamina.model import Model

SAMPLE = 16  # numbers looked at in each parameter
NEUTRAL = {
    "_name_or_path", "architectures", "attention_dropout", "attention_probs_dropout_prob", "attn_implementation",
    "auto_map", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id", "dropout",
    "dropout_rate", "dtype", "embedding_dropout", "eos_token_id", "hidden_dropout", "hidden_dropout_prob", "id2label",
    "initializer_factor", "initializer_range", "label2id", "max_length", "mlp_dropout", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "resid_pdrop", "return_dict", "router_aux_loss_coef",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""What a configuration says that changes no number a cache holds."""


@dataclass(frozen=True)
class Fingerprint:
    """Plain values only, so that it can be written down as JSON."""

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
        taken = [_spread(parameter) for parameter in model.parameters()]
        return Fingerprint(
            type(model).__name__,
            model.vocab,
            [{name: described(spec) for name, spec in entry.items()} for entry in model.specs],
            json.loads(json.dumps(known, default=str)),
            sum(parameter.numel() for parameter in model.parameters()),
            dtype_name(model.dtype),
            base64.b64encode(torch.stack(taken).cpu().numpy().tobytes()).decode(),
        )

    def as_values(self) -> dict[str, Any]:
        return asdict(self)

    def difference(self, model: Model) -> str | None:
        """The first thing in which the model with this fingerprint differs from `model`, in words; None: nothing.

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
        near = self._near(own)
        for same, (name, _) in zip(near.tolist(), model.named_parameters(), strict=True):
            if not same:
                return f"with other weights, of which {name} is the first that differs"
        return None

    def _near(self, own: Fingerprint) -> Tensor:
        """[parameters] whether the numbers looked at are the same, or as near as the coarser dtype rounds."""
        a, b = (torch.from_numpy(one._numbers()) for one in (self, own))
        if self.dtype == own.dtype:
            return (a.view(torch.int32) == b.view(torch.int32)).all(1)
        info = max((torch.finfo(getattr(torch, one.dtype)) for one in (self, own)), key=lambda info: info.eps)
        return ((a - b).abs() <= info.eps * torch.maximum(a.abs(), b.abs()) + info.smallest_normal).all(1)

    def _numbers(self) -> np.ndarray:
        return np.frombuffer(base64.b64decode(self.sample), np.float32).reshape(-1, SAMPLE).copy()


def _spread(parameter: Tensor) -> Tensor:
    """[SAMPLE] float32, evenly spread from the first number to the last"""
    index = torch.linspace(0, parameter.numel() - 1, SAMPLE, dtype=torch.float64).long()
    return parameter.detach().take(index.to(parameter.device)).float()


def dtype_name(dtype: torch.dtype) -> str:
    """
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def described(value: Any) -> str:
    """A spec, and what is in it, the same in every process.

    >>> from lamina.cache.spec import Attention
    >>> described(Attention(2, 8, 8))
    'Attention(kv_heads=2, key_dim=8, value_dim=8, window=Full())'
    """
    if is_dataclass(value):
        inside = ", ".join(f"{field.name}={described(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inside})"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _listed(entry: dict[str, str]) -> str:
    return ", ".join(f"{name}: {spec}" for name, spec in entry.items()) or "nothing"
