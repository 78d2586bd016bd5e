"""What each layer of a transformers model remembers, from its configuration."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

from lamina.errors import InputError

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding")
INDEXED = ("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")
STATES = ("conv", "linear_attention", "hybrid", "hybrid_sliding")
NOTHING = ("moe", "mlp")
OWN_CACHE = {
    "minimax": "keeps its linear states in a cache class of its own",
    "recurrent_gemma": "keeps its states in its modules",
    "rwkv": "has no past_key_values: its `state` is a list of tensors",
    "xlstm": "has no past_key_values: its `cache_params` are of a class of its own",
    "reformer": "has no past_key_values: it caches buckets",
    "xlnet": "has no past_key_values: its `mems` are hidden states",
    "openai-gpt": "has no past_key_values, and runs without a cache",
    "xlm": "has no past_key_values, and runs without a cache",
}
"""Model types that do not read a `transformers.Cache`, and why."""


@dataclass(frozen=True)
class LayerKind:
    """What one layer remembers.

    name      its type in transformers' configurations
    attends   True if it stores keys and values
    window    number of tokens that its queries see, their own included; None: all
    indexed   True if it also stores the keys of an indexer
    states    number of its convolution states, and of its recurrent states
    """

    name: str
    attends: bool = True
    window: int | None = None
    indexed: bool = False
    states: int = 0

    @property
    def remembers(self) -> bool:
        return self.attends or self.states > 0


def text_config(model_or_config: Any) -> Any:
    """The configuration of the decoder: that of a model, or of the text model of a multimodal one."""
    config = getattr(model_or_config, "config", model_or_config)
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"{model_or_config!r} is no transformers model, nor its configuration: give the model, or model.config"
        )
    decoder = config.get_text_config(decoder=True)
    layers = getattr(decoder, "num_decoder_layers", None)
    if decoder.is_encoder_decoder and layers not in (
        None,
        decoder.num_hidden_layers,
    ):  # T5: counts those of its encoder
        decoder = copy.deepcopy(decoder)
        decoder.num_hidden_layers = layers
    return decoder


def layer_kinds(config: Any) -> list[LayerKind]:
    """The kind of each layer of a decoder's configuration; a kind that the bridge does not store is refused by name."""
    if config.model_type in OWN_CACHE:
        raise InputError(
            f"a {config.model_type} model cannot use lamina.bridge.Cache: it {OWN_CACHE[config.model_type]}"
        )
    types, settings = get_layer_types_and_kwargs(config)
    if isinstance(settings, dict):  # one for all layers, in transformers 5.17
        settings = [settings] * len(types)
    found = [_kind(config, i, name, one) for i, (name, one) in enumerate(zip(types, settings, strict=True))]
    if not any(kind.remembers for kind in found):
        raise InputError(f"no layer of this {config.model_type} configuration remembers anything: it needs no cache")
    return found


def _kind(config: Any, i: int, name: str, settings: dict[str, Any]) -> LayerKind:
    if name in NOTHING:
        return LayerKind(name, attends=False)
    if name not in (*ATTENTION, *INDEXED, *STATES):
        known = ", ".join((*ATTENTION, *INDEXED, *STATES[:2], *NOTHING))
        raise InputError(
            f"layer {i} of this {config.model_type} model is of the type {name!r}, which lamina.bridge does not store: "
            f"it stores {known}. Use the cache that transformers makes for this model"
        )
    sliding = name in ("sliding_attention", "chunked_attention", "hybrid_sliding")
    return LayerKind(
        name,
        attends=name in ATTENTION or name in INDEXED,
        window=int(settings["sliding_window"]) if sliding else None,
        indexed=name in INDEXED,
        states=settings.get("number_of_states", 1) if name in STATES else 0,
    )
