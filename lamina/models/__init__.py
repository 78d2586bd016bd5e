"""Model families, one file each, found by the `model_type` of a checkpoint's configuration."""

from __future__ import annotations

from importlib import import_module

from lamina.errors import InputError
from lamina.model import Model

FAMILIES = {
    "llama": "llama:Llama",
    "gemma2": "gemma2:Gemma2",
    "llama4": "llama4:Llama4TextPart",
    "llama4_text": "llama4:Llama4",
    "deepseek_v3": "deepseek_v3:DeepseekV3",
    "mamba": "mamba:Mamba",
    "mamba2": "mamba2:Mamba2",
    "falcon_h1": "falcon_h1:FalconH1",
    "qwen3_next": "qwen3_next:Qwen3Next",
    "lfm2": "lfm2:Lfm2",
    "t5": "t5:T5",
    "whisper": "whisper:Whisper",
}
"""model_type -> "module:class" in this package."""


def family(model_type: str) -> type[Model]:
    """The model class for a model_type.

    >>> family("llama").__name__
    'Llama'
    """
    if model_type not in FAMILIES:
        raise InputError(f"model_type {model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
    module, name = FAMILIES[model_type].split(":")
    return getattr(import_module(f"lamina.models.{module}"), name)
