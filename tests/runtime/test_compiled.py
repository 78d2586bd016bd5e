"""Compiled blocks: the logits of plain passes, and one program for all blocks of a kind at any length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lamina import Cache, Model
from lamina.config import Config
from lamina.models.llama import Llama
from tests.laws.toys import EncoderDecoder, assert_close, random_ids, toy, truth

ROWS, LENGTH = 2, 36  # a growing store starts with 32 slots
SOME_KINDS = ["sliding, keep", "sliding and full", "latent", "gated delta", "hybrid", "cross", "shared", "from outside"]


@contextmanager
def compiled(model: Model, backend: str = "aot_eager") -> Iterator[CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model.compile(backend=counter)
    try:
        yield counter
    finally:
        model.compiled = None


def cache_for(model: Model, **options: int) -> tuple[Cache, list[tuple[int, ...] | None]]:
    cache = model.new_cache(ROWS, **options)
    if not isinstance(model, EncoderDecoder):
        return cache, [None] * ROWS
    ids = random_ids(ROWS, 5, seed=7)
    cache.attach(model.encode(ids))
    return cache, [tuple(row) for row in ids.tolist()]


def small_llama(layers: int = 3) -> Llama:
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=67)
    return Llama.build(Config(dict(model_type="llama", num_hidden_layers=layers, rms_norm_eps=1e-5) | shape))


def decode(model: Model, cache: Cache, ids: Tensor, T: int) -> Tensor:
    """The logits of all tokens, T at a time."""
    return torch.cat([model(piece, cache=cache) for piece in ids.split(T, dim=1)], dim=1)  # type: ignore[misc]


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_compiled_blocks_give_the_uncached_logits_while_the_cache_grows(kind: str) -> None:
    model = toy(kind)
    cache, sources = cache_for(model)
    ids = random_ids(ROWS, LENGTH, seed=3)
    most = cache.max_positions or LENGTH
    with compiled(model) as counter:
        start = decode(model, cache, ids[:, :4], 1)
        programs = counter.frame_count
        found = torch.cat([start, decode(model, cache, ids[:, 4:most], 1)], dim=1)
        assert counter.frame_count == programs, f"{kind}: compiled again at another length"
    for r in range(ROWS):
        assert_close(found[r], truth(kind, tuple(ids[r, :most].tolist()), sources[r]), kind)


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("capacity", [None, 48])
def test_all_blocks_of_a_kind_share_one_program_at_any_length(T: int, capacity: int | None) -> None:
    model, ids = small_llama(), torch.randint(67, (ROWS, 48))
    plain = decode(model, model.new_cache(ROWS, capacity=capacity), ids, T)
    with compiled(model) as counter:
        found = decode(model, model.new_cache(ROWS, capacity=capacity), ids, T)
        assert counter.frame_count == 1
        found_again = decode(model, model.new_cache(ROWS, capacity=64), ids, T)
        assert counter.frame_count == 1
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(found_again, plain)


def test_rows_of_different_lengths_rewound_and_grown_are_one_more_program() -> None:
    model, ids = small_llama(), torch.randint(67, (ROWS, 60))

    def run() -> list[Tensor]:
        cache = model.new_cache(ROWS)
        model(ids[:, :9], cache=cache, counts=[9, 4])
        out = [decode(model, cache, ids[:, 9:30], 1)]
        cache.rewind([3, 7])
        out += [decode(model, cache, ids[:, 30:50], 1)]
        return out

    plain = run()
    with compiled(model) as counter:
        found = run()
        assert counter.frame_count == 1
    torch.testing.assert_close(found, plain)


def test_a_prompt_and_padding_are_not_compiled() -> None:
    model, ids = small_llama(), torch.randint(67, (ROWS, 20))
    with compiled(model) as counter:
        cache = model.new_cache(ROWS)
        model(ids, cache=cache)
        model(ids[:, :3], cache=cache, counts=[3, 1])
        model(ids)
        assert counter.frame_count == 0


@torch.no_grad()
def test_generation_makes_the_same_tokens_and_machine_code_the_same_logits() -> None:
    model, ids = small_llama(2), torch.randint(67, (ROWS, 70))
    prompts = [[1, 2, 3], [4, 5, 6]]
    plain = model.generate(prompts, max_new_tokens=12).tokens
    logits = decode(model, model.new_cache(ROWS), ids, 1)
    with compiled(model, "inductor") as counter:
        assert model.generate(prompts, max_new_tokens=12).tokens == plain
        found = decode(model, model.new_cache(ROWS), ids, 1)
        assert counter.frame_count == 1
    torch.testing.assert_close(found, logits)
