"""A cache that holds any number of tokens at once: random numbers in the stores and the clock set, no prefill."""

from __future__ import annotations

import torch

from lamina.cache.cache import Cache
from lamina.cache.layers.cross import CrossLayer
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.rehearsal.rehearsal import set_clock


def fill_context(cache: Cache, tokens: int) -> Cache:
    """Makes every row hold `tokens` tokens of random numbers, recurrent states included.

    >>> from lamina.bench import SHAPES, random_model
    >>> import torch
    >>> model = random_model(dict(SHAPES["smollm2-135m"].config, num_hidden_layers=1), torch.float32, "cpu")
    >>> fill_context(model.new_cache(rows=2), 100).lengths.tolist()
    [100, 100]
    """
    cache.reserve(max(tokens, 1))
    if cache.pages is not None:
        cache.pages.prepare([(row, 0, tokens) for row in range(cache.rows)])
    for entry in cache.layers:
        for layer in entry.values():
            layer.storage.settle()
            for numbers in layer.data.values():
                here = numbers.device == cache.device
                drawn = numbers if here else torch.empty_like(numbers, device=cache.device)  # which draws faster
                if numbers.is_floating_point():
                    drawn.normal_(0, 0.5)
                elif numbers.dtype == torch.uint8:  # codes; 127 and 255 are no numbers in fp8
                    drawn.random_(127)
                if not here:
                    numbers.copy_(drawn)
            if isinstance(layer, RecurrentLayer) and "base" in layer.data:
                layer.data["base"].copy_(layer.data["head"])
    set_clock(cache, tokens)
    return cache


def attach_random(cache: Cache, positions: int) -> Cache:
    """Gives every row a source of `positions` random keys and values, as if an encoder had made them."""
    rows = torch.arange(cache.rows, device=cache.device)
    lengths = torch.full_like(rows, positions)
    for layer in cache.every_layer():
        if isinstance(layer, CrossLayer):
            spec, shape = layer.spec, (cache.rows, layer.spec.kv_heads, positions)
            k, v = (
                torch.randn(*shape, dim, dtype=cache.dtype, device=cache.device)
                for dim in (spec.key_dim, spec.value_dim)
            )
            layer.attach(k, v, lengths, rows)
    cache.clock.sourced = [True] * cache.rows
    return cache
