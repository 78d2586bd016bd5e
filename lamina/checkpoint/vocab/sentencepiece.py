"""A reader for SentencePiece models (tokenizer.model, spiece.model, source.spm …), which are protocol buffers.

A message is a list of fields. A field begins with a varint, number * 8 + wire type; the wire type says how long its
value is: 0 a varint, 1 eight bytes, 2 a length and as many bytes (text, bytes, or a message), 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.checkpoint.vocab.normalizer import SPACE, normalized
from lamina.errors import CheckpointError

__all__ = ["BPE", "BYTE", "CONTROL", "NORMAL", "SPACE", "UNIGRAM", "UNKNOWN", "UNUSED", "USER_DEFINED"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
UNIGRAM, BPE = 1, 2  # types of models


@dataclass(frozen=True)
class Piece:
    text: str
    score: float = 0.0
    type: int = NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """pieces             in the order of their ids
    kind               UNIGRAM or BPE
    charsmap           how characters are normalized (a trie of replacements); empty: not at all
    dummy_prefix       whether a space is put before the text
    collapse_spaces    whether spaces at both ends go, and several become one
    """

    path: Path
    pieces: list[Piece]
    kind: int = UNIGRAM
    unk_id: int = 0
    byte_fallback: bool = False
    charsmap: bytes = b""
    dummy_prefix: bool = True
    collapse_spaces: bool = True
    ids: dict[str, int] = field(default_factory=dict)

    def normalized(self, text: str) -> str:
        """A text as the model cuts it, with visible spaces."""
        return normalized(text, self.charsmap, self.dummy_prefix, self.collapse_spaces)


def read_model(path: Path) -> SentencePieceModel:
    """Reads a SentencePiece model file."""
    try:
        top = list(fields(path.read_bytes()))
        pieces = [read_piece(value) for number, value in top if number == 1]
        trainer = {number: value for part, inner in top if part == 2 for number, value in fields(inner)}
        normalizer = {number: value for part, inner in top if part == 3 for number, value in fields(inner)}
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} is cut short or not a SentencePiece model: {error}") from error
    if not pieces:
        raise CheckpointError(f"{path} is not a SentencePiece model: it has no pieces")
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise CheckpointError(f"{path} is a SentencePiece model of type {kind}; read are 1 (unigram) and 2 (BPE)")
    if trainer.get(24, 0):
        raise CheckpointError(f"{path} has treat_whitespace_as_suffix=True, which is not supported")
    if not normalizer.get(5, 1):
        raise CheckpointError(f"{path} has escape_whitespaces=False, which is not supported")
    return SentencePieceModel(
        path,
        pieces,
        kind=kind,
        unk_id=next((i for i, piece in enumerate(pieces) if piece.type == UNKNOWN), trainer.get(40, 0)),
        byte_fallback=bool(trainer.get(35, 0)),
        charsmap=normalizer.get(2, b""),
        dummy_prefix=bool(normalizer.get(3, 1)),
        collapse_spaces=bool(normalizer.get(4, 1)),
        ids={piece.text: index for index, piece in enumerate(pieces)},
    )


def read_piece(message: bytes) -> Piece:
    found = dict(fields(message))
    (score,) = struct.unpack("<f", found.get(2, bytes(4)))
    return Piece(found.get(1, b"").decode("utf-8"), score, found.get(3, NORMAL))


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The number and the value of each field: an int of a varint, else bytes.

    >>> list(fields(b"\\x08\\x96\\x01\\x12\\x02hi"))
    [(1, 150), (2, b'hi')]
    """
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(message, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire} at byte {at}")
        size, at = varint(message, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        if at + size > len(message):
            raise ValueError(f"{size} bytes at {at} go past its end")
        yield number, message[at : at + size]
        at += size


def varint(message: bytes, at: int) -> tuple[int, int]:
    """An integer, seven bits in each byte, the lowest first; and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError(f"an integer at byte {at} does not end")
