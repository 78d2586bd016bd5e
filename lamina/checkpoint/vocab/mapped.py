"""Tokenizers that cut text with one model and look the pieces up in another vocabulary: marian, m2m_100,
blenderbot-small.

Their `backend` has the ids of the model, and decodes. Text is cut by `source`, whose ids `table` translates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.chat.messages import check_text, short
from lamina.checkpoint.tokenizer import Tokenizer
from lamina.checkpoint.vocab import languages
from lamina.checkpoint.vocab.files import LANGUAGE, TokenizerFiles
from lamina.checkpoint.vocab.pieces import exact
from lamina.checkpoint.vocab.sentencepiece import BYTE, CONTROL, SPACE, UNKNOWN, UNUSED, read_model
from lamina.checkpoint.vocab.words import read_vocab
from lamina.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPOKEN = re.compile(r">>.*?<<", re.DOTALL)


class MappedTokenizer(Tokenizer):
    """A tokenizer whose `encode` cuts text with another backend than the one that decodes.

    source    cuts text; its special tokens are those of `backend`
    table     id of `source` -> id of `backend`
    first     ids that come before each text
    last      ids that come after it
    codes     ids of language codes that a text may begin with, such as >>fr<<; None: it begins with none
    """

    def __init__(
        self,
        backend: Backend,
        *,
        source: Backend,
        table: Sequence[int],
        first: Sequence[int] = (),
        last: Sequence[int] = (),
        codes: Mapping[str, int] | None = None,
        unknown: int = 0,
        **options: Any,
    ) -> None:
        self._first, self._last = list(first), list(last)
        super().__init__(backend, **options)
        self._source, self._table, self._codes, self._unknown = source, table, codes, unknown

    def encode(self, text: str, special: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise InputError(f"only text can be encoded, not {short(text)}")
        check_text(text, "the text")
        ids = self._cut(text)
        return [*self._first, *ids, *self._last] if special else ids

    def _surround(self, before: Sequence[int], after: Sequence[int]) -> None:
        self._first, self._last = list(before), list(after)

    def _cut(self, text: str) -> list[int]:
        first = []
        if self._codes is not None and (code := SPOKEN.match(text)) is not None:
            first = [self._codes.get(code[0], self._unknown)]
            text = text[code.end() :]
        return first + [self._table[i] for i in self._source.encode(text, add_special_tokens=False).ids]


class SmallBlenderbotTokenizer(MappedTokenizer):
    """Lower-case words, cut at some punctuation; a line break after a word is the word __newln__."""

    def _cut(self, text: str) -> list[int]:
        ids: list[int] = []
        special = {token.content: index for index, token in self.backend.get_added_tokens_decoder().items()}
        for part in re.split(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", text):
            if part in special:
                ids.append(special[part])
                continue
            for word in split_words(part):
                ids += [self._table[piece.id] for piece in self._source.model.tokenize(word)]
        return ids


def split_words(text: str) -> list[str]:
    """
    >>> split_words("Don't stop,\\nplease")
    ['don', "'", 't', 'stop', ',', '__newln__', 'please']
    """
    words = []
    for word in re.findall(r"\S+\n?", text):
        word = re.sub("([.,!?()])", r" \1", word)
        word = re.sub("(')", r" \1 ", word)
        word = re.sub(r"\s{2,}", " ", word).replace("\n", " __newln__")
        words += [part.lower() for part in word.split(" ") if part]
    return words


def marian(files: TokenizerFiles) -> Tokenizer:
    """Text is cut by source.spm; ids are those of vocab.json, or target_vocab.json for what the model writes."""
    tokens = files.tokens(dict(unk_token="<unk>", eos_token="</s>", pad_token="<pad>"))
    vocab = read_vocab(files.named("vocab.json"))
    separate = files.options.get("separate_vocabs", False)
    target = read_vocab(files.named("target_vocab.json")) if separate else vocab
    last = [vocab[tokens["eos_token"].content]]
    codes = {text: index for text, index in vocab.items() if SPOKEN.fullmatch(text)}
    return piece_lookup(files, tokens, "source.spm", vocab, target, last=last, codes=codes)


def m2m_100(files: TokenizerFiles) -> Tokenizer:
    """Text is cut by sentencepiece.bpe.model; the code of its language, src_lang (`en`), comes before it. Codes have
    the ids after those of vocab.json."""
    names = dict(bos_token="<s>", eos_token="</s>", sep_token="</s>", pad_token="<pad>", unk_token="<unk>")
    tokens = files.tokens(names)
    vocab = read_vocab(files.named("vocab.json"))
    named = files.options.get("language_codes", "m2m100")
    lists = {"m2m100": languages.M2M100, "wmt21": languages.WMT21}
    if named not in lists:
        raise CheckpointError(f"language_codes={named!r} of {files.path} is not one of {', '.join(lists)}")
    codes = {f"__{code}__": len(vocab) + index for index, code in enumerate(lists[named])}
    vocab = vocab | codes
    around: dict[str, Any] = dict(before=[LANGUAGE], after=[tokens["eos_token"].content], language="en")
    around["languages"] = {code: f"__{code}__" for code in lists[named]}
    return piece_lookup(files, tokens, "sentencepiece.bpe.model", vocab, vocab, extra=list(codes), **around)


def piece_lookup(
    files: TokenizerFiles,
    tokens: dict[str, Any],
    spm: str,
    vocab: dict[str, int],
    target: dict[str, int],
    extra: Sequence[str] = (),
    **options: Any,
) -> Tokenizer:
    """A tokenizer that cuts text with a SentencePiece model and looks the pieces up in a vocabulary.

    vocab   ids of the pieces of a text
    target  ids of what the model writes
    """
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    unknown = tokens["unk_token"].content
    if unknown not in vocab:
        raise CheckpointError(f"vocab.json of {files.path} lacks the token {unknown!r}")
    model = read_model(files.named(spm))
    special = {token.content for token in tokens.values()} | set(extra)
    # SentencePiece finds these pieces in no text; a text never has the name that they get here
    hidden = (CONTROL, UNKNOWN, UNUSED) if model.byte_fallback else (CONTROL, UNKNOWN, UNUSED, BYTE)
    texts = [piece.text if piece.type not in hidden else f"\0{i}" for i, piece in enumerate(model.pieces)]
    source = exact(model, texts, model.unk_id)
    source.add_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(special)])
    source.add_tokens([files.added[index] for index in sorted(files.added)])
    ids = source.get_vocab()
    table = [vocab[unknown]] * len(ids)
    known = vocab | {token.content: index for index, token in files.added.items()}
    for text, index in ids.items():
        table[index] = known.get(text, vocab[unknown])
    backend = Backend(models.WordLevel(target, unk_token=unknown))
    backend.decoder = decoders.Metaspace(SPACE, "always")
    return files.finish(
        backend,
        tokens,
        extra=extra,
        make=MappedTokenizer,
        source=source,
        table=table,
        unknown=vocab[unknown],
        **options,
    )


def blenderbot_small(files: TokenizerFiles) -> Tokenizer:
    """BPE of words. In vocab.json the pieces before the last of a word end in @@; here, as in merges.txt, the last one
    ends in </w>."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    names = dict(bos_token="__start__", eos_token="__end__", unk_token="__unk__", pad_token="__null__")
    tokens = files.tokens(names)
    named = {token.content for token in tokens.values()}
    written = read_vocab(files.named("vocab.json"))
    vocab: dict[str, int] = {}
    for text, index in written.items():
        inner = text.endswith("@@") and len(text) > 2
        vocab[text if text in named else text[:-2] if inner else f"{text}</w>"] = index
    lines = files.named("merges.txt").read_text(encoding="utf-8").split("\n")[1:-1]
    merges = [(pair[0], pair[1]) for line in lines if len(pair := line.split()) == 2]
    unknown = written[tokens["unk_token"].content]
    table = {index: index for index in vocab.values()}
    for left, right in merges:  # pieces that only lead to others: on their own they are unknown
        for text in (left, right, left + right):
            if text not in vocab:
                vocab[text] = index = max(table) + 1
                table[index] = unknown
    options = dict(unk_token=tokens["unk_token"].content, end_of_word_suffix="</w>", fuse_unk=False)
    backend = Backend(models.BPE(vocab, merges, **options))
    backend.decoder = decoders.BPEDecoder("</w>")
    listed = [table.get(index, unknown) for index in range(max(table) + 1)]
    return files.finish(backend, tokens, make=SmallBlenderbotTokenizer, source=backend, table=listed, unknown=unknown)
