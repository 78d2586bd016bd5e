"""GGUF architectures of recurrent models, and of hybrids of recurrence and attention."""

from __future__ import annotations

from lamina.checkpoint.gguf.architecture import Architecture

RECURRENT: dict[str, Architecture] = {}
