"""The prefix store: whatever is reused, logits and tokens are those of starting from nothing."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lamina
from lamina import Cache, InputError, PrefixStore
from lamina.cache.ops.snapshot import snapshot_size, take_snapshot
from lamina.generation.prompt import from_rows
from lamina.generation.reuse import Continuation, continuation
from lamina.model import Model
from tests.families import test_t5
from tests.families.cases import FIRST
from tests.families.harness import pair, random_ids
from tests.laws.toys import KINDS, VOCAB, EncoderDecoder, assert_close, toy, truth

PLENTY = 2**30
ENDLESS: dict[str, Any] = {"eos_token_id": []}


def model_of(family: str) -> Model:
    return pair(family, dict(FIRST)[family])[1]


def ids(length: int, vocab: int, seed: int) -> list[int]:
    return random_ids(1, length, vocab, seed)[0].tolist()


def fed(store: PrefixStore, prompts: list[list[int]]) -> tuple[Cache, Tensor, list[int]]:
    """What generate does up to the first token: the cache, the logits after each prompt, and what was reused."""
    cache, known = store._start([np.array(ids) for ids in prompts])
    plan = continuation(cache, prompts, True)
    assert plan == Continuation.after(prompts, known)
    cache.poison()
    return cache, store._prefill(from_rows(prompts), plan.rest, cache, None), plan.reused


def contents(store: PrefixStore) -> list[dict[str, Tensor]]:
    """Copies of every number that the snapshots hold."""
    return [
        {f"{i}.{name}.{key}": tensor.nan_to_num(7) for i, entry in enumerate(one.cache.layers)
         for name, layer in entry.items() for key, tensor in layer.data.items()}
        | {"record": one.cache.record.clone(), "lengths": one.cache.lengths.clone()}
        for one in store._kept
    ]  # fmt: skip


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", dict(FIRST))
def test_prompts_that_extend_share_diverge_and_repeat_give_the_tokens_of_a_cold_start(family: str) -> None:
    model = model_of(family)
    store = PrefixStore(model, PLENTY, worth=2)
    first, x, y, z = (ids(n, model.vocab, seed) for seed, n in enumerate((26, 9, 4, 11)))
    calls = [
        ([first], [0]),
        ([first], [26]),  # the same again
        ([first + x, y], [26, 0]),  # one goes on, one is new
        ([first[:15] + z], [0]),  # leaves in the middle
        ([first[:15] + y, first + x + y, first[:15] + z], [15, 35, 25]),
        ([first[:7], first[:1]], [0, 0]),  # ends in the middle
    ]
    for prompts, least in calls:
        for settings in ({}, {"do_sample": True, "seed": 3}):
            cold = model.generate(prompts, 3, **ENDLESS, **settings)
            warm = model.generate(prompts, 3, prefixes=store, **ENDLESS, **settings)
            assert warm.tokens == cold.tokens
            assert all(found >= some for found, some in zip(warm.reused, least, strict=True))
            assert warm.timing.prompt_tokens == sum(map(len, prompts)) - sum(warm.reused)
        follow = [row + new + y for row, new in zip(prompts, cold.tokens, strict=True)]  # the next turn
        warm = model.generate(follow, 2, prefixes=store, **ENDLESS)
        assert warm.tokens == model.generate(follow, 2, **ENDLESS).tokens
        assert all(found >= len(row) for found, row in zip(warm.reused, prompts, strict=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not isinstance(toy(kind), EncoderDecoder)])
def test_logits_of_every_kind_of_layer_are_those_of_an_uncached_pass(kind: str) -> None:
    model, rng = toy(kind), random.Random(kind)
    longest = (model.max_positions or 30) - 2
    store = PrefixStore(model, rng.choice([PLENTY, 8_000]), worth=1)
    said = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(2)]
    reused = 0
    for _ in range(8):
        prompts = []
        for _ in range(rng.randint(1, 3)):
            known = rng.choice(said)[: rng.randint(0, longest)]
            prompts.append((known + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))])[:longest] or [1])
        before = contents(store)
        kept = list(store._kept)
        cache, logits, found = fed(store, prompts)
        for row, prompt in enumerate(prompts):
            assert_close(logits[row], truth(kind, tuple(prompt))[-1])
        model([[3]] * len(prompts), cache=cache)  # a turn, kept too
        store._keep_rows(cache)
        cache.poison()
        assert store.nbytes <= store.bytes
        still = {id(one): now for one, now in zip(store._kept, contents(store), strict=True)}
        for one, then in zip(kept, before, strict=True):
            for name, tensor in then.items():
                assert torch.equal(still.get(id(one), then)[name], tensor)
        said += prompts
        reused += sum(found)
    assert reused > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2", "deepseek_v3"])
def test_a_prompt_asked_again_is_not_fed_at_all(family: str) -> None:
    model = model_of(family)
    store = PrefixStore(model, PLENTY, worth=1)
    prompt = ids(18, model.vocab, 0)
    cold = model.generate([prompt], 4, **ENDLESS).tokens
    for times in range(3):
        warm = model.generate([prompt], 4, prefixes=store, **ENDLESS)
        assert warm.tokens == cold and warm.reused == [18 if times else 0]
    if family in ("llama", "deepseek_v3"):  # one that ends inside: its logits are kept where the longer one is
        for reused in (9, 10):
            assert model.generate([prompt[:10]], 1, prefixes=store, **ENDLESS).reused == [reused]
        assert len(store) == 2


def test_a_branch_point_is_kept_on_the_way_and_found_by_the_next_prompt() -> None:
    model = model_of("mamba2")
    store = PrefixStore(model, PLENTY)
    system = ids(20, model.vocab, 0)
    prompts = [system + ids(6, model.vocab, seed) for seed in (1, 2, 3)]
    reused = [model.generate([prompt], 3, prefixes=store).reused[0] for prompt in prompts]
    assert reused == [0, 0, 20]
    store.clear()
    model.generate(prompts[:2], 3, prefixes=store)  # rows of one call part there, too
    assert model.generate(prompts[2:], 3, prefixes=store).reused == [20]
    few = PrefixStore(model, PLENTY, worth=21)
    for prompt in prompts:
        assert model.generate([prompt], 3, prefixes=few).reused == [0]


def test_attention_keeps_one_snapshot_for_all_its_prefixes_and_recurrences_one_for_each_end() -> None:
    for family, expected in (("llama", 1), ("mamba", 4)):
        model = model_of(family)
        store = PrefixStore(model, PLENTY)
        prompt = ids(20, model.vocab, 0)
        first = model.generate([prompt], 4, prefixes=store, **ENDLESS)
        model.generate([prompt + first.tokens[0] + [1, 2]], 4, prefixes=store, **ENDLESS)
        assert len(store) == expected
        assert len(store.sequences[-1]) == 30


def test_rings_are_taken_back_as_long_as_they_have_not_gone_round() -> None:
    model = model_of("gemma2")  # a window of 8
    store = PrefixStore(model, PLENTY)
    prompt = ids(6, model.vocab, 0)
    model.generate([prompt], 2, prefixes=store, **ENDLESS)
    assert model.generate([[*prompt[:4], 1]], 2, prefixes=store, **ENDLESS).reused == [4]
    assert store.sequences[0][:6] == prompt


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_return_sequences": 2, "do_sample": True, "seed": 1},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk": 5},
    ],
    ids=str,
)
def test_every_strategy_can_use_it(settings: dict[str, Any]) -> None:
    for family in ("llama", "falcon_h1"):
        model = model_of(family)
        store = PrefixStore(model, PLENTY, worth=2)
        base = ids(14, model.vocab, 0)
        for prompts in ([base, [*base[:9], 1, 2]], [[*base[:9], 3], [*base, 4]]):
            cold = model.generate(prompts, 5, **ENDLESS, **settings)
            warm = model.generate(prompts, 5, prefixes=store, **ENDLESS, **settings)
            assert warm.tokens == cold.tokens
        assert min(warm.reused) >= 9


def test_streams_use_it_and_one_that_is_left_keeps_the_prompt() -> None:
    model = model_of("lfm2")
    store = PrefixStore(model, PLENTY)
    prompt = ids(12, model.vocab, 0)
    for _ in model.stream([prompt], 8, prefixes=store, **ENDLESS):
        break
    assert store.sequences[0] == prompt
    assert model.generate([prompt], 4, prefixes=store, **ENDLESS).reused == [12]


# -- room --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "deepseek_v3"])
def test_bytes_are_counted_exactly_and_never_exceed_the_budget(family: str) -> None:
    model = model_of(family)
    probe = model.new_cache(2)
    model(random_ids(2, 30, model.vocab), cache=probe, counts=[30, 5])
    probe.reserve(500)
    for row in (0, 1):
        own = take_snapshot(probe, row)
        assert own.logits is not None
        assert snapshot_size(probe, row).nbytes == own.nbytes + own.record.nbytes + own.logits.nbytes < 40_000
    budget = int(2.5 * snapshot_size(probe, 0).nbytes)
    store = PrefixStore(model, budget)
    prompts = [ids(25, model.vocab, seed) for seed in range(5)]
    for prompt in prompts:
        model.generate([prompt], 5, prefixes=store, **ENDLESS)
        assert 0 < store.nbytes <= budget
        assert store.nbytes == sum(
            sum(t.nbytes for layer in one.cache.every_layer() for t in layer.data.values())
            + one.cache.record.nbytes + sum(logits.nbytes for logits in one.after.values())
            for one in store._kept
        )  # fmt: skip
    assert store.sequences[-1][:25] == prompts[-1]
    assert prompts[0] not in [one[:25] for one in store.sequences]


def test_what_was_used_last_stays() -> None:
    model = model_of("llama")
    prompts = [ids(25, model.vocab, seed) for seed in range(3)]
    store = PrefixStore(model, PLENTY)
    for prompt in prompts[:2]:
        model.generate([prompt], 5, prefixes=store, **ENDLESS)
    store.bytes = store.nbytes
    assert model.generate([prompts[0]], 5, prefixes=store, **ENDLESS).reused == [25]
    model.generate([prompts[2]], 5, prefixes=store, **ENDLESS)
    assert [one[:25] for one in store.sequences] == [prompts[0], prompts[2]]


def test_a_sequence_larger_than_the_budget_is_not_kept_and_drops_nothing() -> None:
    model = model_of("llama")
    store = PrefixStore(model, 6_000)
    small, large = ids(10, model.vocab, 0), ids(60, model.vocab, 1)
    model.generate([small], 2, prefixes=store, **ENDLESS)
    assert model.generate([large], 2, prefixes=store, **ENDLESS).reused == [0]
    assert [one[:10] for one in store.sequences] == [small]
    assert "A sequence of 62 tokens that shares 60 is not kept: it takes " in store.explain(large)
    assert "and the budget of all is 5.9 KiB." in store.explain(large)


def test_logits_of_a_shorter_prompt_are_kept_where_they_just_fit() -> None:
    model = model_of("llama")
    prompt = ids(10, model.vocab, 0)
    for short, known in ((0, 10), (1, 9)):  # bytes that are missing; without its logits a prompt's last token is fed
        store = PrefixStore(model, PLENTY)
        cache, logits, _ = fed(store, [prompt])
        model([[1, 2, 3]], cache=cache)
        store.bytes = snapshot_size(cache, 0).nbytes + logits.nbytes - short
        store._keep_rows(cache)
        assert [len(one) for one in store.sequences] == [13]
        assert store.nbytes == store.bytes - (logits.nbytes - short if short else 0)
        assert store._start([np.array(prompt)])[1] == [known]


def test_a_snapshot_of_a_ring_that_had_room_to_spare_grows_again() -> None:
    model = model_of("gemma2")
    cache = model.new_cache(2).reserve(50)
    model([[1, 2, 3], [4, 5, 6]], cache=cache)
    for length in (None, 2):
        again = Cache.join([take_snapshot(cache, 1, length)])
        rest = random_ids(1, 30, model.vocab)
        found = model(rest, cache=again, logits="last")
        expected = model(torch.cat([torch.tensor([[4, 5, 6][:length]]), rest], dim=1), logits="last")
        torch.testing.assert_close(found, expected)


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_threads_share_a_store(family: str) -> None:
    model = model_of(family)
    base = ids(24, model.vocab, 0)
    prompts = [base[: 6 + 3 * (n % 6)] + ids(3, model.vocab, n % 9) for n in range(16)]
    cold = [model.generate([prompt], 3, **ENDLESS).tokens for prompt in prompts]
    store = PrefixStore(model, 150_000, worth=2)
    with ThreadPoolExecutor(6) as pool:
        warm = list(pool.map(lambda prompt: model.generate([prompt], 3, prefixes=store, **ENDLESS), prompts))
    assert [one.tokens for one in warm] == cold
    assert sum(one.reused[0] for one in warm) > 0
    assert store.nbytes <= store.bytes


# -- why ---------------------------------------------------------------------------------------------------------------


def test_explain_says_how_much_is_reused_and_what_differs() -> None:
    model = model_of("llama")
    store = PrefixStore(model, PLENTY)
    assert store.explain([5, 6]) == "0 of 2 tokens would be reused. Nothing is kept."
    store._keep_rows(fed(store, [[5, 6, 7, 8, 9]])[0])
    nearest = "The nearest of 1 sequence (5 tokens)"
    for prompt, expected in [
        ([4, 6], f"0 of 2 tokens would be reused. {nearest} differs at position 0: wanted 4, held 5."),
        ([5, 6, 1], f"2 of 3 tokens would be reused. {nearest} differs at position 2: wanted 1, held 7."),
        ([5, 6, 7, 8, 9, 1], f"5 of 6 tokens would be reused. {nearest} ends there."),
        ([5, 6, 7, 8, 9], f"5 of 5 tokens would be reused. {nearest} is the same."),
        (
            [5, 6, 7],
            f"2 of 3 tokens would be reused. {nearest} holds them all and goes on. The last token is fed for its "
            "logits.",
        ),
    ]:
        assert store.explain(prompt) == expected
    assert store.explain([[5], [4]]).splitlines()[1].startswith("prompt 1: 0 of 1 tokens would be reused.")
    assert repr(store).startswith("PrefixStore of 1 sequence, 1.")


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gemma2", "attention, sliding 8 limits that."),
        ("llama4", "attention, chunks of 7 limits that."),
        ("mamba", "convolution 4 and SelectiveScan limit that."),
        ("lfm2", "convolution 3 limits that."),
    ],
)
def test_explain_names_the_kind_of_layer_that_limits_a_hit_and_is_right_about_it(family: str, kinds: str) -> None:
    model = model_of(family)
    store = PrefixStore(model, PLENTY)
    prompt = ids(20, model.vocab, 0)
    store._keep_rows(fed(store, [prompt])[0])
    other = [*prompt[:12], (prompt[12] + 1) % model.vocab]
    assert store.explain(other) == (
        "0 of 13 tokens would be reused. The nearest of 1 sequence (20 tokens) differs at position 12: wanted "
        f"{other[12]}, held {prompt[12]}. It cannot be rewound to 12 tokens, only to 20 or more: {kinds} When this "
        "prompt is fed, the state after 12 tokens is kept."
    )
    fed(store, [other])
    assert store.explain([*other[:12], prompt[12]]).startswith("12 of 13 tokens would be reused.")


def test_explain_says_what_had_to_go() -> None:
    model = model_of("llama")
    store = PrefixStore(model, PLENTY)
    first, second = ids(20, model.vocab, 0), ids(20, model.vocab, 1)
    fed(store, [first])
    store.bytes = store.nbytes
    fed(store, [second])
    assert "A sequence of 20 tokens that shares 20 is not kept: it had to make room." in store.explain(first)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_a_store_cannot_serve_is_refused() -> None:
    model, other = model_of("llama"), model_of("gemma2")
    store = PrefixStore(model, PLENTY)
    with pytest.raises(InputError, match="a cache and prefixes were given"):
        model.generate([[1]], 2, prefixes=store, cache=model.new_cache())
    with pytest.raises(InputError, match="use_cache=False and prefixes"):
        model.generate([[1]], 2, prefixes=store, use_cache=False)
    with pytest.raises(InputError, match="made for another model"):
        other.generate([[1]], 2, prefixes=store)
    with pytest.raises(InputError, match="instead of inputs_embeds"):
        model.generate(inputs_embeds=model.embed(torch.tensor([[1, 2]])), max_new_tokens=2, prefixes=store)
    with pytest.raises(InputError, match="T5 reads a source"):
        PrefixStore(test_t5.pair(test_t5.FIRST)[1], PLENTY)
    for bytes in (0, "2 GiB"):
        with pytest.raises(InputError, match=f"bytes={bytes!r}: it must be a number of bytes, at least 1"):
            lamina.PrefixStore(model, bytes=bytes)  # type: ignore[arg-type]
    for worth in (0, None):
        with pytest.raises(InputError, match=f"worth={worth}: it must be a number of tokens, at least 1"):
            lamina.PrefixStore(model, bytes=1, worth=worth)  # type: ignore[arg-type]
    assert len(store) == 0
