"""Published releases: config.json and tensor names as they are on the Hub, and the number of parameters."""

from __future__ import annotations

from typing import Any, NamedTuple


class Release(NamedTuple):
    """
    parameters   of the model that is built, tied ones once; a float is rounded, to 1 %
    tensors      tensor name -> shape, in the file
    config       config.json
    """

    parameters: float
    tensors: dict[str, tuple[int, ...]]
    config: dict[str, Any]


COMMON: dict[str, Any] = dict(
    _name_or_path="a/b", architectures=["AForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.02, torch_dtype="bfloat16", transformers_version="4.40.0", use_cache=True,
)  # fmt: skip
"""Fields that nearly every file has."""
