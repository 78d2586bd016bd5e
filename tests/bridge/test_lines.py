"""Passes that go by `Lines`: windows that move, views that are made ahead, and returns to the Lamina cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lamina import bridge
from lamina.attention.window import Sliding
from lamina.bridge import windows
from lamina.bridge.layers.specs import Attention
from lamina.bridge.lines import AHEAD
from lamina.bridge.windows import Moved, in_order, restore
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.spec import Keeping
from lamina.errors import InputError
from tests.bridge.models import ids, model

SPARE = 8
LONG = 6 + 3 * (SPARE + 1)  # tokens after which the windows of the small models, of 6 tokens, have moved several times


@pytest.fixture(autouse=True)
def few_spare_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "SPARE", SPARE)


def logits(name: str, cache: Any, given: torch.Tensor) -> torch.Tensor:
    """Those after each token, fed one by one."""
    one = model(name)
    return torch.cat([one(given[:, i : i + 1], past_key_values=cache).logits for i in range(given.shape[1])], dim=1)


def uncached(name: str, given: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(name)(given, use_cache=False).logits
    return found


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("capacity", [None, LONG])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
@torch.no_grad()
def test_windows_that_move_give_the_logits_of_one_uncached_pass(name: str, capacity: int | None) -> None:
    given = ids(2, LONG)[0]
    cache = bridge.Cache(model(name), capacity=capacity)
    same(logits(name, cache, given), uncached(name, given))
    lines = cache.store.lines
    assert lines is not None and any(isinstance(layer.data, Moved) for layer in lines.layers.values())
    held = cache.layers[0].keys  # the Lamina cache is asked: its rings are as it made them
    assert held is not None and not any(isinstance(layer.data, Moved) for layer in cache.inner.every_layer())
    assert all(layer.slots in (6, LONG) or capacity is None for layer in cache.inner.every_layer())


@pytest.mark.parametrize("asks", ["keys", "fork", "reorder", "recording", "abort"])
@torch.no_grad()
def test_what_is_asked_between_tokens_changes_nothing(asks: str) -> None:
    given = ids(2, LONG)[0]
    cache = bridge.Cache(model("gemma3"))
    found = []
    for start in range(0, LONG, 7):
        found.append(logits("gemma3", cache, given[:, start : start + 7]))
        if asks == "keys":
            assert cache.layers[0].keys is not None
        elif asks == "fork":
            cache = cache.fork()
        elif asks == "reorder":
            cache.reorder_cache(torch.tensor([0, 1]))
        elif asks == "recording":
            cache.activate_past_recording()
        else:
            cache.abort()
    same(torch.cat(found, dim=1), uncached("gemma3", given))


VERBS: dict[str, tuple[list[int], Any]] = {  # the rows afterwards, and what is called
    "reorder": ([1, 0], lambda cache: cache.reorder_cache(torch.tensor([1, 0]))),
    "beams that go on from one row": ([1, 1], lambda cache: cache.reorder_cache(torch.tensor([1, 1]))),
    "select": ([1], lambda cache: cache.batch_select_indices(torch.tensor([1]))),
    "mask": ([0], lambda cache: cache.batch_select_indices(torch.tensor([True, False]))),
    "repeat": ([0, 0, 1, 1], lambda cache: cache.batch_repeat_interleave(2)),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_rows_change_after_windows_have_moved(name: str, verb: str) -> None:
    given = ids(2, LONG + 4)[0]
    cache = bridge.Cache(model(name))
    logits(name, cache, given[:, :LONG])
    rows, change = VERBS[verb]
    lines = cache.store.lines
    assert lines is not None and (
        name == "llama" or any(isinstance(layer.data, Moved) for layer in lines.layers.values())
    )
    change(cache)
    later = given[:1, LONG:].expand(len(rows), -1)
    expected = uncached(name, torch.cat([given[rows, :LONG], later], dim=1))
    same(logits(name, cache, later), expected[:, LONG:])


@pytest.mark.parametrize(
    ("shape", "said"), [((1, 2, 3, 4), "3 tokens in a pass of 1"), ((2, 2, 1, 4), "2 rows in a pass of 1")]
)
def test_a_later_layer_that_is_given_another_shape_is_refused(shape: tuple[int, ...], said: str) -> None:
    cache = bridge.Cache(transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=8))
    for _ in range(4):
        for i in range(2):
            cache.update(*torch.randn(2, 1, 2, 1, 4), i)
    assert cache.store.lines is not None
    cache.update(*torch.randn(2, 1, 2, 1, 4), 0)
    with pytest.raises(InputError, match=said):
        cache.update(*torch.randn(2, *shape), 1)
    cache.abort()
    assert cache.inner.lengths.tolist() == [4]


def test_a_layer_whose_tokens_do_not_fit_has_not_written_them() -> None:
    cache = bridge.Cache(transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=8), slack=1)
    for i in (0, 1, 0):
        cache.update(*torch.randn(2, 1, 2, 1, 4), i)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        cache.update(*torch.randn(2, 1, 2, 1, 5), 1)
    cache.abort()
    assert cache.inner.lengths.tolist() == [1]


@torch.no_grad()
def test_with_slack_a_window_that_moved_can_be_cropped() -> None:
    given = ids(2, LONG)[0]
    cache = bridge.Cache(model("mistral"), slack=3)
    logits("mistral", cache, given)
    cache.crop(-3)
    other = ids(2, 8)[0] % 7 + 1
    expected = uncached("mistral", torch.cat([given[:, :-3], other], dim=1))[:, -8:]
    same(logits("mistral", cache, other), expected)


@torch.no_grad()
def test_views_made_ahead_are_not_used_after_a_crop() -> None:
    given = ids(2, 9 + 2 * AHEAD)[0]
    cache = bridge.Cache(model("llama"))
    model("llama")(given[:, :9], past_key_values=cache)
    logits("llama", cache, given[:, 9:])
    for n in (1, AHEAD + 3):
        cache.crop(-n)
        given = torch.cat([given[:, :-n], given[:, :5]], dim=1)
        expected = uncached("llama", given)
        same(model("llama")(given[:, -5:-2], past_key_values=cache).logits, expected[:, -5:-2])
        same(logits("llama", cache, given[:, -2:]), expected[:, -2:])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_grad_modes_may_change_from_token_to_token(name: str) -> None:
    given = ids(1, LONG)[0]
    cache, found = bridge.Cache(model(name)), []
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    for i in range(LONG):
        with modes[i // 5 % 3]():
            found.append(model(name)(given[:, i : i + 1], past_key_values=cache).logits.detach().clone())
    with torch.no_grad():
        same(torch.cat(found, dim=1), uncached(name, given))


@torch.no_grad()
def test_an_error_inside_a_pass_over_windows_that_moved_leaves_the_finished_ones() -> None:
    one, given = model("gemma3"), ids(1, LONG)[0]
    cache = bridge.Cache(one)
    logits("gemma3", cache, given[:, :-2])

    def fail(*_: Any) -> None:
        raise ValueError("out of memory")

    hook = one.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="out of memory"):
        one(given[:, -2:-1], past_key_values=cache)
    hook.remove()
    cache.abort()
    same(logits("gemma3", cache, given[:, -2:]), uncached("gemma3", given)[:, -2:])


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("window", [2, 5, 200])
def test_a_ring_that_was_moved_and_restored_holds_the_tokens_of_one_that_was_not(window: int, slack: int) -> None:
    def ring() -> TokenLayer:
        keeping = Keeping(2, None, slack, torch.float32, torch.device("cpu"))
        layer = Attention(3, 4, 5, Sliding(window), 3).layer(keeping)
        assert isinstance(layer, TokenLayer)
        layer.reserve(10**6)
        return layer

    def token(position: int, width: int) -> torch.Tensor:
        return torch.full((2, 3, width), float(position + 1))

    moved, plain = ring(), ring()
    size = plain.layout.ring
    assert size == window + slack
    moves = 0
    for position in range(4 * (size + max(SPARE, size // 8))):
        before = moved.data
        base = in_order(moved, position)
        moves += moved.data is not before
        for name, width in (("k", 4), ("v", 5)):
            moved.data[name][:, :, position - base] = token(position, width)
            plain.data[name][:, :, position % size] = token(position, width)
        first = max(0, position + 1 - window)
        expected = torch.arange(first, position + 1) + 1.0
        assert torch.equal(moved.data["k"][0, 0, first - base : position + 1 - base, 0], expected)
    assert moves > 2
    restore(moved, position + 1)
    kept = torch.arange(position + 2 - size, position + 1) % size  # all that a rewind within the slack can show
    for name in ("k", "v"):
        assert moved.data[name].shape == plain.data[name].shape
        assert torch.equal(moved.data[name][:, :, kept], plain.data[name][:, :, kept])
