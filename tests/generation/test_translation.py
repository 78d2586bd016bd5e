"""Text handed from one tokenizer to another: no character is lost, doubled or shown in half."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.checkpoint import Tokenizer
from lamina.generation.strategies.retokenize import Spelling, beginning, ids_after, retokenize
from tests.generation.vocabularies import TEXTS, TOKENIZERS, few

LETTERS = "abeht .,'\n123éïß日本語😀👩‍👧\N{COMBINING ACUTE ACCENT}"
texts = st.lists(st.one_of(st.text(LETTERS, max_size=8), st.sampled_from(TEXTS)), max_size=6).map("".join)
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special=False)


@every_tokenizer
@settings(max_examples=25, deadline=None, derandomize=True)
@given(text=texts, data=st.data())
def test_a_spelling_has_the_whole_characters_of_the_tokens_so_far(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = [9, *encode(tokenizer, text)]
    spelling, at = Spelling(tokenizer, skipped=1), 0
    while at < len(ids):
        at = data.draw(st.integers(at + 1, len(ids)))
        spelling.read(ids[:at])
        assert len(spelling.pieces) == at
        shown = spelling.since(0)
        assert text.startswith(shown)
        assert tokenizer.decode(ids[1 : at - spelling.unfinished], skip_special=False) == shown
        assert (spelling.unfinished > 0) == (tokenizer.decode(ids[1:at], skip_special=False) != shown)
    assert spelling.since(0) == text


@every_tokenizer
@settings(max_examples=10, deadline=None, derandomize=True)
@given(text=texts, more=texts)
def test_a_long_prompt_that_is_spelt_at_once_is_spelt_as_token_by_token(name: str, text: str, more: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = encode(tokenizer, "😀本 the thing " * 40 + text)
    at_once, slowly = Spelling(tokenizer), Spelling(tokenizer)
    at_once.read(ids)
    for n in range(len(ids)):
        slowly.read(ids[: n + 1])
    assert at_once.since(0) == slowly.since(0) and at_once.unfinished == slowly.unfinished
    ids += encode(tokenizer, more)
    for spelling in (at_once, slowly):
        spelling.read(ids)
    assert at_once.pieces[-40:] == slowly.pieces[-40:]


@every_tokenizer
@settings(max_examples=30, deadline=None, derandomize=True)
@given(first=texts, added=st.lists(texts, max_size=4), window=st.integers(0, 12))
def test_the_ids_of_a_text_that_goes_on_spell_all_of_it(name: str, first: str, added: list[str], window: int) -> None:
    tokenizer, text = TOKENIZERS[name](), "a" + first
    ids = encode(tokenizer, text)
    for more in added:
        old = text[max(len(text) - window, 0) :]
        back, new = retokenize(lambda one: encode(tokenizer, one), ids, old, old + more)
        ids[len(ids) - back :] = new
        text += more
        assert tokenizer.decode(ids, skip_special=False) == text


@every_tokenizer
def test_with_a_window_of_a_few_words_they_are_the_ids_of_the_whole_text(name: str) -> None:
    tokenizer, whole = TOKENIZERS[name](), " ".join(TEXTS)
    ids, replaced = encode(tokenizer, whole[:9]), 0
    for end in range(9, len(whole)):
        old = whole[max(end - 40, 0) : end]
        back, new = retokenize(lambda one: encode(tokenizer, one), ids, old, old + whole[end])
        ids[len(ids) - back :] = new
        assert ids == encode(tokenizer, whole[: end + 1])
        replaced += back
    assert replaced > 50


@every_tokenizer
@settings(max_examples=30, deadline=None, derandomize=True)
@given(before=texts, text=texts)
def test_ids_behind_a_text_spell_what_follows_it(name: str, before: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    fixed = encode(tokenizer, "a" + before)
    found = ids_after(lambda one: encode(tokenizer, one), "a" + before, text)
    assert tokenizer.decode([*fixed, *found], skip_special=False) == "a" + before + text


def test_ids_behind_a_text_are_those_of_both_together_where_no_token_reaches_over_the_border() -> None:
    tokenizer = TOKENIZERS["bytes"]()

    def ids(text: str) -> list[int]:
        return encode(tokenizer, text)

    assert ids_after(ids, "the", " theory") == ids("the theory")[1:]
    assert ids("the")[0] != ids("t")[0] and len(ids("the")) == 1
    assert ids_after(ids, "a t", "he") == ids("he")  # "the" would be one token
    alone = TOKENIZERS["pieces"]()
    assert alone.decode(ids_after(lambda one: encode(alone, one), "t", "he")) == "he"


def test_what_a_tokenizer_puts_in_front_is_known() -> None:
    assert [beginning(TOKENIZERS[name]()) for name in TOKENIZERS] == [[], [0], [1]]


def test_tokenizers_with_the_same_vocabulary_have_the_same_ids_whatever_was_added_to_it() -> None:
    one, other = (Tokenizer(few().backend.__class__.from_str(few().backend.to_str())) for _ in range(2))
    other.backend.add_special_tokens(["<|chat|>"])
    assert one.same_ids(other) and other.same_ids(one) and one.same_ids(few())
    assert not one.same_ids(few("the theory of everything is about things in the universe, quickly jumped over vexed"))
