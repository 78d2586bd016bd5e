"""Lamina: language models that remember.

import lamina
model = lamina.load("path/to/checkpoint")
print(model.generate("The sky is", max_new_tokens=20).text[0])
"""

from lamina.cache import Cache, Codec, Source
from lamina.checking import Report, verify
from lamina.errors import CapacityError, InputError, LaminaError, RewindError
from lamina.loading import load
from lamina.model import Model

__all__ = [
    "Cache", "CapacityError", "Codec", "InputError", "LaminaError", "Model", "Report", "RewindError", "Source", "load",
    "verify",
]  # fmt: skip
__version__ = "0.1.0"
