"""Tokenizers from vocabulary files give the ids that transformers' classes give for the same files."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers

from lamina import CheckpointError
from lamina.checkpoint.tokenizer import Tokenizer, folder_tokenizer
from lamina.checkpoint.vocab.sentencepiece import read_model
from tests.checkpoint.spm import BPE, CONTROL, UNIGRAM, UNUSED, Spm, charsmap, small_model

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
MAP = charsmap({"ﬁ": "fi", "ｆ": "f", "ｌ": "l", "\t": " ", "\n": " ", "e\u0301": "é", "“": '"'})
SPM: dict[str, Spm] = {}


@pytest.fixture(autouse=True)
def read_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads SentencePiece files with packages that are not installed here: both give it what was written."""

    def extractor(self: Any, model: str) -> None:
        self.proto = SPM[str(model)].proto()

    module = importlib.import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(module.SentencePieceExtractor, "__init__", extractor)


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
        return "".join(pieces).replace("▁", " ").removeprefix(" ")

    decode_pieces = decode

    def PieceToId(self, text: str) -> int:
        return self.ids.get(text, self.model.unk_id)

    piece_to_id = PieceToId

    def IdToPiece(self, index: int) -> str:
        return self.texts[index]

    def get_piece_size(self) -> int:
        return len(self.texts)

    __len__ = get_piece_size


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("sentencepiece")
    package.SentencePieceProcessor = Processor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentencepiece", package)
    base = importlib.import_module("transformers.tokenization_utils_sentencepiece")
    monkeypatch.setattr(base, "requires_backends", lambda *given: None)
    monkeypatch.setattr(base, "spm", package, raising=False)


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


FAIRSEQ = "<unk> <s> </s>"
CASES = {
    "llama": ("LlamaTokenizer", "tokenizer.model", BPE, FAIRSEQ, {"add_bos_token": True}),
    "llama legacy": ("LlamaTokenizer", "tokenizer.model", BPE, FAIRSEQ, {"legacy": True, "add_eos_token": True}),
    "t5": ("T5Tokenizer", "spiece.model", UNIGRAM, "<pad> </s> <unk>", {}),
    "t5 ids": ("T5Tokenizer", "spiece.model", UNIGRAM, "<pad> </s> <unk>", {"extra_ids": 3}),
    "pegasus": ("PegasusTokenizer", "spiece.model", UNIGRAM, "<pad> </s> <unk>", {}),
    "xlm-roberta": ("XLMRobertaTokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {}),
    "camembert": ("CamembertTokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {}),
    "mbart": ("MBartTokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {}),
    "mbart de": ("MBartTokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {"src_lang": "de_DE"}),
    "mbart50": ("MBart50Tokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {"src_lang": "fr_XX"}),
    "nllb": ("NllbTokenizer", "sentencepiece.bpe.model", BPE, FAIRSEQ, {"src_lang": "deu_Latn"}),
    "nllb legacy": ("NllbTokenizer", "sentencepiece.bpe.model", BPE, FAIRSEQ, {"legacy_behaviour": True}),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_sentencepiece_files(tmp_path, case, mapped):
    name, file, kind, first, options = CASES[case]
    if mapped and name in ("MBartTokenizer", "LlamaTokenizer"):
        pytest.skip("transformers leaves the map of characters out")
    model = small_model(kind, first, charsmap=MAP if mapped else b"", byte_fallback=name == "LlamaTokenizer")
    put_model(tmp_path, file, model)
    write(tmp_path, tokenizer_config=options | {"tokenizer_class": name})
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    ours = folder_tokenizer(tmp_path)
    compare(ours, theirs)
