"""Where a pass ends: passes of several tokens behind others, and passes that raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lamina import bridge
from lamina.errors import InputError
from tests.bridge.models import cache_argument, model

NAMES = ["llama", "gemma3", "falcon_h1", "lfm2", "qwen3_next", "zamba2", "granitemoehybrid", "mamba2"]
BY_ONE = [*NAMES, "jamba"]  # of several tokens, jamba forgets its states in transformers itself
HISTORIES = [(9,), (9, 1), (9, 1, 1), (9, 3), (9, 3, 1, 2)]


def feed(name: str, cache: Any, given: Tensor) -> Tensor:
    with torch.no_grad():
        return model(name)(given, use_cache=True, **{cache_argument(name): cache}).logits


def fill(name: str, history: tuple[int, ...], recording: bool = False, **kept: Any) -> tuple[Any, Tensor]:
    """A cache after passes of so many tokens, and all of them."""
    given = torch.randint(1, 60, (1, sum(history)), generator=torch.Generator().manual_seed(2))
    cache = bridge.Cache(model(name), **kept)
    if recording:
        cache.activate_past_recording()
    for new in given.split(list(history), dim=1):
        feed(name, cache, new)
    return cache, given


def check_next(name: str, cache: Any, given: Tensor) -> None:
    """The next pass gives the logits of an uncached one."""
    every = torch.cat([given, torch.tensor([[5, 6]])], dim=1)
    got = [feed(name, cache, every[:, i : i + 1]) for i in range(given.shape[1], every.shape[1])]
    with torch.no_grad():
        want = model(name)(every, use_cache=False).logits[:, -2:]
    torch.testing.assert_close(torch.cat(got, dim=1), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_after_passes_of_any_lengths_goes_on_as_an_uncached_pass(name: str, history: tuple[int, ...]) -> None:
    cache, given = fill(name, history)
    fork = cache.fork()
    check_next(name, fork, given)
    check_next(name, cache, given)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_that_raises_before_its_first_layer_loses_nothing(
    name: str, history: tuple[int, ...], recording: bool
) -> None:
    cache, given = fill(name, history, recording)

    def refuse(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model(name).get_input_embeddings().register_forward_pre_hook(refuse)
    try:
        with pytest.raises(KeyboardInterrupt):
            feed(name, cache, torch.tensor([[3]]))
    finally:
        hook.remove()
    cache.abort()
    check_next(name, cache, given)


@pytest.mark.parametrize("history", [(), (9,), (9, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_of_several_tokens_that_raises_after_some_layers_is_dropped(name: str, history: tuple[int, ...]) -> None:
    cache, given = fill(name, history) if history else (bridge.Cache(model(name)), torch.zeros(1, 0, dtype=torch.long))

    def refuse(*_: Any) -> None:
        raise KeyboardInterrupt

    last = next(one for at, one in model(name).named_modules() if at.endswith("layers"))[-1]
    hook = last.register_forward_pre_hook(refuse)
    try:
        with pytest.raises(KeyboardInterrupt):
            feed(name, cache, torch.tensor([[3, 4, 5]]))
    finally:
        hook.remove()
    cache.abort()
    check_next(name, cache, given)


def raise_before_last_layer(name: str, cache: Any) -> None:
    """Feeds one token, and stops before the last layer."""

    def refuse(*_: Any) -> None:
        raise KeyboardInterrupt

    last = next(one for at, one in model(name).named_modules() if at.endswith("layers"))[-1]
    hook = last.register_forward_pre_hook(refuse)
    try:
        with pytest.raises(KeyboardInterrupt):
            feed(name, cache, torch.tensor([[3]]))
    finally:
        hook.remove()


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_several_tokens_over_a_cache_on_the_host_see_what_the_last_layer_stored(
    name: str, history: tuple[int, ...]
) -> None:
    cache, given = fill(name, history, residence="host")
    more = torch.tensor([[5, 6, 7]])
    found = feed(name, cache, more)
    with torch.no_grad():
        expected = model(name)(torch.cat([given, more], dim=1), use_cache=False).logits[:, -3:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_pool_without_the_slack_that_recording_needs_is_refused_in_words() -> None:
    ids = torch.randint(1, 60, (1, 5), generator=torch.Generator().manual_seed(2))
    more: dict[str, Any] = dict(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    with pytest.raises(InputError, match=r"the pool was made with slack=0: make it with lamina.bridge.Pool\(slack="):
        cache = bridge.Cache(model("gemma3"), pool=bridge.Pool())
        model("gemma3").generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, **more)


@pytest.mark.parametrize("kept", [{"slack": 1}, {"residence": "host"}], ids=str)
@pytest.mark.parametrize("history", [(9,), (9, 1, 1)])
@pytest.mark.parametrize("name", BY_ONE)
def test_a_pass_of_one_token_that_raises_after_some_layers_is_dropped_if_states_are_copies(
    name: str, history: tuple[int, ...], kept: dict[str, Any]
) -> None:
    cache, given = fill(name, history, **kept)
    raise_before_last_layer(name, cache)
    cache.abort()
    check_next(name, cache, given)


@pytest.mark.parametrize("history", [(9,), (9, 1, 1)])
@pytest.mark.parametrize("name", BY_ONE)
def test_a_pass_of_one_token_that_changed_states_in_place_is_not_dropped_in_silence(
    name: str, history: tuple[int, ...]
) -> None:
    if name == "qwen3_next" and not hasattr(transformers.Cache, "get_conv_state"):
        pytest.skip("before transformers 5.22 this model gives its states")
    cache, given = fill(name, history)
    raise_before_last_layer(name, cache)
    if name in ("llama", "gemma3", "lfm2"):  # their layers keep what they give
        cache.abort()
    else:
        with pytest.raises(InputError, match=r"in place, that of layer .* emptied.*slack=1"):
            cache.abort()
        assert cache.store.length == 0
        feed(name, cache, given)
    check_next(name, cache, given)


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2", "jamba"])
def test_looking_at_a_state_changes_nothing(name: str) -> None:
    cache, given = fill(name, (9, 1, 1))
    for i, linear in enumerate(cache.layers):
        if hasattr(linear, "recurrent_states"):
            assert linear.recurrent_states[0] is not None, i
    cache.abort()
    check_next(name, cache, given)


@pytest.mark.parametrize("name", ["falcon_h1", "jamba", "granitemoehybrid"])
def test_the_pass_after_one_that_ended_early_is_refused(name: str) -> None:
    cache, _ = fill(name, (9, 1, 1))
    raise_before_last_layer(name, cache)
    with pytest.raises(InputError, match=r"ended before layer .*cache\.abort"):
        feed(name, cache, torch.tensor([[3]]))
