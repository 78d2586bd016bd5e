"""A tokenizer rebuilt from GGUF metadata: tokens, merges or scores, token types, and how text is first split.

Two kinds: "gpt2" (byte-level BPE, with the split that tokenizer.ggml.pre names) and "llama" (SentencePiece
BPE, whose merges follow from the scores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.chat.template import gguf_templates
from lamina.checkpoint.tokenizer import Tokenizer, UnknownTokenizer
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space


@dataclass(frozen=True)
class Split:
    """How byte-level BPE cuts a text into words: each pattern in turn cuts what the one before left."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken at once, without merging
    add_bos: bool = False  # where the file does not say


SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN2 = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|"
GPT4O = CASED % (SUFFIX + "?", SUFFIX + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
TEKKEN = CASED % ("", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES

PLAIN = Split((GPT2,))
DIGITS = Split((r"\p{N}", GPT2))
SPLITS: dict[str, Split] = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "deepseek-v3": Split(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Han, Hiragana, Katakana
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
        )
    ),
    "tekken": Split((TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "granite-docling", "trillion"), PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        Split((LLAMA3,), whole_words=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), Split((QWEN2,))),
    **dict.fromkeys(("gpt-4o", "llama4"), Split((GPT4O,))),
}


def gguf_tokenizer(metadata: Mapping[str, Any], eos_ids: Sequence[int]) -> Tokenizer | None:
    """The tokenizer a GGUF file describes, or None where it has none."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind = value("model", "none")
    if kind in ("none", "no_vocab"):
        return None
    builders = {"gpt2": byte_level, "llama": sentence_piece}
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
        bos_id=value("bos_token_id"),
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
    # the space that separates the two halves is not the first character, which may be a space itself
    cuts = [(merge, merge.index(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    merges = [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]
    backend = Backend(build_bpe(models.BPE, tokens, merges, ignore_merges=split.whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Backend, bool]:
    """SentencePiece BPE: the pair whose joined token scores highest is merged first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

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
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Backend(build_bpe(models.BPE, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def build_bpe(make: Any, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return make({text: index for index, text in enumerate(tokens)}, merges, **options)
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"the GGUF tokenizer's tokens and merges do not fit: {error}") from error
