"""Stopping: each reason, stop strings wherever the tokens are cut, and where the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from lamina.checkpoint import Tokenizer
from lamina.errors import InputError
from lamina.generation.settings.settings import settings_of
from lamina.generation.stopping import Stopping
from tests.generation.text import reader, tokenizer


def run(stopping: Stopping, ids: list[int], row: int = 0) -> tuple[int, str | None]:
    """How many tokens were taken, and the reason."""
    for n, token in enumerate(ids):
        if (reason := stopping.put(row, token)) is not None:
            return n + 1, reason
    return len(ids), None


def test_each_row_ends_by_its_own_length_or_by_any_of_the_ids() -> None:
    stopping = Stopping([3, 5, 9], eos=[2, 4])
    assert stopping.on_device
    assert run(stopping, [7] * 9, 0) == (3, "length")
    assert run(stopping, [7, 7, 4, 7], 1) == (3, "eos")
    assert run(stopping, [7, 7], 2) == (2, None)
    assert stopping.reasons == ["length", "eos", None]
    with pytest.raises(InputError, match=r"row 1 ended before \(eos\)"):
        stopping.put(1, 7)
    assert run(Stopping([3], eos=[2]), [7, 7, 2]) == (3, "eos")


def test_rows_end_with_their_next_token_after_the_time_is_up() -> None:
    now = 100.0
    stopping = Stopping([9, 9], max_time=5.0, clock=lambda: now)
    assert not stopping.on_device
    assert stopping.put(0, 7) is None
    now = 104.9
    assert stopping.put(1, 7) is None
    now = 105.0
    assert stopping.put(0, 7) == "time"
    assert stopping.put(1, 7) == "time"


def test_functions_of_the_caller_see_row_tokens_and_text() -> None:
    seen: list[tuple[int, list[int], str]] = []

    def stop(row: int, tokens: list[int], text: str) -> bool:
        seen.append((row, list(tokens), text))
        return text.endswith("thing")

    ids = [*tokenizer().encode("the thing"), 3]
    stopping = Stopping([99, 99], stop=[lambda row, tokens, text: False, stop], tokenizer=tokenizer())
    assert not stopping.on_device
    assert run(stopping, ids, 1) == (len(ids) - 1, "stop")
    assert stopping.stop_chars == [None, None]
    assert seen[-1] == (1, ids[:-1], "the thing")
    assert run(Stopping([9], stop=[lambda row, tokens, text: text == ""]), [5]) == (1, "stop")


@pytest.mark.parametrize("text", ["the theory of things", "naïve 日本語 and 😀👩 so", "a<|im_end|>b", "xx"])
def test_a_stop_string_is_found_at_every_place_of_a_text(text: str) -> None:
    ids = tokenizer().encode(text)
    for first in range(len(text)):
        for end in range(first + 1, min(first + 6, len(text)) + 1):
            check(ids, [text[first:end]])


def check(ids: list[int], strings: list[str]) -> None:
    """Against the definition: the whole text again after every token."""
    found = run(Stopping([len(ids) + 1], stop_strings=strings, tokenizer=tokenizer()), ids)
    for n in range(1, len(ids) + 1):
        whole = tokenizer().decode(ids[:n], skip_special=False)
        if any(one in whole for one in strings):
            assert found == (n, "stop")
            return
    assert found == (len(ids), None)


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab th日😀", max_size=14), st.lists(st.text("ab th日😀", min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_stop_strings_are_found_with_the_token_that_completes_them(text: str, strings: list[str]) -> None:
    ids = tokenizer().encode(text)
    check(ids, strings)
    stopping = Stopping([99], stop_strings=strings, tokenizer=tokenizer())
    taken, reason = run(stopping, ids)
    if reason is not None:
        whole = tokenizer().decode(ids[:taken])
        assert stopping.stop_chars[0] == min(whole.find(one) for one in strings if one in whole)


def test_a_stop_string_may_be_a_special_token_and_the_text_is_cut_before_it() -> None:
    text = "the<|im_start|>thing<|im_end|>x"
    ids = tokenizer().encode(text)
    for strings, cut in ((["<|im_end|>"], 8), (["thing<"], 3), (["ing<|im"], 5), (["|im_start|>th"], 3)):
        stopping = Stopping([99], stop_strings=strings, tokenizer=tokenizer())
        assert run(stopping, ids)[1] == "stop"
        assert stopping.stop_chars == [cut]


def test_a_stop_string_is_found_before_the_character_after_it_is_whole() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀")[0][0][0]
    tokens = {text: i for i, text in enumerate([*letters, "D" + first])}
    backend = Backend(models.BPE(tokens, [("D", first)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    small = Tokenizer(backend)
    ids = small.encode("END😀")
    assert ids[2] == len(letters)
    for string, taken, cut in (("END", 3, 0), ("D", 3, 2), ("ND😀", 6, 1), ("😀", 6, 3)):
        stopping = Stopping([99], stop_strings=[string], tokenizer=small)
        assert run(stopping, ids) == (taken, "stop")
        assert stopping.stop_chars == [cut]


def test_selected_rows_go_their_own_ways() -> None:
    ids = tokenizer().encode("the thing")
    stopping = Stopping([99, 99], stop_strings=["thing"], tokenizer=tokenizer())
    assert run(stopping, ids[:-1]) == (len(ids) - 1, None)
    both = stopping.select([0, 1, 0])
    assert both.put(0, ids[-1]) == "stop"
    assert both.put(2, 5) is None
    assert both.stop_chars == [4, None, None]
    assert stopping.put(0, ids[-1]) == "stop"
    assert stopping.reasons == ["stop", None]


def test_settings_say_when_rows_end() -> None:
    model = reader()
    stopping = Stopping.of(settings_of(model, {"max_length": 9}), [3, 5], model.tokenizer)
    assert stopping.most == [6, 4] and stopping.eos == {2} and stopping.on_device
    other = settings_of(model, {"max_new_tokens": 9, "stop_strings": "x", "max_time": 3})
    assert not Stopping.of(other, [3], model.tokenizer).on_device


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        Stopping([3], stop_strings=["a"])
