"""Lamina: language models that remember.

import lamina
model = lamina.load("path/to/checkpoint")
print(model.generate("The sky is", max_new_tokens=20).text[0])

Names are imported when first used, so `import lamina` and `lamina --help` do not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.cache import Cache, Codec, FieldFormat, Pool, Source, register_format
    from lamina.cache.io.cache_file import load_cache
    from lamina.checking import Report
    from lamina.checking.verify import verify
    from lamina.errors import CacheFileError, CapacityError, InputError, LaminaError, PagesError, RewindError
    from lamina.generation import Chat, PrefixStore, Setting, register_setting, unregister_setting
    from lamina.loading import load
    from lamina.model import Model
    from lamina.planning import Plan, plan

__all__ = [
    "Cache", "CacheFileError", "CapacityError", "Chat", "Codec", "FieldFormat", "InputError", "LaminaError", "Model",
    "PagesError", "Plan", "Pool", "PrefixStore", "Report", "RewindError", "Setting", "Source", "load", "load_cache",
    "plan", "register_format", "register_setting", "unregister_setting", "verify",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {
    "lamina.cache": ("Cache", "Codec", "FieldFormat", "Pool", "Source", "register_format"),
    "lamina.cache.io.cache_file": ("load_cache",),
    "lamina.checking": ("Report", "verify"),
    "lamina.errors": ("CacheFileError", "CapacityError", "InputError", "LaminaError", "PagesError", "RewindError"),
    "lamina.generation": ("Chat", "PrefixStore", "Setting", "register_setting", "unregister_setting"),
    "lamina.loading": ("load",),
    "lamina.model": ("Model",),
    "lamina.planning": ("Plan", "plan"),
}
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
