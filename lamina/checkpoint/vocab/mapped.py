"""Tokenizers that cut text with one model and look the pieces up in another vocabulary: marian, m2m_100, plbart,
bert-generation (whose vocabulary is that of the model), blenderbot-small.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.vocab import languages
from lamina.checkpoint.vocab.files import LANGUAGE, TokenizerFiles, masked_left
from lamina.checkpoint.vocab.parted import PartedTokenizer, word_merges
from lamina.checkpoint.vocab.pieces import FAIRSEQ, PAIRED, codes_of, find_model, piece_model
from lamina.checkpoint.vocab.sentencepiece import (
    BYTE,
    CONTROL,
    SPACE,
    UNKNOWN,
    UNUSED,
    SentencePieceModel,
    read_model,
)
from lamina.checkpoint.vocab.words import read_vocab
from lamina.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    from lamina.checkpoint.tokenizer import Tokenizer


class PieceTokenizer(PartedTokenizer):
    """Cuts text as SentencePiece does, and looks the pieces up.

    pieces    the SentencePiece model
    vocab     ids of pieces
    unknown   the id of pieces without one
    codes     whether a text may begin with a language code, such as >>fr<<
    gap       what follows a special token when it is decoded
    joined    whether special tokens are decoded as pieces, between others
    """

    def __init__(
        self,
        backend: Backend,
        *,
        pieces: SentencePieceModel,
        vocab: Mapping[str, int],
        unknown: int,
        codes: bool = False,
        gap: str = "",
        joined: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(backend, **options)
        # SentencePiece finds these pieces in no text; a text never has the name that they get here
        hidden = (CONTROL, UNKNOWN, UNUSED) if pieces.byte_fallback else (CONTROL, UNKNOWN, UNUSED, BYTE)
        texts = [piece.text if piece.type not in hidden else f"\0{i}" for i, piece in enumerate(pieces.pieces)]
        self._pieces, self._source = pieces, piece_model(pieces, texts, pieces.unk_id)
        self._table = [vocab.get(text, unknown) for text in texts]
        self._vocab, self._unknown, self._codes = vocab, unknown, codes
        self._gap, self._joined = gap, joined

    def part_ids(self, text: str) -> list[int]:
        code = []
        if self._codes and text.startswith(">>") and (end := text.find("<<")) >= 0:
            code, text = [self._vocab.get(text[: end + 2], self._unknown)], text[end + 2 :]
        shown = self._pieces.normalized(text)
        return code + [self._table[piece.id] for piece in self._source.model.tokenize(shown)] if shown else code

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        tokens = []
        for index in map(int, ids):
            if index < 0:
                raise InputError(f"token id {index} is negative")
            if (token := self.backend.id_to_token(index)) is not None:
                tokens.append(token)
        special = {text for text, token in self._added.items() if token.special}
        if skip_special:
            tokens, special = [token for token in tokens if token not in special], set()
        text = ""
        run: list[str] = []
        for token in tokens:
            if token in special and not self._joined:
                text, run = f"{text}{self._text(run)}{token}{self._gap}", []
            else:
                run.append(token)
        return (text + self._text(run)).strip()

    def _text(self, pieces: Sequence[str]) -> str:
        """The text of pieces, without the space that was put before it."""
        from tokenizers import decoders

        if not pieces:
            return ""
        steps = [decoders.ByteFallback()] if self._pieces.byte_fallback else []
        text = decoders.Sequence([decoders.Replace(SPACE, " "), *steps, decoders.Fuse()]).decode(list(pieces))
        if self._joined or not (self._pieces.dummy_prefix or self._pieces.collapse_spaces):
            return text
        return text.lstrip(" ") if self._pieces.collapse_spaces else text.removeprefix(" ")


class SmallBlenderbotTokenizer(PartedTokenizer):
    """Lower-case words, cut at some punctuation; a line break after a word is the word __newln__."""

    def __init__(self, backend: Backend, *, table: Sequence[int], **options: Any) -> None:
        super().__init__(backend, **options)
        self._table = table

    def part_ids(self, text: str) -> list[int]:
        return [self._table[piece.id] for word in split_words(text) for piece in self.backend.model.tokenize(word)]


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
    model = read_model(files.named("source.spm"))
    return piece_lookup(files, tokens, model, vocab, target, last=last, codes=True, gap=" ")


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
    model = read_model(files.named("sentencepiece.bpe.model"))
    return piece_lookup(files, tokens, model, vocab, vocab, extra=list(codes), **around)


def plbart(files: TokenizerFiles) -> Tokenizer:
    """After each text come `</s>` and the code of its language, where src_lang names one."""
    model, tokens = find_model(files), files.tokens(masked_left(PAIRED))
    name = files.options.get("language_codes", "base")
    if name not in languages.PLBART:
        raise CheckpointError(f"language_codes={name!r} of {files.path} is not one of {', '.join(languages.PLBART)}")
    codes = languages.PLBART[name]
    texts = [*FAIRSEQ, *(piece.text for piece in model.pieces[3:]), *codes]
    mask = tokens["mask_token"].content
    if name == "base":
        texts.append(mask)
    else:
        tokens.pop("mask_token")
    vocab = {text: index for index, text in enumerate(texts)}
    around: dict[str, Any] = dict(after=[tokens["eos_token"].content, LANGUAGE], joined=True)
    around["languages"] = {code.strip("_"): code for code in codes} | codes_of(codes)
    around["language"] = None if name == "base" else "en_XX"
    also = [] if name == "base" else [mask]  # found in a text, and unknown
    return piece_lookup(files, tokens, model, vocab, vocab, extra=codes, also=also, **around)


def bert_generation(files: TokenizerFiles) -> Tokenizer:
    """Ids, spaces and normalization as SentencePiece itself has them; nothing comes around a text."""
    model = find_model(files)
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>", sep_token="<::::>")
    vocab = {piece.text: index for index, piece in enumerate(model.pieces)}
    return piece_lookup(files, files.tokens(names), model, vocab, vocab, joined=True)


def piece_lookup(
    files: TokenizerFiles,
    tokens: Mapping[str, AddedToken],
    model: SentencePieceModel,
    vocab: Mapping[str, int],
    target: Mapping[str, int],
    extra: Sequence[str] = (),
    also: Sequence[str] = (),
    **options: Any,
) -> Tokenizer:
    """A tokenizer that cuts text with a SentencePiece model and looks the pieces up in a vocabulary.

    vocab   ids of the pieces of a text
    target  ids of what the model writes
    extra   more special tokens
    also    more texts that text is cut at
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    unknown = tokens["unk_token"].content
    if unknown not in vocab:
        raise CheckpointError(f"vocab.json of {files.path} lacks the token {unknown!r}")
    backend = Backend(models.WordLevel(dict(target), unk_token=unknown))
    files.add_to(backend, tokens, extra)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    new = {text: backend.token_to_id(text) for text in added if text not in target}
    known = dict(vocab) | {text: index for text, index in new.items() if index is not None and text not in vocab}
    return files.finish(
        backend,
        tokens,
        extra=extra,
        make=PieceTokenizer,
        pieces=model,
        vocab=vocab,
        unknown=vocab[unknown],
        kept={text: known.get(text, vocab[unknown]) for text in (*added, *also)},
        **options,
    )


def blenderbot_small(files: TokenizerFiles) -> Tokenizer:
    """BPE of words. In vocab.json the pieces before the last of a word end in @@; here, as in merges.txt, the last one
    ends in </w>."""
    from tokenizers import decoders

    names = dict(bos_token="__start__", eos_token="__end__", unk_token="__unk__", pad_token="__null__")
    tokens = files.tokens(names)
    named = {token.content for token in tokens.values()}
    vocab: dict[str, int] = {}
    for text, index in read_vocab(files.named("vocab.json")).items():
        inner = text.endswith("@@") and len(text) > 2
        vocab[text if text in named else text[:-2] if inner else f"{text}</w>"] = index
    lines = files.named("merges.txt").read_text(encoding="utf-8").split("\n")[1:-1]
    merges = [(pair[0], pair[1]) for line in lines if len(pair := line.split()) == 2]
    backend, table = word_merges(vocab, merges, tokens["unk_token"].content)
    backend.decoder = decoders.BPEDecoder("</w>")
    return files.finish(backend, tokens, make=SmallBlenderbotTokenizer, table=table)
