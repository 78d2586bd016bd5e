"""How SentencePiece normalizes a text before it cuts it: replacements of characters, and spaces.

Replacements are in a trie, a double array of 32-bit units (`precompiled_charsmap`). A unit has the label of its node,
whether a value follows, and the offset to its children: the child of the node at i for a byte is at i ^ offset ^ byte.
A value is the position of a replacement among texts that end with a zero byte. The longest key at a position counts.
"""

from __future__ import annotations

import struct
from functools import lru_cache

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space


class Replacements:
    """The replacements of a model's charsmap.

    charsmap  the size of the trie in bytes, the trie, and the texts; empty: nothing is replaced
    """

    def __init__(self, charsmap: bytes) -> None:
        (size,) = struct.unpack_from("<I", charsmap) if charsmap else (0,)
        self._units = struct.unpack_from(f"<{size // 4}I", charsmap, 4) if charsmap else ()
        self._texts = charsmap[4 + size :]
        self._begins: dict[str, bool] = {}  # character -> whether a key begins with it

    def at(self, text: str, start: int) -> tuple[str, int]:
        """What stands for the text at a position, and where that text ends: the longest key, or one character."""
        letter = text[start]
        if letter not in self._begins:
            self._begins[letter] = self._walk(letter.encode(), partly=True) is not None
        if self._begins[letter]:
            key = text[start : start + LONGEST].encode()
            if (found := self._walk(key)) is not None:
                value, length = found
                end = start + len(key[:length].decode())
                return self._texts[value : self._texts.index(0, value)].decode(), end
        return letter, start + 1

    def _walk(self, key: bytes, partly: bool = False) -> tuple[int, int] | None:
        """The value and the length of the longest key that these bytes begin with; None if there is none.

        partly  also if the bytes are only the beginning of a key
        """
        found = None
        if not self._units:
            return found
        at = offset(self._units[0])
        for length, byte in enumerate(key, 1):
            at ^= byte
            if at >= len(self._units) or self._units[at] & 0x800000FF != byte:
                return found
            unit = self._units[at]
            at ^= offset(unit)
            if unit >> 8 & 1:
                found = self._units[at] & 0x7FFFFFFF, length
        return found if found is not None or not partly else (0, 0)


LONGEST = 32
"""Characters that a key may have; the longest key of Unicode's forms has 18."""


def offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 1 << 9) >> 6)


@lru_cache(maxsize=8)
def replacements(charsmap: bytes) -> Replacements:
    return Replacements(charsmap)


def normalized(text: str, charsmap: bytes, dummy_prefix: bool, collapse_spaces: bool) -> str:
    """A text as SentencePiece cuts it, with visible spaces.

    dummy_prefix     whether a space is put before it
    collapse_spaces  whether spaces at both ends go, and several become one

    >>> normalized(" a  b ", b"", True, True), normalized(" a", b"", False, False)
    ('▁a▁b', '▁a')
    """
    found, parts, at = replacements(charsmap), [], 0
    while at < len(text):
        part, at = found.at(text, at)
        parts.append(part)
    if collapse_spaces:
        kept: list[str] = []
        after_space = True  # at the beginning, and after a part that ends with a space
        for part in parts:
            part = part.lstrip(" ") if after_space else part
            if part:
                kept.append(part)
                after_space = part.endswith(" ")
        parts = kept
    if not parts:
        return ""
    joined = "".join(parts).replace(" ", SPACE)
    joined = (SPACE if dummy_prefix else "") + joined
    return joined.rstrip(SPACE) if collapse_spaces else joined
