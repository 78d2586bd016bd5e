"""Small SentencePiece models for tests: a writer of the file format, and a plain reference of how text is cut."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
SPACE = "▁"
WORDS = [
    "▁the",
    "▁he",
    "he",
    "llo",
    "▁hell",
    "▁world",
    "world",
    "▁caf",
    "é",
    "▁2",
    "02",
    "024",
    "ing",
    "▁sing",
    "▁a",
    "▁b",
    "in",
    "th",
    "e▁",
    "▁▁",
    "日本",
    "▁日",
    ",▁",
    "!",
    "▁ﬁ",
    "fi",
    "▁na",
    "ve",
]
LETTERS = "▁abcdefghilmnoprstuvwxyzHTW0124.,!?'<>/é日é語_"


@dataclass
class Spm:
    pieces: list[tuple[str, float, int]]
    kind: int = UNIGRAM
    charsmap: bytes = b""
    byte_fallback: bool = False
    unk_id: int = 0
    dummy_prefix: bool = True
    collapse: bool = True
    replaced: dict[str, str] = field(default_factory=dict)  # what the charsmap says

    def write(self, path: Path) -> Path:
        """Writes the protocol buffer."""
        out = b""
        for text, score, kind in self.pieces:
            piece = blob(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
            if kind != NORMAL:
                piece += number(3, kind)
            out += blob(1, piece)
        trainer = number(3, self.kind) + number(35, int(self.byte_fallback)) + number(40, self.unk_id)
        trainer += number(43, -1) + blob(45, self.pieces[self.unk_id][0].encode())
        normalizer = blob(1, b"test") + (blob(2, self.charsmap) if self.charsmap else b"")
        normalizer += number(3, int(self.dummy_prefix)) + number(4, int(self.collapse))
        path.write_bytes(out + blob(2, trainer) + blob(3, normalizer))
        return path

    def proto(self) -> SimpleNamespace:
        """The same as google.protobuf would give it."""
        return SimpleNamespace(
            pieces=[SimpleNamespace(piece=t, score=float32(s), type=k) for t, s, k in self.pieces],
            trainer_spec=SimpleNamespace(
                model_type=self.kind, unk_id=self.unk_id, byte_fallback=self.byte_fallback,
                unk_piece=self.pieces[self.unk_id][0], bos_id=1, eos_id=2, bos_piece="<s>", eos_piece="</s>",
            ),
            normalizer_spec=SimpleNamespace(precompiled_charsmap=self.charsmap),
        )  # fmt: skip

    # the reference: how SentencePiece cuts a text
    def encode(self, text: str) -> list[str]:
        text = self.normalize(text)
        if not text:
            return []
        return self._merge(text) if self.kind == BPE else self._viterbi(text)

    def normalize(self, text: str) -> str:
        given, keys, out = text, sorted(self.replaced, key=len, reverse=True), ""
        while text:
            key = next((key for key in keys if text.startswith(key)), text[0])
            out, text = out + self.replaced.get(key, key), text[len(key) :]
        if self.collapse:
            out = " ".join(part for part in out.split(" ") if part)
        out = (SPACE if self.dummy_prefix and given else "") + out.replace(" ", SPACE)
        return out.rstrip(SPACE) if self.collapse else out

    def _viterbi(self, text: str) -> list[str]:
        scores = {t: float32(s) for t, s, k in self.pieces if k in (NORMAL, USER)}
        unknown = min(scores.values()) - 10
        best: list[tuple[float, int, bool]] = [(0.0, 0, False)]
        for end in range(1, len(text) + 1):
            options = []
            for start in range(end):
                part = text[start:end]
                if part in scores:
                    options.append((best[start][0] + scores[part], start, False))
                elif end - start == 1:
                    options.append((best[start][0] + unknown, start, True))
            best.append(max(options, key=lambda option: option[0]))  # of equals, the longest piece
        parts, end, before = [], len(text), False
        while end:
            _, start, is_unknown = best[end]
            if is_unknown and before:
                parts[-1] = text[start:end] + parts[-1]  # neighbours that are unknown are one piece
            else:
                parts.append(text[start:end])
            end, before = start, is_unknown
        return parts[::-1]

    def _merge(self, text: str) -> list[str]:
        scores = {t: float32(s) for t, s, k in self.pieces if k in (NORMAL, USER)}
        parts = list(text)
        while True:
            pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
            if not pairs:
                break
            i = -max(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        fused: list[str] = []
        for part in parts:
            if fused and part not in scores and fused[-1] not in scores:
                fused[-1] += part
            else:
                fused.append(part)
        return fused


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def blob(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def small_model(kind: int = UNIGRAM, first: str = "<unk> <s> </s>", **options: object) -> Spm:
    """A few letters and words. `first` are the pieces with the lowest ids; <unk> is one of them."""
    draw = random.Random(kind)
    types = {"<unk>": UNKNOWN}
    pieces = [(text, 0.0, types.get(text, CONTROL)) for text in first.split()]
    known = dict.fromkeys([*WORDS, *LETTERS, *("".join(WORDS) if kind == BPE else "")])
    if options.get("byte_fallback"):
        pieces += [(f"<0x{i:02X}>", 0.0, BYTE) for i in range(256)]
    if kind == BPE:
        texts = [*(t for t in known if len(t) > 1), *(t for t in known if len(t) == 1)]
        # every prefix of a word is a piece, so that merges lead to it
        texts = list(dict.fromkeys(t[:n] for t in texts for n in range(2, len(t) + 1))) + [
            t for t in known if len(t) == 1
        ]
        pieces += [(text, -float(rank), NORMAL) for rank, text in enumerate(texts)]
    else:
        pieces += [(text, -2 - draw.random() * 8 + 1.5 * len(text), NORMAL) for text in known]
    pieces.append(("<user>", 0.0, USER))
    return Spm(pieces, kind, unk_id=first.split().index("<unk>"), **options)  # type: ignore[arg-type]


def charsmap(replacements: dict[str, str]) -> bytes:
    """A map of characters as SentencePiece compiles it: the size of a trie, the trie, the replacements.

    The trie is a double array. A node at index i is a 32-bit unit: its label, whether a value follows, and the offset
    to its children, which are at i ^ offset ^ byte. A value is the position of a replacement.
    """
    texts, places = b"", {}
    for source, target in replacements.items():
        places[source.encode()] = len(texts)
        texts += target.encode() + b"\0"
    tree: dict = {}
    for key, value in places.items():
        node = tree
        for byte in key:
            node = node.setdefault(byte, {})
        node[0] = value
    units, used = {0: 0}, {0}

    def place(node: dict, at: int, label: int) -> None:
        offset = 256
        while any(at ^ offset ^ byte in used for byte in node):
            offset += 256
        used.update(at ^ offset ^ byte for byte in node)
        units[at] = label | (offset << 10) | ((1 << 8) if 0 in node else 0)
        for byte, child in node.items():
            here = at ^ offset ^ byte
            if byte == 0:
                units[here] = child | 1 << 31
            else:
                place(child, here, byte)

    place(tree, 0, 0)
    size = (max(units) // 256 + 1) * 256
    array = struct.pack(f"<{size}I", *(units.get(i, 0) for i in range(size)))
    return struct.pack("<I", len(array)) + array + texts
