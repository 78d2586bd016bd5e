"""Tokenizers whose vocabulary is a SentencePiece model, one function for each kind.

The kinds differ in three ways: how ids follow from the model's own (fairseq puts four tokens first, others append
some), how spaces are treated before the model sees them, and which tokens come around a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.tokenizer import Tokenizer, token_text
from lamina.checkpoint.vocab import languages
from lamina.checkpoint.vocab.files import LANGUAGE, TokenizerFiles, masked_left
from lamina.checkpoint.vocab.sentencepiece import (
    BPE,
    CONTROL,
    SPACE,
    USER_DEFINED,
    SentencePieceModel,
    read_model,
)
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend
    from tokenizers.normalizers import Normalizer

Scores = list[tuple[str, float]]
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
BASE = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
PAIRED = BASE | dict(sep_token="</s>", cls_token="<s>", mask_token="<mask>")
FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "source.spm")


def find_model(files: TokenizerFiles) -> SentencePieceModel:
    for name in FILES:
        if (file := files.path / name).is_file():
            return read_model(file)
    raise CheckpointError(f"{files.path} has no SentencePiece model: none of {', '.join(FILES)}")


def llama(files: TokenizerFiles) -> Tokenizer:
    """BPE with bytes for unknown characters; a space before the text, or before each part of it (legacy)."""
    from tokenizers import decoders, pre_tokenizers

    model = find_model(files)
    if model.kind != BPE:
        return sentence_piece(files)
    tokens = files.tokens(dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>"))
    backend = bpe(model, [piece.text for piece in model.pieces], byte_fallback=True)
    prefix = files.options.get("add_prefix_space") is not False
    scheme = "never" if not prefix else "always" if files.options.get("legacy", False) else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return files.finish(backend, tokens, extra=added_pieces(model), **files.around(tokens))


def gemma(files: TokenizerFiles) -> Tokenizer:
    """BPE with bytes for unknown characters; spaces are characters like others."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    model = find_model(files)
    names = dict(bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>", mask_token="<mask>")
    tokens = files.tokens(names)
    texts = [piece.text for piece in model.pieces]
    if "\t" not in texts and "<0x09>" in texts:  # models of the first release have the tab as a byte only
        texts[texts.index("<0x09>")] = "\t"
    backend = bpe(model, texts, unk_token=tokens["unk_token"].content, byte_fallback=True)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return files.finish(backend, tokens, extra=added_pieces(model), **files.around(tokens))


def t5(files: TokenizerFiles) -> Tokenizer:
    """The pieces, then <extra_id_99> down to <extra_id_0>; `</s>` after each text."""
    model = find_model(files)
    tokens = files.tokens(dict(eos_token="</s>", unk_token="<unk>", pad_token="<pad>"))
    extra = [f"<extra_id_{i}>" for i in reversed(range(files.options.get("extra_ids", 100)))]
    scores = [*piece_scores(model), *((text, 0.0) for text in extra)]
    backend = unigram(scores, 2, charsmap(model), split_spaces=True)
    eos = tokens["eos_token"].content
    return files.finish(backend, tokens, after=[eos], extra=[*added_pieces(model), *extra])


def pegasus(files: TokenizerFiles) -> Tokenizer:
    """Pad, eos, two masks and <unk_2> … come first, so that pieces begin at id 103 + 2; eos after each text."""
    from tokenizers import Regex, normalizers

    model = find_model(files)
    tokens = files.tokens(dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>", mask_token="<mask_2>"))
    offset, sentence = files.options.get("offset", 103), files.options.get("mask_token_sent", "<mask_1>")
    first = [tokens["pad_token"].content, tokens["eos_token"].content]
    extra = [f"<unk_{i}>" for i in range(2, offset)]
    if offset:
        first += [text for text in (sentence, tokens["mask_token"].content) if text is not None]
    scores = [(text, 0.0) for text in first] + [(text, -100.0) for text in extra] + piece_scores(model)[2:]
    steps = charsmap(model) or [normalizers.Replace(Regex(r"\n"), " ")]
    unknown = scores.index((tokens["unk_token"].content, 0.0), 1)
    backend = unigram(scores, unknown, [*steps, single_spaces()])
    masks = [sentence] if sentence is not None else []
    return files.finish(backend, tokens, after=[first[1]], extra=[*masks, *extra])


def xlm_roberta(files: TokenizerFiles) -> Tokenizer:
    model, tokens = find_model(files), files.tokens(PAIRED)
    scores = [*fairseq(model, tokens), (tokens["mask_token"].content, 0.0)]
    prefix = files.options.get("add_prefix_space", True)
    backend = unigram(scores, 3, charsmap(model), split_spaces=True, prefix=prefix)
    around: dict[str, Any] = dict(before=[tokens["bos_token"].content], after=[tokens["eos_token"].content])
    return files.finish(backend, tokens, extra=added_pieces(model), **around)


def camembert(files: TokenizerFiles) -> Tokenizer:
    """Five tokens, most of them unused, come first; `<s>` and `</s>` are those of the model."""
    model, tokens = find_model(files), files.tokens(masked_left(PAIRED))
    pad, unknown, mask = (tokens[name].content for name in ("pad_token", "unk_token", "mask_token"))
    first = [("<s>NOTUSED", 0.0), (pad, 0.0), ("</s>NOTUSED", 0.0), (unknown, 0.0), ("<unk>NOTUSED", -100.0)]
    scores = [*first, *piece_scores(model)[1:], (mask, 0.0)]
    prefix = files.options.get("add_prefix_space", True)
    backend = unigram(scores, 3, charsmap(model), split_spaces=True, prefix=prefix)
    around: dict[str, Any] = dict(before=[tokens["bos_token"].content], after=[tokens["eos_token"].content])
    return files.finish(backend, tokens, extra=added_pieces(model), **around)


def xglm(files: TokenizerFiles) -> Tokenizer:
    model, tokens = find_model(files), files.tokens({k: v for k, v in PAIRED.items() if k != "mask_token"})
    made_up = [f"<madeupword{i}>" for i in range(7)]
    scores = [*fairseq(model, tokens), *((text, 0.0) for text in made_up)]
    prefix = files.options.get("add_prefix_space", True)
    backend = unigram(scores, 3, [*charsmap(model), single_spaces()], prefix=prefix)
    return files.finish(backend, tokens, before=[tokens["eos_token"].content], extra=[*added_pieces(model), *made_up])


def mbart(files: TokenizerFiles) -> Tokenizer:
    """After each text come `</s>` and the code of its language, src_lang (`en_XX`)."""
    model, tokens = find_model(files), files.tokens(masked_left(PAIRED))
    scores = [*fairseq(model, tokens), *((code, 0.0) for code in (*languages.MBART, tokens["mask_token"].content))]
    backend = unigram(scores, 3, charsmap(model), split_spaces=True)
    spoken: dict[str, Any] = dict(languages=codes_of(languages.MBART), language="en_XX")
    extra: list[str | AddedToken] = [*added_pieces(model), *languages.MBART]
    return files.finish(backend, tokens, after=[tokens["eos_token"].content, LANGUAGE], extra=extra, **spoken)


def mbart50(files: TokenizerFiles) -> Tokenizer:
    """The code of the language, src_lang (`en_XX`), before each text; `</s>` after it."""
    model, tokens = find_model(files), files.tokens(masked_left(PAIRED))
    scores = [*fairseq(model, tokens), *((code, 0.0) for code in (*languages.MBART50, tokens["mask_token"].content))]
    backend = unigram(scores, 3, [*charsmap(model), single_spaces()])
    spoken: dict[str, Any] = dict(languages=codes_of(languages.MBART50), language="en_XX")
    around: dict[str, Any] = dict(before=[LANGUAGE], after=[tokens["eos_token"].content], **spoken)
    return files.finish(backend, tokens, extra=[*added_pieces(model), *languages.MBART50], **around)


def nllb(files: TokenizerFiles) -> Tokenizer:
    """BPE; language codes follow the pieces. src_lang (`eng_Latn`) before each text and `</s>` after it, or, with
    legacy_behaviour, both after it."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    model, tokens = find_model(files), files.tokens(masked_left(PAIRED))
    texts = [text for text, _ in fairseq(model, tokens)]
    mask = tokens["mask_token"].content
    codes = [text for text in map(token_text, files.extra) if text is not None] or languages.NLLB
    if not files.added:
        texts += [text for text in (*codes, mask) if text not in model.ids]
    backend = bpe(model, texts, unk_token=tokens["unk_token"].content)
    if steps := charsmap(model):
        backend.normalizer = normalizers.Sequence([*steps, single_spaces()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always", split=True)
    backend.decoder = decoders.Metaspace(SPACE, "always", split=True)
    eos = tokens["eos_token"].content
    legacy = files.options.get("legacy_behaviour", False)
    around: dict[str, Any] = dict(after=[eos, LANGUAGE]) if legacy else dict(before=[LANGUAGE], after=[eos])
    spoken: dict[str, Any] = dict(languages=codes_of(codes), language="eng_Latn")
    return files.finish(backend, tokens, extra=[*added_pieces(model), *codes], **around, **spoken)


def sentence_piece(files: TokenizerFiles) -> Tokenizer:
    """Ids, spaces and normalization as SentencePiece itself has them."""
    model = find_model(files)
    control = [piece.text for piece in model.pieces if piece.type == CONTROL]
    defaults = {key: text for key, text in BASE.items() if text in control}
    tokens = files.tokens(defaults | dict(unk_token=model.pieces[model.unk_id].text))
    backend = exact(model, [piece.text for piece in model.pieces], unk_id=model.unk_id)
    return files.finish(backend, tokens, extra=added_pieces(model), **files.around(tokens))


def exact(model: SentencePieceModel, texts: Sequence[str], unk_id: int) -> Backend:
    """A backend that cuts text as SentencePiece does.

    texts  of the tokens, by id; those that are pieces of the model have their scores
    """
    from tokenizers import Regex, decoders, normalizers

    backend = piece_model(model, texts, unk_id)
    steps = charsmap(model)
    if model.collapse_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), single_spaces()]
    steps.append(normalizers.Replace(" ", SPACE))
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = None
    ends: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*ends, decoders.Strip(" ", 1, 0)] if model.dummy_prefix else ends)
    return backend


def piece_model(model: SentencePieceModel, texts: Sequence[str], unk_id: int) -> Backend:
    """A backend with the model alone: text must be normalized."""
    if model.kind == BPE:
        return bpe(model, texts, unk_token=texts[unk_id], byte_fallback=model.byte_fallback)
    worst = min(piece.score for piece in model.pieces)
    scores = {piece.text: piece.score for piece in model.pieces}
    found = [(text, scores.get(text, worst)) for text in texts]
    return unigram(found, unk_id, [], fallback=model.byte_fallback)


def unigram(
    scores: Scores,
    unk_id: int,
    steps: Sequence[Normalizer],
    *,
    split_spaces: bool = False,
    prefix: bool = True,
    fallback: bool = False,
) -> Backend:
    """A unigram model.

    steps         how text is normalized
    split_spaces  whether text is cut at any white space first, so that the amount of it is lost
    prefix        whether words without a space before them get one
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    backend = Backend(models.Unigram(scores, unk_id, fallback))
    if steps:
        backend.normalizer = normalizers.Sequence(list(steps))
    spaces = pre_tokenizers.Metaspace(SPACE, "always" if prefix else "never")
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces]) if split_spaces else spaces
    )
    backend.decoder = decoders.Metaspace(SPACE, "always" if prefix else "never")
    return backend


def bpe(
    model: SentencePieceModel, texts: Sequence[str], *, unk_token: str | None = None, byte_fallback: bool = False
) -> Backend:
    """A BPE model: two pieces whose joined text is a piece are merged, pieces with lower ids in the model first.

    texts  of the tokens, by id
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    ids = model.ids
    pairs = [
        (index, cut, text[:cut], text[cut:])
        for text, index in ids.items()
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    known = set(texts)
    merges = [(left, right) for *_, left, right in sorted(pairs) if {left, right, left + right} <= known]
    vocab = {text: index for index, text in enumerate(texts)}
    return Backend(models.BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=byte_fallback))


def codes_of(texts: Sequence[str]) -> dict[str, str]:
    """Languages whose tokens are their codes."""
    return {text: text for text in texts}


def piece_scores(model: SentencePieceModel) -> Scores:
    return [(piece.text, piece.score) for piece in model.pieces]


def fairseq(model: SentencePieceModel, tokens: Mapping[str, AddedToken]) -> Scores:
    """`<s>`, `<pad>`, `</s>`, `<unk>`, then the pieces without their first three, which are `<unk>`, `<s>`, `</s>`."""
    first = (tokens[name].content for name in ("bos_token", "pad_token", "eos_token", "unk_token"))
    return [*((text, 0.0) for text in first), *piece_scores(model)[3:]]


def added_pieces(model: SentencePieceModel) -> list[AddedToken]:
    """Pieces that are found in a text before the model cuts it: control pieces, which are special, and user's own."""
    from tokenizers import AddedToken

    return [
        AddedToken(piece.text, special=piece.type == CONTROL, normalized=False)
        for piece in model.pieces
        if piece.type in (CONTROL, USER_DEFINED)
    ]


def charsmap(model: SentencePieceModel) -> list[Normalizer]:
    """How the model normalizes characters; nothing if it does not."""
    from tokenizers import normalizers

    return [normalizers.Precompiled(model.charsmap)] if model.charsmap else []


def single_spaces() -> Normalizer:
    from tokenizers import Regex, normalizers

    return normalizers.Replace(Regex(" {2,}"), " ")
