"""A checkpoint's config.json, read by attribute, with errors that name what is missing or unknown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lamina.errors import InputError


class Config:
    """
    >>> config = Config({"model_type": "llama", "hidden_size": 64})
    >>> config.hidden_size, config.get("head_dim", 16)
    (64, 16)
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.values[name]
        except KeyError:
            kind = self.values.get("model_type", "this model")
            raise InputError(f"the configuration of {kind} has no {name!r}, which Lamina needs to build it") from None

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or the default where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def require(self, name: str, known: Collection[Any], default: Any = None) -> Any:
        """The value, which must be one of the known ones."""
        value = self.get(name, default)
        if value not in known:
            text = ", ".join(repr(one) for one in known)
            raise InputError(f"{name}={value!r} in the configuration is not supported; known: {text}")
        return value

    def with_values(self, **values: Any) -> Config:
        return Config(self.values | values)
