"""Checkpoints: open a folder, a GGUF file or a CTranslate2 model, fill a module from it, and get its tokenizer."""

from __future__ import annotations

from lamina.checkpoint.demo_weights import packaged_smollm2, packaged_whisper
from lamina.checkpoint.loader import fill
from lamina.checkpoint.names import From, Names, Stack
from lamina.checkpoint.source import Checkpoint, config_dtype, open_source
from lamina.checkpoint.tokenizer import TextStream, Tokenizer

__all__ = [
    "Checkpoint",
    "From",
    "Names",
    "Stack",
    "TextStream",
    "Tokenizer",
    "config_dtype",
    "fill",
    "open_source",
    "packaged_smollm2",
    "packaged_whisper",
]
