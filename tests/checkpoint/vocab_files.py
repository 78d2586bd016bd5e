"""Vocabulary files for tests, and what reads the same files for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamina.checkpoint.tokenizer import Tokenizer
from tests.checkpoint.spm import CONTROL, UNUSED, Spm, charsmap

TEXTS = [
    "",
    " ",
    "hello the world",
    "The Hello, world! 2024",
    "  two  spaces   and\ttabs\nand lines \n",
    "café naïve cafe\u0301",
    "emoji 😀👩‍👩‍👧 end",
    "日本語 123 한국어",
    "a<user>b </s> singing<unk>",
    "don't (stop), please... “quotes”",
    "ﬁne ｆｕｌｌ",
    "QZ unknownQQ letters",
    "x <mask> y<mask>",
    "<s>the<s> <pad>",
]
REPLACED = {"ﬁ": "fi", "ｆ": "f", "ｌ": "l", "\t": " ", "\n": " ", "e\u0301": "é", "“": '"', "\u200b": ""}
MAP = charsmap(REPLACED)
HARD = [
    "e\u0301\u0301", "a\u0301 e\u0301x", "under▁score▁", "▁▁x", " \u200b the\u200bhe\u200b ", "\r\n",
    "the\n\n \thello ", "</s><s>", " </s>  the", "the</s>he", "a" * 60, "hello the world " * 8, "ﬁ" * 20, "\u0301",
]  # fmt: skip
"""Texts that are cut otherwise if normalization differs anywhere."""
SPM: dict[str, Spm] = {}


class Processor:
    """The part of sentencepiece.SentencePieceProcessor that transformers uses."""

    def __init__(self, **options: object) -> None:
        pass

    def Load(self, path: str) -> None:
        self.model = SPM[str(path)]
        self.texts = [text for text, *_ in self.model.pieces]
        self.ids = {text: i for i, text in enumerate(self.texts)}

    def encode(self, text: str, out_type: type = int) -> list[Any]:
        return self.model.encode(text)

    def decode(self, pieces: list[str]) -> str:
        text = "".join(pieces).replace("▁", " ")
        return text.lstrip(" ") if self.model.collapse else text.removeprefix(" ")

    decode_pieces = decode

    def PieceToId(self, text: str) -> int:
        return self.ids.get(text, self.model.unk_id)

    piece_to_id = PieceToId

    def IdToPiece(self, index: int) -> str:
        return self.texts[index]

    def get_piece_size(self) -> int:
        return len(self.texts)

    __len__ = get_piece_size


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def put_model(folder: Path, name: str, model: Spm) -> Path:
    SPM[str(folder / name)] = model
    return model.write(folder / name)


def compare(ours: Tokenizer | None, theirs: Any, texts: list[str] = TEXTS, decode: bool = True) -> None:
    assert ours is not None
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"], text
        if decode:
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special=skip) == expected, text


def lookup_vocab(model: Spm, first: str) -> dict[str, int]:
    """Another order of ids; some pieces have none."""
    texts = [text for text, _, kind in model.pieces if kind not in (CONTROL, UNUSED)][1:]
    kept = [text for i, text in enumerate(sorted(texts)) if i % 7]
    return {text: i for i, text in enumerate([*first.split(), *kept, ">>fr<<"])}
