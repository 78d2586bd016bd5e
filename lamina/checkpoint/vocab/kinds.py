"""Which function builds a folder's tokenizer: by tokenizer_class, else by the model's family, else by its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lamina.checkpoint.tokenizer import Tokenizer, UnknownTokenizer
from lamina.checkpoint.vocab import jieba, mapped, moses, pieces, ranks, words
from lamina.checkpoint.vocab.files import TokenizerFiles, read_optional
from lamina.errors import CheckpointError, LaminaError

Build = Callable[[TokenizerFiles], Tokenizer]

CLASSES: dict[str, Build] = {
    "Llama": pieces.llama, "CodeLlama": pieces.llama, "Phi3": pieces.llama, "Gemma": pieces.gemma, "T5": pieces.t5,
    "MT5": pieces.t5, "Pegasus": pieces.pegasus, "XLMRoberta": pieces.xlm_roberta, "Camembert": pieces.camembert,
    "XGLM": pieces.xglm, "MBart": pieces.mbart, "MBart50": pieces.mbart50, "Nllb": pieces.nllb,
    "PLBart": mapped.plbart, "BertGeneration": mapped.bert_generation,
    "Marian": mapped.marian, "M2M100": mapped.m2m_100, "BlenderbotSmall": mapped.blenderbot_small,
    "FSMT": moses.fsmt, "BioGpt": moses.biogpt,
    "GPT2": words.gpt2, "CodeGen": words.gpt2, "Qwen2": words.qwen2, "Qwen3_5": words.qwen3_5,
    "GPTNeoX": words.gpt_neox, "Cohere": words.cohere, "RoFormer": jieba.roformer, "Whisper": words.whisper,
    "Blenderbot": words.blenderbot, "OpenAIGPT": words.openai_gpt,
    **dict.fromkeys(("Roberta", "Bart", "LED", "Longformer", "Mvp"), words.roberta),
    **dict.fromkeys(("Bert", "DistilBert", "Electra", "ConvBert", "MobileBert", "LayoutLM"), words.bert),
}  # fmt: skip
"""By tokenizer_class without its ending, Tokenizer or TokenizerFast."""

FAMILIES: dict[str, str] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "code_llama", "phi3", "phimoe", "minicpm3"), "Llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "t5gemma"), "Gemma"),
    "recurrent_gemma": "Gemma",
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers"), "T5"),
    **dict.fromkeys(("gpt2", "gptj", "gpt_neo", "codegen", "opt", "phi"), "GPT2"),
    **dict.fromkeys(("roberta", "bart", "longformer", "led", "mvp"), "Roberta"),
    **dict.fromkeys(("bert", "electra", "distilbert", "convbert"), "Bert"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5"),
    **dict.fromkeys(("gpt_neox", "olmo", "olmoe", "mamba", "mamba2", "falcon_mamba", "rwkv", "mpt"), "GPTNeoX"),
    "cohere": "Cohere", "cohere2": "Cohere", "roformer": "RoFormer",
    "bigbird_pegasus": "Pegasus",
    "pegasus": "Pegasus", "xlm-roberta": "XLMRoberta", "camembert": "Camembert", "xglm": "XGLM", "mbart": "MBart",
    "mbart50": "MBart50", "nllb": "Nllb", "nllb-moe": "Nllb", "plbart": "PLBart", "marian": "Marian",
    "m2m_100": "M2M100", "bert-generation": "BertGeneration", "blenderbot": "Blenderbot",
    "blenderbot-small": "BlenderbotSmall", "whisper": "Whisper", "openai-gpt": "OpenAIGPT",
    "fsmt": "FSMT", "biogpt": "BioGpt",
}  # fmt: skip
"""By model_type, for folders that name no tokenizer_class."""

WITHOUT_MODEL = (words.gpt2, words.qwen2, words.whisper, words.roberta, words.bert, words.blenderbot,
                 words.openai_gpt, words.qwen3_5, words.gpt_neox, words.cohere, mapped.blenderbot_small, moses.fsmt,
                 moses.biogpt, jieba.roformer)  # fmt: skip
"""Kinds that need no SentencePiece model."""

GENERAL = (None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that say nothing about the kind of tokenizer."""

RANKED: dict[str, Build] = {"tekken.json": ranks.tekken, "tiktoken.model": ranks.tiktoken}
"""Files that say themselves how text is cut."""

VOCABULARIES = (*pieces.FILES, "vocab.json", "vocab.txt", "vocab-src.json", "tokenizer.tiktoken", *RANKED)


OWN_FILES = {
    "Marian": ("source.spm", "vocab.json"),
    "M2M100": ("sentencepiece.bpe.model", "vocab.json"),
    "BlenderbotSmall": ("vocab.json", "merges.txt"),
    "BioGpt": ("vocab.json", "merges.txt"),
    "FSMT": ("vocab-src.json", "merges.txt"),
    "RoFormer": ("tokenizer.json",),
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
    if (ranked := next((RANKED[name] for name in found if name in RANKED), None)) is not None:
        return ranked
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
    if not found and not own_files(path):
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
