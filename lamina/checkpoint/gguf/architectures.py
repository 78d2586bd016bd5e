"""The table of GGUF architectures."""

from __future__ import annotations

from lamina.checkpoint.gguf.architecture import Architecture
from lamina.checkpoint.gguf.dense import DENSE
from lamina.checkpoint.gguf.gemma import GEMMA
from lamina.checkpoint.gguf.mixtures import MIXTURES
from lamina.checkpoint.gguf.recurrent import RECURRENT

ARCHITECTURES: dict[str, Architecture] = {**DENSE, **GEMMA, **MIXTURES, **RECURRENT}
"""Architecture as `general.architecture` says -> how it is presented."""
