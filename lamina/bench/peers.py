"""transformers beside us: the same configuration with random weights in the same process, at the same context.

Its cache is not prefilled either. A short pass makes every layer's store, which is then filled with random numbers up
to the context. `Dynamic` is what its users get by default, `Static` its static cache with `torch.compile` as its own
`generate` applies it.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lamina.bench.measure import random_ids
from lamina.bench.prefill import Prompts

FIRST = 4  # tokens of the pass that makes the stores


def peer_model(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """A random model of transformers, made on its device."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in config.items() if name != "model_type"}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values), dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


class Dynamic:
    """Its dynamic cache, which is copied at every token."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None
        self.call: Callable[..., Any] = model
        self.takes = (
            "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
        )

    @property
    def weights(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def needs(self, rows: int, tokens: int) -> int:
        """From the stores that a short pass makes."""
        cache = Dynamic._new_cache(self, FIRST)
        self._pass(self.model, torch.zeros(rows, FIRST, dtype=torch.int64, device=self.model.device), cache)
        kept = sum(
            store.nbytes * min(tokens, _most(layer)) // FIRST for layer in cache.layers for store in _tokens_of(layer)
        )
        return kept + sum(state.nbytes for layer in cache.layers for state in _states_of(layer))

    def open(self, rows: int, context: int, room: int) -> None:
        self.context = context
        self.ids = random_ids((rows,), self.model.config.vocab_size, self.model.device)
        self.cache = self._new_cache(context + room)
        self._pass(self.model, self.ids[:, None].expand(-1, FIRST), self.cache)
        for layer in self.cache.layers:
            for state in _states_of(layer):
                state.normal_(0, 0.5)
        self._fill()

    def _new_cache(self, tokens: int) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _fill(self) -> None:
        for layer in self.cache.layers:
            stores = [
                store.new_empty(*store.shape[:-2], self._held(layer), store.shape[-1]).normal_(0, 0.5)
                for store in _tokens_of(layer)
            ]
            if stores:
                layer.keys, layer.values = stores
        self.restart()

    def _held(self, layer: Any) -> int:
        return min(self.context, _most(layer) - 1)  # a window's last token is the new one

    def restart(self) -> None:
        for layer in self.cache.layers:
            stores = [store[..., : self._held(layer), :] for store in _tokens_of(layer)]
            if stores:
                layer.keys, layer.values = stores
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = self.context

    @torch.no_grad()
    def _pass(self, call: Callable[..., Any], ids: Tensor, cache: Any, **more: Any) -> Tensor:
        out = call(input_ids=ids, use_cache=True, logits_to_keep=1, return_dict=True, **{self.takes: cache}, **more)
        return out.logits[:, -1].argmax(dim=-1)

    def run(self, steps: int) -> None:
        ids = self.ids
        for _ in range(steps):
            ids = self._pass(self.call, ids[:, None], self.cache)

    def prefill(self, ids: Tensor, prompts: Prompts) -> None:
        """Ragged rows are padded on the left, as its `generate` wants them."""
        cache, T = self._new_cache(ids.shape[1]), ids.shape[1]
        counts, more = torch.tensor(prompts.counts, device=ids.device), {}
        for start in range(0, T, prompts.chunk or T):
            end = start + (prompts.chunk or T)
            if min(prompts.counts) < T:
                more = dict(attention_mask=(torch.arange(T, device=ids.device) >= T - counts[:, None])[:, :end].long())
            self._pass(self.model, ids[:, start:end], cache, **more)

    def stream(self, ids: Tensor, new: int) -> list[float]:
        cache, known = self._new_cache(ids.shape[1] + new), []
        chosen = self._pass(self.model, ids, cache)
        for _ in range(new):
            chosen.tolist()
            known.append(time.time())
            chosen = self._pass(self.call, chosen[:, None], cache)
        return known

    def close(self) -> None:
        self.cache = None


class Static(Dynamic):
    """Its static cache, compiled. Every context is a shape of its own and compiled anew."""

    name = "transformers, compiled"

    def open(self, rows: int, context: int, room: int) -> None:
        self._compile()
        super().open(rows, context, room)

    def _compile(self) -> None:
        torch._dynamo.reset()
        self.model.__dict__.pop("_compiled_call", None)
        self.call = self.model.get_compiled_call(None)

    def _new_cache(self, tokens: int) -> Any:
        from transformers import StaticCache

        return StaticCache(config=self.model.config, max_cache_len=tokens)

    def _fill(self) -> None:
        for layer in self.cache.layers:
            for store in _tokens_of(layer):
                store.normal_(0, 0.5)
        self.restart()

    def restart(self) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(min(self.context, layer.max_cache_len))
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = self.context

    def stream(self, ids: Tensor, new: int) -> list[float]:
        self._compile()
        return super().stream(ids, new)


def _tokens_of(layer: Any) -> Iterator[Tensor]:
    """The stores of a layer that have a slot a token."""
    for name in ("keys", "values"):
        store = getattr(layer, name, None)
        if isinstance(store, Tensor):
            yield store


def _states_of(layer: Any) -> Iterator[Tensor]:
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None) or {}
        yield from (state for state in states.values() if isinstance(state, Tensor))


def _most(layer: Any) -> int:
    """The most tokens a layer keeps."""
    return getattr(layer, "sliding_window", None) or 2**62
