"""Lamina: language models that remember.

import lamina
model = lamina.load("path/to/checkpoint")
print(model.generate("The sky is", max_new_tokens=20).text[0])

Names are imported when first used, so `import lamina` and `lamina --help` do not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.attention.window import Chunked, Full, Sliding
    from lamina.audio.transcription import Transcription
    from lamina.bridge.from_transformers import from_transformers
    from lamina.cache import (
        Attention,
        Cache,
        Codec,
        Convolution,
        Cross,
        FieldFormat,
        IndexKeys,
        Keeping,
        Latent,
        Layer,
        Memory,
        Pool,
        Recurrent,
        Shared,
        SharedIndex,
        Source,
        Spec,
        Tokens,
        register_format,
    )
    from lamina.cache.io.cache_file import load_cache
    from lamina.checking import Report
    from lamina.checking.verify import verify
    from lamina.errors import (
        CacheFileError,
        CapacityError,
        CaptureError,
        CheckpointError,
        InputError,
        LaminaError,
        PagesError,
        ProgramError,
        RewindError,
    )
    from lamina.exporting.export import Exported, export
    from lamina.exporting.program import Program
    from lamina.generation import (
        Chat,
        Event,
        PrefixStore,
        Result,
        Score,
        Setting,
        Stream,
        register_setting,
        unregister_setting,
    )
    from lamina.loading import load
    from lamina.model import Model
    from lamina.models import register_family, unregister_family
    from lamina.planning import Plan, plan
    from lamina.planning.inspection import Inspection, inspect
    from lamina.runtime.gpu.backend import register_kernels

__all__ = [
    "Attention", "Cache", "CacheFileError", "CapacityError", "CaptureError", "Chat", "CheckpointError", "Chunked",
    "Codec", "Convolution", "Cross", "Event", "Exported", "FieldFormat", "Full", "IndexKeys", "InputError",
    "Inspection", "Keeping", "LaminaError", "Latent", "Layer", "Memory", "Model", "PagesError", "Plan", "Pool",
    "PrefixStore", "Program", "ProgramError", "Recurrent", "Report", "Result", "RewindError", "Score", "Setting",
    "Shared", "SharedIndex", "Sliding", "Source", "Spec", "Stream", "Tokens", "Transcription", "export",
    "from_transformers", "inspect", "load", "load_cache", "plan", "register_family", "register_format",
    "register_kernels", "register_setting", "unregister_family", "unregister_setting", "verify",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {
    "lamina.attention.window": ("Chunked", "Full", "Sliding"),
    "lamina.audio.transcription": ("Transcription",),
    "lamina.bridge.from_transformers": ("from_transformers",),
    "lamina.cache": (
        "Attention", "Cache", "Codec", "Convolution", "Cross", "FieldFormat", "IndexKeys", "Keeping", "Latent",
        "Layer", "Memory", "Pool", "Recurrent", "Shared", "SharedIndex", "Source", "Spec", "Tokens", "register_format",
    ),
    "lamina.cache.io.cache_file": ("load_cache",),
    "lamina.checking": ("Report",),
    "lamina.checking.verify": ("verify",),
    "lamina.errors": (
        "CacheFileError", "CapacityError", "CaptureError", "CheckpointError", "InputError", "LaminaError",
        "PagesError", "ProgramError", "RewindError",
    ),
    "lamina.exporting.export": ("Exported", "export"),
    "lamina.exporting.program": ("Program",),
    "lamina.generation": (
        "Chat", "Event", "PrefixStore", "Result", "Score", "Setting", "Stream", "register_setting",
        "unregister_setting",
    ),
    "lamina.loading": ("load",),
    "lamina.model": ("Model",),
    "lamina.models": ("register_family", "unregister_family"),
    "lamina.planning": ("Plan", "plan"),
    "lamina.planning.inspection": ("Inspection", "inspect"),
    "lamina.runtime.gpu.backend": ("register_kernels",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # type checkers would take any name for one that exists

    def __getattr__(name: str) -> object:
        """Imports a public name, or a package such as `lamina.cache`, on first use."""
        if name in _HOME:
            found = globals()[name] = getattr(import_module(_HOME[name]), name)
            return found
        if not name.startswith("_"):
            try:
                return import_module(f"lamina.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"lamina.{name}":
                    raise
        raise AttributeError(f"module 'lamina' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
