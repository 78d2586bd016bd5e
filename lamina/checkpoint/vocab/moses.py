"""Tokenizers that cut text into words by the rules of Moses, and words by BPE: fsmt and biogpt.

The rules, with lists of abbreviations for each language, are those of the package sacremoses.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.tokenizer import Tokenizer, UnknownTokenizer
from lamina.checkpoint.vocab.files import TokenizerFiles, read_optional
from lamina.checkpoint.vocab.parted import PartedTokenizer, word_merges
from lamina.checkpoint.vocab.words import read_vocab
from lamina.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

PUNCTUATION = str.maketrans(
    {
        **dict.fromkeys("，、", ","), **dict.fromkeys("”“」「《》", '"'), **dict.fromkeys("∶：", ":"), "’": "'",
        "？": "?", "）": ")", "！": "!", "（": "(", "；": ";", "～": "~", "…": "...", "━": "-", "〈": "<", "〉": ">",
        "【": "[", "】": "]", "％": "%", **{chr(0xFF10 + i): str(i) for i in range(10)},
    }
)  # fmt: skip
"""Full-width punctuation and digits as fairseq wrote them before training."""


class MosesTokenizer(PartedTokenizer):
    """langs    the language of texts, and of what the model writes
    model    BPE of words, whose ids `table` translates
    texts    what the model writes, by id
    cleaned  whether punctuation is made uniform, and characters that are not printed are dropped
    lower    whether texts are made lower-case
    """

    def __init__(
        self,
        backend: Backend,
        *,
        langs: tuple[str, str],
        model: Backend,
        table: Sequence[int],
        texts: Mapping[int, str],
        cleaned: bool,
        lower: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(backend, **options)
        (self._source, self._target), self._model, self._table = langs, model, table
        self._texts, self._cleaned, self._lower = texts, cleaned, lower

    def part_ids(self, text: str) -> list[int]:
        text = text.lower() if self._lower else text
        if self._cleaned:
            text = re.sub(r"[。．]\s*", ". ", text.translate(PUNCTUATION))
            text = rules("MosesPunctNormalizer", self._source).normalize(text)
            text = "".join(letter for letter in text if not unicodedata.category(letter).startswith("C"))
        words = rules("MosesTokenizer", self._source).tokenize(text, aggressive_dash_splits=True, escape=True)
        return [self._table[piece.id] for word in words if word for piece in self._model.model.tokenize(word)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        ids = [int(index) for index in ids]
        if ids and min(ids) < 0:
            raise InputError(f"token id {min(ids)} is negative")
        special = {text for text, token in self._added.items() if token.special} if skip_special else set()
        tokens = [text for index in ids if (text := self._texts.get(index)) is not None and text not in special]
        words = "".join(token.replace("</w>", " ") for token in tokens).split()
        return str(rules("MosesDetokenizer", self._target).detokenize(words))


def fsmt(files: TokenizerFiles) -> Tokenizer:
    """Ids of texts are those of vocab-src.json, of what the model writes those of vocab-tgt.json; `</s>` after each
    text."""
    sacremoses()
    options = {**read_optional(files.path / "config.json"), **files.options}
    langs = options.get("langs")
    if not isinstance(langs, list) or len(langs) != 2:
        raise CheckpointError(
            f"langs={langs!r} of {files.path} must be two languages, those of texts and of what is written: "
            'write "langs": ["en", "de"] into tokenizer_config.json'
        )
    tokens = files.tokens(dict(bos_token="<s>", sep_token="</s>", unk_token="<unk>", pad_token="<pad>"))
    source, target = (read_vocab(files.named(f"vocab-{part}.json")) for part in ("src", "tgt"))
    more: dict[str, Any] = dict(langs=tuple(langs), cleaned=True, lower=bool(options.get("do_lower_case", False)))
    return word_lookup(files, tokens, source, target, last=[source[tokens["sep_token"].content]], **more)


def biogpt(files: TokenizerFiles) -> Tokenizer:
    """`</s>` before each text."""
    sacremoses()
    names = dict(bos_token="<s>", eos_token="</s>", sep_token="</s>", unk_token="<unk>", pad_token="<pad>")
    tokens, vocab = files.tokens(names), read_vocab(files.named("vocab.json"))
    more: dict[str, Any] = dict(langs=("en", "en"), cleaned=False)
    return word_lookup(files, tokens, vocab, vocab, first=[vocab[tokens["sep_token"].content]], **more)


def word_lookup(
    files: TokenizerFiles,
    tokens: dict[str, Any],
    vocab: Mapping[str, int],
    target: Mapping[str, int],
    **options: Any,
) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    unknown = tokens["unk_token"].content
    lines = files.named("merges.txt").read_text(encoding="utf-8").split("\n")[:-1]
    merges = [(pair[0], pair[1]) for line in lines if len(pair := line.split()) >= 2]
    model, table = word_merges(vocab, merges, unknown)
    backend = Backend(models.WordLevel(dict(target), unk_token=unknown))
    files.add_to(backend, tokens)
    added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
    kept = {text: vocab.get(text, index) for index, text in added.items()}
    texts = {index: text for text, index in target.items()} | added
    options |= dict(model=model, table=table, texts=texts, kept=kept)
    return files.finish(backend, tokens, make=MosesTokenizer, **options)


@lru_cache(maxsize=16)
def rules(kind: str, lang: str) -> Any:
    """An object of sacremoses for a language, which reads its lists of abbreviations once."""
    return getattr(sacremoses(), kind)(lang=lang)


def sacremoses() -> Any:
    try:
        return import_module("sacremoses")
    except ImportError as error:
        raise UnknownTokenizer("this tokenizer needs the package sacremoses: pip install sacremoses") from error
