"""With a codec, logits stay within the codec's quality, for windows, hybrids and latents; bytes are saved."""

from __future__ import annotations

import pytest
import torch

from lamina import bridge
from tests.bridge.models import ids, model

BOUNDS = {"int8": 0.03, "fp8": 0.12, "k8v4": 0.2, "int4": 0.35}
"""Codec -> the largest root-mean-square error of the logits, as a share of theirs, that it may make in these models,
whose random keys and values have no outliers and only 8 or 16 dimensions."""


@pytest.mark.parametrize("codec", BOUNDS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1", "qwen3_next", "deepseek_v3"])
@torch.inference_mode()
def test_logits_are_near_those_of_a_plain_cache_past_the_window(name: str, codec: str) -> None:
    given, found = ids(1, 24)[0], []
    for kept in (None, codec):
        cache = bridge.Cache(model(name), codec=kept)
        passes = [given[:, :10], *given[:, 10:].split(1, dim=1)]
        found.append(torch.cat([model(name)(one, past_key_values=cache).logits for one in passes], dim=1))
    plain, coded = found
    error = (coded - plain).pow(2).mean().sqrt() / plain.pow(2).mean().sqrt()
    assert 0 < error < BOUNDS[codec], float(error)


@torch.inference_mode()
def test_int8_gives_the_greedy_tokens_of_a_plain_cache() -> None:
    made = [
        model("gemma3").generate(
            ids(1)[0], past_key_values=bridge.Cache(model("gemma3"), codec=codec), do_sample=False, max_new_tokens=16
        )
        for codec in (None, "int8")
    ]
    assert torch.equal(*made)


@torch.inference_mode()
def test_codes_take_less_memory() -> None:
    sizes = []
    for codec in (None, "int8", "int4"):
        cache = bridge.Cache(model("llama"), capacity=200, codec=codec)
        model("llama")(ids(1)[0], past_key_values=cache)
        sizes.append(cache.inner.nbytes)
    assert sizes[0] > 2 * sizes[1] > 2.5 * sizes[2]
