"""`Config`: a checkpoint's config.json, read by attribute; errors name fields that are missing or out of bounds.

A value is checked when a family reads it (`lamina/config_fields.py` has the bounds); other fields may hold anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lamina.config_fields import FIELDS
from lamina.errors import InputError


class Config:
    """
    >>> config = Config({"model_type": "llama", "hidden_size": 64})
    >>> config.hidden_size, config.get("head_dim", 16)
    (64, 16)
    >>> Config({"hidden_size": "64"}).hidden_size
    Traceback (most recent call last):
    lamina.errors.InputError: hidden_size='64' in the configuration must be a whole number from 1 to 1,000,000
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self.values:
            kind = self.values.get("model_type", "this model")
            raise InputError(f"the configuration of {kind} has no {name!r}, which Lamina needs to build it")
        return self._checked(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value; the default if the field is absent or null."""
        return default if self.values.get(name) is None else self._checked(name)

    def said(self, name: str, default: Any = None) -> Any:
        """The value, which may be null (None); the default if the field is absent."""
        return self.get(name) if name in self.values else default

    def require(self, name: str, known: Collection[Any], default: Any = None) -> Any:
        """The value, which must be one of `known`."""
        value = self.get(name, default)
        if value not in known:
            text = ", ".join(repr(one) for one in known)
            raise InputError(f"{name}={value!r} in the configuration is not supported; known: {text}")
        return value

    def with_aliases(self, aliases: Mapping[str, str]) -> Config:
        """The configuration with fields under further names: new name -> the name it has.

        >>> Config({"n_embd": 64}).with_aliases({"hidden_size": "n_embd"}).hidden_size
        64
        """
        return self.with_values(**{new: self.values[old] for new, old in aliases.items() if old in self.values})

    def with_values(self, **values: Any) -> Config:
        return Config(self.values | values)

    @property
    def head_width(self) -> int:
        """The width of an attention head: head_dim, or hidden_size / num_attention_heads.

        >>> Config({"hidden_size": 64, "num_attention_heads": 4}).head_width
        16
        """
        if (given := self.get("head_dim")) is not None:
            return given
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads:
            raise InputError(
                f"num_attention_heads={heads} in the configuration does not divide hidden_size={width}, and there is "
                "no head_dim"
            )
        return width // heads

    def _checked(self, name: str) -> Any:
        field = FIELDS.get(name)
        return self.values[name] if field is None else field.checked(name, self.values)


EMPTY = Config({})


def config_of(model: object) -> Config:
    """The `Config` that a model was built from; an empty one if it has none, or one of another type."""
    config = getattr(model, "config", None)
    return config if isinstance(config, Config) else EMPTY
