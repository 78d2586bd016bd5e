"""The normalizer of SentencePiece models replaces the longest key at each place, and treats spaces as SentencePiece."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lamina.checkpoint.vocab.normalizer import Replacements, normalized
from tests.checkpoint.spm import Spm, charsmap

KEYS = {
    "a": "A",
    "ab": "",
    "abc": " x ",
    "e\u0301": "é",
    "ﬁ": "fi",
    "\t": " ",
    "日本": "東",
    "\u0301": " \u0301",
    "😀": ":)",
}
LETTERS = st.text(alphabet="abce\u0301ﬁ\t日本😀 ▁z\u00e9", max_size=14)


@given(LETTERS, st.booleans(), st.booleans(), st.booleans())
def test_it_equals_a_plain_search_for_the_longest_key(text: str, replaces: bool, prefix: bool, collapse: bool) -> None:
    keys = KEYS if replaces else {}
    model = Spm([], dummy_prefix=prefix, collapse=collapse, replaced=keys)
    assert normalized(text, charsmap(keys) if keys else b"", prefix, collapse) == model.normalize(text)


def test_what_begins_like_a_key_and_is_none_stays() -> None:
    found = Replacements(charsmap({"abc": "x", "日本語": "y"}))
    assert found.at("abd", 0) == ("a", 1)
    assert found.at("日本", 0) == ("日", 1)
    assert found.at("xabc", 1) == ("x", 4)
    assert found.at("日本語", 0) == ("y", 3)


def test_without_replacements_every_character_stays() -> None:
    assert Replacements(b"").at("a", 0) == ("a", 1)
