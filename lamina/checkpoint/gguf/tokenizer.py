"""A tokenizer rebuilt from GGUF metadata: tokens, merges or scores, token types, and how text is first split.

Three kinds: "gpt2" (byte-level BPE, with the split that tokenizer.ggml.pre names), "llama" (SentencePiece BPE, whose
merges follow from the scores) and "gemma4" (the same with merges).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.chat.template import gguf_templates
from lamina.checkpoint.gguf.splits import SPLITS
from lamina.checkpoint.tokenizer import Tokenizer, UnknownTokenizer
from lamina.errors import CheckpointError
from lamina.notices import notice

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space


def gguf_tokenizer(metadata: Mapping[str, Any], eos_ids: Sequence[int]) -> Tokenizer | None:
    """The tokenizer a GGUF file describes, or None where it has none."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind = value("model", "none")
    if kind in ("none", "no_vocab"):
        return None
    builders = {"gemma4": merged_pieces, "gpt2": byte_level, "llama": sentence_piece}
    if kind not in builders:
        raise UnknownTokenizer(f"the GGUF tokenizer is of kind {kind!r}; supported are: {', '.join(sorted(builders))}")
    tokens: list[str] = value("tokens", [])
    if not tokens:
        raise CheckpointError(f"the GGUF tokenizer of kind {kind!r} has no tokenizer.ggml.tokens")
    backend, add_bos = builders[kind](metadata, tokens)
    types = value("token_type", [])
    for special, wanted in ((True, (UNKNOWN, CONTROL)), (False, (USER_DEFINED,))):
        added = [t for t, token_type in zip(tokens, types, strict=False) if token_type in wanted]
        backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])

    def token(kind: str) -> str | None:
        index = value(f"{kind}_token_id")
        if index is not None and index >= len(tokens):
            notice(
                f"tokenizer.ggml.{kind}_token_id is {index}, and the GGUF tokenizer has {len(tokens)} tokens: it is "
                "read as if it were not there",
                unexpected=True,
            )
        return tokens[index] if index is not None and index < len(tokens) else None

    bos, eos = token("bos"), token("eos")
    before = [bos] if bos is not None and value("add_bos_token", add_bos) else []
    after = [eos] if eos is not None and value("add_eos_token", False) else []
    if before or after:
        ids = [(text, tokens.index(text)) for text in dict.fromkeys(before + after)]
        backend.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
    names = {"bos": bos, "eos": eos, "unk": token("unknown"), "pad": token("padding")}
    return Tokenizer(
        backend,
        eos_ids=eos_ids,
        bos_id=None if bos is None else value("bos_token_id"),
        templates=gguf_templates(metadata),
        special_tokens={f"{name}_token": text for name, text in names.items() if text is not None},
    )


def byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Backend, bool]:
    """Byte-level BPE, and whether a bos id comes first where the file does not say."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise UnknownTokenizer(
            f"the GGUF tokenizer splits text by {name!r} (tokenizer.ggml.pre), which is not known; "
            f"known are: {', '.join(sorted(SPLITS))}"
        )
    split = SPLITS[name]
    backend = Backend(build_bpe(models.BPE, tokens, stored_merges(metadata), ignore_merges=split.whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Backend, bool]:
    """SentencePiece BPE: the pair whose joined token scores highest is merged first."""
    scores = metadata.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise CheckpointError(f"the GGUF tokenizer has {len(tokens)} tokens but {len(scores)} scores")
    ids = {text: index for index, text in enumerate(tokens)}
    pairs = [
        (-scores[index], ids[text[:cut]], ids[text[cut:]], text[:cut], text[cut:])
        for index, text in enumerate(tokens)
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    merges = [(left, right) for *_, left, right in sorted(pairs)]
    return piece_backend(metadata, tokens, merges), True


def merged_pieces(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Backend, bool]:
    """SentencePiece BPE whose merges are stored."""
    return piece_backend(metadata, tokens, stored_merges(metadata)), True


def stored_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    if key not in metadata:
        raise CheckpointError(f"the GGUF tokenizer has no {key}, by which text is cut: convert the model again")
    # the space that separates the two halves is not the first character, which may be a space itself
    cuts = [(merge, merge.find(" ", 1)) for merge in metadata[key]]
    if odd := [merge for merge, cut in cuts if cut < 0]:
        raise CheckpointError(f"{key} has {odd[0]!r}, which is not two tokens with a space between them")
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]


def piece_backend(metadata: Mapping[str, Any], tokens: list[str], merges: list[tuple[str, str]]) -> Backend:
    """BPE of text whose spaces are visible, without splitting it into words; unknown characters become bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Backend(build_bpe(models.BPE, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def build_bpe(make: Any, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return make({text: index for index, text in enumerate(tokens)}, merges, **options)
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"the GGUF tokenizer's tokens and merges do not fit: {error}") from error
