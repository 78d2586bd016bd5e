"""Which function builds a folder's tokenizer: by tokenizer_class, else by the model's family, else by its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lamina.checkpoint.tokenizer import Tokenizer, UnknownTokenizer
from lamina.checkpoint.vocab import mapped, pieces, words
from lamina.checkpoint.vocab.files import TokenizerFiles, read_optional
from lamina.errors import CheckpointError, LaminaError

Build = Callable[[TokenizerFiles], Tokenizer]

CLASSES: dict[str, Build] = {
    "Llama": pieces.llama, "CodeLlama": pieces.llama, "Phi3": pieces.llama, "Gemma": pieces.gemma, "T5": pieces.t5,
    "MT5": pieces.t5, "Pegasus": pieces.pegasus, "XLMRoberta": pieces.xlm_roberta, "Camembert": pieces.camembert,
    "XGLM": pieces.xglm, "MBart": pieces.mbart, "MBart50": pieces.mbart50, "Nllb": pieces.nllb, "PLBart": pieces.plbart,
    "BertGeneration": pieces.sentence_piece,
    "Marian": mapped.marian, "M2M100": mapped.m2m_100, "BlenderbotSmall": mapped.blenderbot_small,
    "GPT2": words.gpt2, "CodeGen": words.gpt2, "Qwen2": words.qwen2, "Whisper": words.whisper,
    "Blenderbot": words.blenderbot, "OpenAIGPT": words.openai_gpt,
    **dict.fromkeys(("Roberta", "Bart", "LED", "Longformer", "Mvp"), words.roberta),
    **dict.fromkeys(("Bert", "DistilBert", "Electra", "ConvBert", "MobileBert", "LayoutLM"), words.bert),
}  # fmt: skip
"""By tokenizer_class without its ending, Tokenizer or TokenizerFast."""

FAMILIES: dict[str, str] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "code_llama", "phi3", "phimoe", "minicpm3"), "Llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "recurrent_gemma"), "Gemma"),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers"), "T5"),
    **dict.fromkeys(("gpt2", "gptj", "gpt_neo", "codegen", "opt", "phi"), "GPT2"),
    **dict.fromkeys(("roberta", "bart", "longformer", "led"), "Roberta"),
    **dict.fromkeys(("bert", "electra", "distilbert", "convbert"), "Bert"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2"),
    "pegasus": "Pegasus", "xlm-roberta": "XLMRoberta", "camembert": "Camembert", "xglm": "XGLM", "mbart": "MBart",
    "mbart50": "MBart50", "nllb": "Nllb", "nllb-moe": "Nllb", "plbart": "PLBart", "marian": "Marian",
    "m2m_100": "M2M100", "bert-generation": "BertGeneration", "blenderbot": "Blenderbot",
    "blenderbot-small": "BlenderbotSmall", "whisper": "Whisper", "openai-gpt": "OpenAIGPT",
}  # fmt: skip
"""By model_type, for folders that name no tokenizer_class."""

WITHOUT_MODEL = (words.gpt2, words.qwen2, words.whisper, words.roberta, words.bert, words.blenderbot,
                 words.openai_gpt, mapped.blenderbot_small)  # fmt: skip
"""Kinds that need no SentencePiece model."""

GENERAL = (None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that say nothing about the kind of tokenizer."""

VOCABULARIES = (*pieces.FILES, "vocab.json", "vocab.txt", "tokenizer.tiktoken", "tekken.json")


OWN_FILES = {
    "Marian": ("source.spm", "vocab.json"),
    "M2M100": ("sentencepiece.bpe.model", "vocab.json"),
    "BlenderbotSmall": ("vocab.json", "merges.txt"),
}
"""Kinds whose files count even beside a tokenizer.json, which cannot say what they do."""


def class_of(path: Path, options: Mapping[str, Any]) -> str:
    """The class of a folder's tokenizer without its ending, by tokenizer_class or the family of the model; may be "".

    options  tokenizer_config.json
    """
    config = read_optional(path / "config.json")
    said = options.get("tokenizer_class") or config.get("tokenizer_class")
    if said in GENERAL:
        return FAMILIES.get(str(config.get("model_type")), "")
    return str(said).removesuffix("Fast").removesuffix("Tokenizer")


def own_files(path: Path) -> bool:
    """Whether the folder has files that a tokenizer is built from even though there is a tokenizer.json."""
    needed = OWN_FILES.get(class_of(path, read_optional(path / "tokenizer_config.json")), ())
    return bool(needed) and all((path / name).is_file() for name in needed)


def builder(files: TokenizerFiles, found: Sequence[str]) -> Build | None:
    """The function for a folder's tokenizer; None for a kind that is not read.

    found  names of its vocabulary files
    """
    general = files.options.get("tokenizer_class") in GENERAL
    models = any(name in pieces.FILES for name in found)
    build = CLASSES.get(class_of(files.path, files.options))
    if build is not None and (not general or models or build in WITHOUT_MODEL):
        return build
    if models:
        return pieces.sentence_piece
    return words.gpt2 if general and (files.path / "merges.txt").is_file() and "vocab.json" in found else None


def build_tokenizer(path: Path, eos_ids: Sequence[int] = ()) -> Tokenizer | None:
    """The tokenizer of a folder's vocabulary files; None if it has none."""
    found = [name for name in VOCABULARIES if (path / name).is_file()]
    if not found:
        return None
    files = TokenizerFiles(path, eos_ids)
    if (build := builder(files, found)) is not None:
        try:
            return build(files)
        except LaminaError:
            raise
        except Exception as error:  # of tokenizers, which raises nothing more precise; or a token that is not there
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"the tokenizer files of {path} do not fit together: {reason}") from error
    said = files.options.get("tokenizer_class")
    raise UnknownTokenizer(
        f"{path} has {', '.join(found)} but no tokenizer.json, for a tokenizer of class {said or 'unknown'}, which is "
        "not read; save it as a fast tokenizer"
    )
