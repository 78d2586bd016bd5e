"""Lamina: language models that remember.

import lamina
model = lamina.load("path/to/checkpoint")
print(model.generate("The sky is", max_new_tokens=20).text[0])
"""

from lamina.cache import Cache, Codec, Pool, Source
from lamina.cache.file import load_cache
from lamina.checking import Report, verify
from lamina.errors import CacheFileError, CapacityError, InputError, LaminaError, PagesError, RewindError
from lamina.generation import Chat, PrefixStore
from lamina.loading import load
from lamina.model import Model
from lamina.planning import Plan, plan

__all__ = [
    "Cache", "CacheFileError", "CapacityError", "Chat", "Codec", "InputError", "LaminaError", "Model",
    "PagesError", "Plan", "Pool", "PrefixStore", "Report", "RewindError", "Source", "load", "load_cache", "plan",
    "verify",
]  # fmt: skip
__version__ = "0.1.0"
