"""Tokenizers with a plain list of tokens: byte-level BPE (vocab.json and merges.txt) and WordPiece (vocab.txt)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.folder import read_json
from lamina.checkpoint.gguf.splits import QWEN2, QWEN35
from lamina.checkpoint.tokenizer import Tokenizer
from lamina.checkpoint.vocab.files import TokenizerFiles, masked_left
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

END = "<|endoftext|>"
PAIRED = dict(
    bos_token="<s>", eos_token="</s>", sep_token="</s>", cls_token="<s>", unk_token="<unk>", pad_token="<pad>",
    mask_token="<mask>",
)  # fmt: skip

BERT = dict(unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]", cls_token="[CLS]", mask_token="[MASK]")


def gpt2(files: TokenizerFiles) -> Tokenizer:
    """Byte-level BPE; nothing comes around a text unless the options ask for it."""
    tokens = files.tokens(dict(bos_token=END, eos_token=END, unk_token=END))
    return files.finish(byte_level(files), tokens, **files.around(tokens))


def qwen2(files: TokenizerFiles, pattern: str = QWEN2) -> Tokenizer:
    """Byte-level BPE with another split into words, of text in Unicode's form C."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    tokens = files.tokens(dict(eos_token=END, unk_token=END, pad_token=END))
    backend = byte_level(files)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(bool(files.options.get("add_prefix_space")), use_regex=False),
        ]
    )
    return files.finish(backend, tokens, **files.around(tokens))


def qwen3_5(files: TokenizerFiles) -> Tokenizer:
    """The same, with accents as parts of words."""
    return qwen2(files, QWEN35)


def gpt_neox(files: TokenizerFiles) -> Tokenizer:
    """Byte-level BPE of text in Unicode's form C."""
    from tokenizers import normalizers

    tokens = files.tokens(dict(bos_token=END, eos_token=END, unk_token=END, pad_token="<|padding|>"))
    backend = byte_level(files)
    backend.normalizer = normalizers.NFC()
    return files.finish(backend, tokens, **files.around(tokens))


def cohere(files: TokenizerFiles) -> Tokenizer:
    """Byte-level BPE of text in Unicode's form C, in which every digit is a word."""
    from tokenizers import normalizers, pre_tokenizers

    names = dict(
        bos_token="<BOS_TOKEN>", eos_token="<|END_OF_TURN_TOKEN|>", unk_token="<UNK>", sep_token="<SEP>",
        pad_token="<PAD>", cls_token="<CLS>", mask_token="<MASK_TOKEN>",
    )  # fmt: skip
    tokens, backend = files.tokens(names), byte_level(files)
    backend.normalizer = normalizers.NFC()
    assert backend.pre_tokenizer is not None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return files.finish(backend, tokens, **files.around(tokens))


def roberta(files: TokenizerFiles) -> Tokenizer:
    """Byte-level BPE; `<s>` before each text and `</s>` after it."""
    tokens = files.tokens(PAIRED)
    around: dict[str, Any] = dict(before=[tokens["cls_token"].content], after=[tokens["sep_token"].content])
    return files.finish(byte_level(files), tokens, **around)


def blenderbot(files: TokenizerFiles) -> Tokenizer:
    """Byte-level BPE of text with a space before it; `</s>` after it."""
    tokens = files.tokens(masked_left(PAIRED))
    return files.finish(byte_level(files, prefix=True), tokens, after=[tokens["eos_token"].content])


def whisper(files: TokenizerFiles) -> Tokenizer:
    """Byte-level BPE; before each text the tokens that say what it is, as the options language, task and
    predict_timestamps name them."""
    tokens = files.tokens(dict(bos_token=END, eos_token=END, unk_token=END))
    said = (files.options.get("language"), files.options.get("task"))
    names = ["startoftranscript", *(name for name in said if name is not None)]
    if not files.options.get("predict_timestamps", False):
        names.append("notimestamps")
    before = [f"<|{name}|>" for name in names]
    return files.finish(byte_level(files), tokens, before=before, after=[tokens["eos_token"].content])


def byte_level(files: TokenizerFiles, prefix: bool = False) -> Backend:
    """The model of vocab.json and merges.txt.

    prefix  whether text gets a space before it, where the options do not say
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    names = str(files.named("vocab.json")), str(files.named("merges.txt"))
    try:
        backend = Backend(models.BPE.from_file(*names))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"vocab.json and merges.txt of {files.path} do not fit: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(bool(files.options.get("add_prefix_space", prefix)))
    backend.decoder = decoders.ByteLevel()
    return backend


def openai_gpt(files: TokenizerFiles) -> Tokenizer:
    """BPE of lower-case words, whose last piece ends in </w>."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokens = files.tokens(dict(unk_token="<unk>"))
    names = str(files.named("vocab.json")), str(files.named("merges.txt"))
    model: Any = models.BPE.from_file(*names, end_of_word_suffix="</w>", unk_token=tokens["unk_token"].content)
    backend = Backend(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return files.finish(backend, tokens)


def bert(files: TokenizerFiles) -> Tokenizer:
    """WordPiece: the longest piece that fits, from the left; `[CLS]` before each text and `[SEP]` after it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokens, options = files.tokens(BERT), files.options
    vocab = read_lines(files.named("vocab.txt"))
    backend = Backend(models.WordPiece(vocab, unk_token=tokens["unk_token"].content))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        strip_accents=options.get("strip_accents"),
        lowercase=options.get("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    around: dict[str, Any] = dict(before=[tokens["cls_token"].content], after=[tokens["sep_token"].content])
    return files.finish(backend, tokens, **around)


def read_lines(file: Path) -> dict[str, int]:
    """A vocabulary with one token a line."""
    with file.open(encoding="utf-8") as lines:
        return {line.rstrip("\n"): index for index, line in enumerate(lines)}


def read_vocab(file: Path) -> dict[str, int]:
    """A vocabulary as an object: the id of each token."""
    vocab = read_json(file)
    if not all(isinstance(index, int) for index in vocab.values()):
        raise CheckpointError(f"{file} has ids that are no whole numbers")
    return vocab
