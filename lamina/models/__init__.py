"""Model families, one file each, found by the `model_type` of a checkpoint's configuration.

A family from outside the package is registered with `register_family`, or by an entry point of the group
`lamina_families` in the package that has it: the module named there is imported when a model_type is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from lamina.config import Config
from lamina.errors import InputError
from lamina.model import Model
from lamina.models.text_part import text_part

if TYPE_CHECKING:
    from lamina.checkpoint.gguf.architecture import Architecture

FAMILIES = {
    "llama": "llama:Llama",
    "mistral": "mistral:Mistral",
    "qwen2": "qwen:Qwen2",
    "qwen3": "qwen:Qwen3",
    "gemma": "gemma:Gemma",
    "gemma2": "gemma2:Gemma2",
    "gemma3_text": "gemma3:Gemma3",
    "gemma3n_text": "gemma3n:Gemma3n",
    "gemma4_text": "gemma4:Gemma4",
    "ministral": "mistral:Ministral",
    "ministral3": "mistral:Ministral3",
    "phi": "phi:Phi",
    "phi3": "phi:Phi3",
    "granite": "granite:Granite",
    "cohere": "cohere:Cohere",
    "cohere2": "cohere:Cohere2",
    "olmo": "olmo:Olmo",
    "olmo2": "olmo:Olmo2",
    "olmo3": "olmo:Olmo3",
    "bitnet": "bitnet:BitNet",
    "apertus": "apertus:Apertus",
    "arcee": "arcee:Arcee",
    "cwm": "cwm:Cwm",
    "diffllama": "diffllama:DiffLlama",
    "exaone4": "exaone4:Exaone4",
    "llama4_text": "llama4:Llama4",
    "deepseek_v2": "deepseek:DeepseekV2",
    "deepseek_v3": "deepseek:DeepseekV3",
    "deepseek_v32": "deepseek_sparse:DeepseekV32",
    "glm_moe_dsa": "deepseek_sparse:GlmMoeDsa",
    "longcat_flash": "longcat_flash:LongcatFlash",
    "glm4_moe": "glm_moe:Glm4Moe",
    "dots1": "glm_moe:Dots1",
    "glm4_moe_lite": "deepseek:Glm4MoeLite",
    "solar_open": "glm_moe:SolarOpen",
    "exaone_moe": "glm_moe:ExaoneMoe",
    "granitemoe": "granite_moe:GraniteMoe",
    "granitemoeshared": "granite_moe:GraniteMoeShared",
    "ernie4_5_moe": "ernie_moe:Ernie4_5Moe",
    "hunyuan_v1_moe": "hunyuan:HunYuanMoEV1",
    "flex_olmo": "qwen_moe:FlexOlmo",
    "mimo_v2_flash": "mimo:MiMoV2Flash",
    "mixtral": "mixtral:Mixtral",
    "phimoe": "mixtral:PhiMoe",
    "minimax_m2": "mixtral:MiniMaxM2",
    "qwen2_moe": "qwen_moe:Qwen2Moe",
    "qwen3_moe": "qwen_moe:Qwen3Moe",
    "olmoe": "qwen_moe:OlmoE",
    "gpt_oss": "gpt_oss:GptOss",
    "afmoe": "afmoe:Afmoe",
    "mamba": "mamba:Mamba",
    "falcon_mamba": "mamba:FalconMamba",
    "mamba2": "mamba2:Mamba2",
    "jamba": "jamba:Jamba",
    "minimax": "minimax:MiniMax",
    "recurrent_gemma": "recurrent_gemma:RecurrentGemma",
    "rwkv": "rwkv:Rwkv",
    "kimi_linear": "kimi_linear:KimiLinear",
    "bamba": "bamba:Bamba",
    "granitemoehybrid": "granite_hybrid:GraniteMoeHybrid",
    "nemotron_h": "nemotron_h:NemotronH",
    "zamba": "zamba:Zamba",
    "zamba2": "zamba:Zamba2",
    "olmo_hybrid": "olmo_hybrid:OlmoHybrid",
    "qwen3_5_text": "qwen3_5:Qwen3_5",
    "qwen3_5_moe_text": "qwen3_5:Qwen3_5Moe",
    "lfm2_moe": "lfm2:Lfm2Moe",
    "falcon_h1": "falcon_h1:FalconH1",
    "qwen3_next": "qwen3_next:Qwen3Next",
    "lfm2": "lfm2:Lfm2",
    "t5": "t5:T5",
    "mt5": "t5:MT5",
    "umt5": "t5:UMT5",
    "longt5": "longt5:LongT5",
    "t5gemma": "t5gemma:T5Gemma",
    "switch_transformers": "switch_transformers:SwitchTransformers",
    "bert": "bert:Bert",
    "bert-generation": "bert:Bert",
    "camembert": "bert:Bert",
    "electra": "bert:Bert",
    "roberta": "bert:Bert",
    "xlm-roberta": "bert:Bert",
    "encoder-decoder": "encoder_decoder:Pair",
    "bart": "bart:Bart",
    "plbart": "bart:PLBart",
    "mbart": "bart:MBart",
    "blenderbot": "bart:Blenderbot",
    "blenderbot-small": "bart:BlenderbotSmall",
    "pegasus": "bart:Pegasus",
    "marian": "bart:Marian",
    "m2m_100": "bart:M2M100",
    "mvp": "bart:Mvp",
    "fsmt": "bart:FSMT",
    "bigbird_pegasus": "bigbird_pegasus:BigBirdPegasus",
    "moonshine": "moonshine:Moonshine",
    "whisper": "whisper:Whisper",
    "gpt2": "gpt2:GPT2",
    "gpt_bigcode": "gpt2:GPTBigCode",
    "gpt_neo": "gpt2:GPTNeo",
    "openai-gpt": "openai_gpt:OpenAIGPT",
    "gptj": "gptj:GPTJ",
    "codegen": "gptj:CodeGen",
    "gpt_neox": "gpt_neox:GPTNeoX",
    "opt": "opt:OPT",
    "xglm": "opt:XGLM",
    "biogpt": "opt:BioGPT",
    "falcon": "falcon:Falcon",
    "bloom": "bloom:Bloom",
    "mpt": "mpt:MPT",
    "starcoder2": "starcoder2:Starcoder2",
    "stablelm": "stablelm:StableLm",
    "nemotron": "nemotron:Nemotron",
    "jais2": "nemotron:Jais2",
    "helium": "glm:Helium",
    "ernie4_5": "glm:Ernie4_5",
    "glm": "glm:Glm",
    "glm4": "glm:Glm4",
    "hunyuan_v1_dense": "hunyuan:HunYuanDenseV1",
    "nanochat": "nanochat:NanoChat",
    "seed_oss": "seed_oss:SeedOss",
    "smollm3": "smollm3:SmolLM3",
    "youtu": "youtu:Youtu",
    "minicpm3": "youtu:MiniCPM3",
    "modernbert-decoder": "modernbert_decoder:ModernBertDecoder",
    "roformer": "roformer:RoFormer",
    "doge": "doge:Doge",
}
"""model_type -> "module:class" in this package."""

TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""model_type of a multimodal release -> model_type of its text model, if its `text_config` does not name one."""

OTHER_TYPES = {
    "kimi_k2": "deepseek_v3",
    "minimax_text_01": "minimax",
}
"""model_type of releases that name their own -> the family they are of."""

OUTSIDE: dict[str, type[Model]] = {}
"""Registered families: model_type -> class."""


def register_family(
    model_type: str, cls: type[Model] | None = None, *, gguf: Mapping[str, Architecture] | None = None
) -> Any:
    """Makes checkpoints with this model_type load as `cls`; without `cls`, a decorator.

    cls    a `lamina.Model` with a table of tensor `names`; `cls(config)` builds it
    gguf   GGUF architecture name -> how its metadata and tensors are presented, if the family has GGUF files too

    >>> from lamina.models.llama import Llama
    >>> @register_family("my_llama")
    ... class MyLlama(Llama):
    ...     pass
    >>> family("my_llama").__name__
    'MyLlama'
    >>> unregister_family("my_llama")
    """
    if cls is None:
        return lambda found: register_family(model_type, found, gguf=gguf)
    if not isinstance(cls, type) or not issubclass(cls, Model):
        raise InputError(f"a family is a subclass of lamina.Model, not {cls!r}")
    own = model_type in FAMILIES or model_type in TEXT_PARTS or model_type in OTHER_TYPES
    if own or OUTSIDE.get(model_type, cls) is not cls:
        known = family(model_type)
        raise InputError(f"model_type {model_type!r} is registered: {known.__module__}.{known.__qualname__}")
    if gguf is not None:
        from lamina.checkpoint.gguf.file import ARCHITECTURES  # not needed for other formats

        if others := [name for name, found in gguf.items() if ARCHITECTURES.get(name, found) is not found]:
            raise InputError(f"the GGUF architecture {others[0]!r} is registered already")
        ARCHITECTURES.update(gguf)
    OUTSIDE[model_type] = cls
    return cls


def unregister_family(model_type: str) -> None:
    """Takes back `register_family`; GGUF architectures stay."""
    if OUTSIDE.pop(model_type, None) is None:
        raise InputError(f"model_type {model_type!r} was not registered")


def family(model_type: str) -> type[Model]:
    """The model class for a model_type.

    >>> family("llama").__name__
    'Llama'
    """
    model_type = OTHER_TYPES.get(model_type, model_type)
    if model_type not in FAMILIES and model_type not in TEXT_PARTS and model_type not in OUTSIDE:
        import_outside_families()
    if model_type in OUTSIDE:
        return OUTSIDE[model_type]
    if model_type in TEXT_PARTS:
        return text_part(family(TEXT_PARTS[model_type]))
    if model_type not in FAMILIES:
        known = known_types()
        near = get_close_matches(model_type, known, n=5)
        similar = f"; similar names are: {', '.join(near)}" if near else ""
        raise InputError(
            f"model_type {model_type!r} is not among the {len(known)} that are supported, which docs/families.md lists"
            f'{similar}; lamina.register_family adds one, and lamina.load(path, via="transformers") runs it with the '
            "blocks of transformers"
        )
    module, name = FAMILIES[model_type].split(":")
    return getattr(import_module(f"lamina.models.{module}"), name)


def family_of(config: Config) -> type[Model]:
    """The model class for a configuration. That of a multimodal release names its text model in `text_config`."""
    model_type = config.model_type
    if model_type not in TEXT_PARTS or "text_config" not in config.values:
        return family(model_type)
    return text_part(family(config.part("text_config").get("model_type", TEXT_PARTS[model_type])))


def known_types() -> list[str]:
    """Every model_type that can be loaded, sorted; without `OTHER_TYPES`."""
    parts = (outer for outer, inner in TEXT_PARTS.items() if inner in FAMILIES)
    return sorted({*FAMILIES, *OUTSIDE, *parts})


@cache
def import_outside_families() -> None:
    """Imports the modules of installed packages that register families."""
    for entry in entry_points(group="lamina_families"):
        entry.load()
