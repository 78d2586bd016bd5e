"""`Subject`: a transformers model under one set of names, whatever its forward calls ids, mask, positions and cache.

Also its sizes as far as a check needs them, the ids that may be drawn, and the random sources of an encoder–decoder
model.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from lamina.checking.transformers.recorder import decoder_layers
from lamina.errors import InputError

CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""What the argument and the output that hold the cache are called, in the order in which they are looked for."""
SOURCE_TOKENS = 9


class Subject:
    """`subject.uncached(ids)`, `subject.cached(ids, cache, …)`; `subject.layers` are the decoder layers."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.config: Any = _config(model).get_text_config(decoder=True)
        self.encoder_decoder = bool(getattr(self.model.config, "is_encoder_decoder", False))
        self.parameters = inspect.signature(self.model.forward).parameters
        prefix = "decoder_" if self.encoder_decoder else ""
        self.ids_name = f"{prefix}input_ids"
        if self.ids_name not in self.parameters:
            raise InputError(f"{type(model).__name__} takes no {self.ids_name}: verify checks language models")
        self.mask_name = self._if_known(f"{prefix}attention_mask")
        self.positions_name = self._if_known(f"{prefix}position_ids")
        self.cache_name = next((name for name in CACHE_NAMES if name in self.parameters), None)
        self.device: torch.device = next(self.model.parameters()).device
        self.dtype: torch.dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.layers = decoder_layers(self.model, self._run_once)

    def _if_known(self, name: str) -> str | None:
        return name if name in self.parameters else None

    def _run_once(self) -> None:
        self.uncached(self.drawable[:2][None], self.sources(1, 0))

    # -- passes ----------------------------------------------------------------------------------------------------

    def uncached(self, ids: Tensor, sources: Sources | None = None, mask: Tensor | None = None) -> Tensor:
        """ids [B, T] -> logits [B, T, vocab], in one pass without a cache."""
        given = {} if mask is None or self.mask_name is None else {self.mask_name: mask}
        logits: Tensor = self._call(ids, sources, use_cache=False, **given).logits
        return logits

    def cached(
        self,
        ids: Tensor,
        cache: Any,
        sources: Sources | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """One pass over a cache, None for an empty one of the model's own; -> logits [B, T, vocab], and the cache."""
        more = {self.mask_name: mask, self.positions_name: positions, self.cache_name: cache}
        given = {name: value for name, value in more.items() if name is not None and value is not None}
        out = self._call(ids, sources, use_cache=True, **given)
        returned = next((out[name] for name in CACHE_NAMES if out.get(name) is not None), cache)
        return out.logits, returned

    def _call(self, ids: Tensor, sources: Sources | None, **more: Any) -> Any:
        given = {self.ids_name: ids.to(self.device), "return_dict": True, **more}
        if sources is not None:
            given |= sources.arguments(self.parameters)
        if "use_cache" not in self.parameters:
            given.pop("use_cache")
        return self.model(**given)

    # -- sizes -----------------------------------------------------------------------------------------------------

    @property
    def vocab(self) -> int:
        return int(self.config.vocab_size)

    @property
    def special(self) -> set[int]:
        """Ids of special tokens, to which some models give a meaning."""
        special: set[int] = set()
        for config in (self.model.config, self.config):
            for name, value in config.to_dict().items():
                if name.endswith(("token_id", "token_index")):
                    special |= {value} if isinstance(value, int) else set(value) if isinstance(value, list) else set()
        return {id for id in special if 0 <= id < self.vocab}

    @property
    def drawable(self) -> Tensor:
        """The ids that rows are made of."""
        special = self.special
        return torch.tensor([i for i in range(self.vocab) if i not in special])

    @cached_property
    def returns_cache(self) -> bool:
        """Whether a forward with use_cache=True returns a cache."""
        return self.cached(self.drawable[:2][None], None, self.sources(1, 0))[1] is not None

    @property
    def pad(self) -> int:
        """The id that padding has."""
        found = getattr(self.config, "pad_token_id", None)
        return found if isinstance(found, int) and 0 <= found < self.vocab else 0

    @property
    def spans(self) -> list[int]:
        """Sizes of windows, chunks and convolutions, beyond which a row must reach."""
        names = ("sliding_window", "attention_chunk_size", "attention_window_size", "conv_kernel", "conv_L_cache")
        found = [getattr(self.config, name, None) for name in names]
        return sorted({size for size in found if isinstance(size, int) and size > 0})

    @property
    def most(self) -> int | None:
        """How many positions the model has, where that is limited."""
        names = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len")
        found = [getattr(self.config, name, None) for name in names]
        return min((size for size in found if isinstance(size, int) and size > 0), default=None)

    def kinds(self, calls: int) -> list[frozenset[str]]:
        """By call of a decoder layer: what it is, in the words of its configuration, else its class."""
        types = getattr(self.config, "layer_types", None)
        if not isinstance(types, list) or len(types) != calls:
            classes = [type(layer).__name__ for layer in self.layers]
            types = classes if len(classes) == calls else [classes[0]] * calls
        return [frozenset([kind]) for kind in types]

    def sources(self, rows: int, seed: int) -> Sources | None:
        """Random outputs of an encoder for each row, texts of different lengths; None for decoders."""
        if not self.encoder_decoder:
            return None
        encoder = getattr(self.model.config, "encoder", None) or self.model.config
        names = ("d_model", "hidden_size")
        width = next((size for name in names if (size := getattr(encoder, name, None))), None)
        if width is None:
            raise InputError(f"{type(self.model).__name__} does not say how wide its encoder's output is")
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(rows, SOURCE_TOKENS, width, generator=generator)
        text = getattr(self.model, "main_input_name", "input_ids") == "input_ids"  # audio has one length for all
        lengths = torch.tensor([max(3, SOURCE_TOKENS - 2 * row) if text else SOURCE_TOKENS for row in range(rows)])
        return Sources(hidden.to(self.device, self.dtype), lengths.to(self.device))


class Sources:
    """Outputs of an encoder: hidden [B, S, W], of which row b has the first lengths[b]."""

    def __init__(self, hidden: Tensor, lengths: Tensor) -> None:
        self.hidden, self.lengths = hidden, lengths

    def rows(self, rows: list[int]) -> Sources:
        """These rows; all keep their width, since a cache may hold them so."""
        return Sources(self.hidden[rows], self.lengths[rows])

    def alone(self, row: int) -> Sources:
        """One row, cut to its length, so that it needs no mask."""
        length = self.lengths[row]
        return Sources(self.hidden[row : row + 1, : int(length)], length[None])

    @property
    def mask(self) -> Tensor:
        """[B, S]"""
        return (torch.arange(self.hidden.shape[1], device=self.lengths.device) < self.lengths[:, None]).long()

    def arguments(self, parameters: Any) -> dict[str, Any]:
        from transformers.modeling_outputs import BaseModelOutput

        made: Any = BaseModelOutput(last_hidden_state=cast(Any, self.hidden))
        made.router_logits = None  # mixtures of experts pass on those of the encoder
        given: dict[str, Any] = {"encoder_outputs": made}
        if "attention_mask" in parameters:
            given["attention_mask"] = self.mask
        return given


def _config(model: Any) -> Any:
    return model.config
