"""`Config`: a checkpoint's config.json, read by attribute; errors name fields that are missing or out of bounds.

A value is checked when a family reads it (`lamina/config_fields.py` has the bounds); other fields may hold anything.
Every read is recorded, so `config.unread` names the fields that no code has looked at: `lamina inspect` lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from lamina.config_fields import FIELDS, NOT_FOR_INFERENCE, UnknownName
from lamina.errors import InputError

ABSENT = object()


class Config:
    """
    >>> config = Config({"model_type": "llama", "hidden_size": 64})
    >>> config.hidden_size, config.get("head_dim", 16)
    (64, 16)
    >>> Config({"hidden_size": "64"}).hidden_size
    Traceback (most recent call last):
    lamina.errors.InputError: hidden_size='64' in the configuration must be a whole number from 1 to 1,000,000
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        seen: set[str] | None = None,
        path: str = "",
        aliases: Mapping[str, str] | None = None,
        given: Collection[str] | None = None,
    ) -> None:
        """
        seen      names that were read, shared with the configuration this one is a part of
        path      where it is in that configuration, such as "text_config."
        aliases   further names of fields: new name -> the name in the file
        given     names of the fields in the file; None: of all values
        """
        self.values, self.path, self.aliases = dict(values), path, dict(aliases or {})
        self.given = frozenset(self.values) if given is None else given
        self.seen: set[str] = set() if seen is None else seen

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self.values:
            raise self._lacks(" or ".join(map(repr, dict.fromkeys((name, self.aliases.get(name, name))))))
        return self._checked(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value; the default if the field is absent or null."""
        if self.values.get(name) is None:
            self._saw(name)
            return default
        return self._checked(name)

    def first(self, *names: str, default: Any = ABSENT) -> Any:
        """The value of the first of these fields that is neither absent nor null; the default if there is none.

        >>> Config({"n_embd": 64, "hidden_size": None}).first("hidden_size", "n_embd")
        64
        """
        found = next((value for value in [self.get(name) for name in names] if value is not None), default)
        if found is ABSENT:
            raise self._lacks(" or ".join(map(repr, names)))
        return found

    def either(self, *names: str, default: Any = ABSENT) -> Any:
        """The same for a field that has several names: a file that has more than one must have the same value in them.

        >>> Config({"num_experts": 8, "num_local_experts": 4}).either("num_experts", "num_local_experts")
        Traceback (most recent call last):
        lamina.errors.InputError: num_experts=8 and num_local_experts=4 in the configuration contradict each other
        """
        given = {name: value for name in names if (value := self.get(name)) is not None}
        if any(value != found for value in given.values() for found in given.values()):
            raise contradiction(given)
        return self.first(*names, default=default)

    def part(self, name: str) -> Config:
        """The object in a field, as a configuration of its own whose reads are recorded here too.

        >>> config = Config({"text_config": {"hidden_size": 64, "dilation": 2}})
        >>> config.part("text_config").hidden_size, config.unread
        (64, ['text_config.dilation'])
        """
        getattr(self, name)  # which checks it
        return Config(self.values[name], self.seen, f"{self.path}{name}.")

    def ignore(self, *names: str) -> None:
        """Marks fields as read that cannot change what this family computes, such as those of its initial weights."""
        self.seen.update(self.path + name for name in names)

    @property
    def unread(self) -> list[str]:
        """The fields that nobody has read, except those that cannot matter for inference (`NOT_FOR_INFERENCE`).

        >>> config = Config({"hidden_size": 64, "dilation": 2, "attention_dropout": 0.1})
        >>> config.hidden_size, config.unread
        (64, ['dilation'])
        """
        given = {name: value for name, value in self.values.items() if name in self.given}
        return list(unread_fields(given, self.seen, self.path))

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

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Where the code within raises `UnknownName`, the error names the field that has this name.

        >>> config = Config({"hidden_act": "mish"})
        >>> with config.naming_fields():
        ...     raise UnknownName("activation", config.hidden_act, ["silu"])
        Traceback (most recent call last):
        lamina.config_fields.UnknownName: hidden_act='mish' in the configuration is not supported; known: silu
        """
        try:
            yield
        except UnknownName as error:
            have = (path for path, value in fields(self.values, self.path) if value == error.name and path in self.seen)
            if (found := next(have, None)) is None:
                raise
            raise UnknownName(found, error.name, error.known, " in the configuration") from None

    def with_aliases(self, aliases: Mapping[str, str]) -> Config:
        """The configuration with fields under further names: new name -> the name it has. A file that has both names
        must have the same value in them, except for the length of the context.

        >>> Config({"n_embd": 64}).with_aliases({"hidden_size": "n_embd"}).hidden_size
        64
        """
        found = {new: old for new, old in aliases.items() if old in self.values}
        for new, old in found.items():
            one, other = self.values[old], self.values.get(new)
            if new != "max_position_embeddings" and None not in (one, other) and one != other:
                raise contradiction({old: one, new: other})
        values = self.values | {new: self.values[old] for new, old in found.items()}
        return Config(values, self.seen, self.path, {**self.aliases, **aliases}, self.given)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        """The configuration with values for fields that are absent.

        >>> Config({"head_dim": 64}).with_defaults({"head_dim": 128, "hidden_act": "silu"}).values
        {'head_dim': 64, 'hidden_act': 'silu'}
        """
        return Config({**defaults, **self.values}, self.seen, self.path, self.aliases, self.given)

    def with_values(self, **values: Any) -> Config:
        """The same with other values; reads of it are recorded here too."""
        return Config(self.values | values, self.seen, self.path, self.aliases, self.given)

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

    def _saw(self, name: str) -> None:
        self.seen.update((self.path + name, self.path + self.aliases.get(name, name)))

    def _checked(self, name: str) -> Any:
        self._saw(name)
        field, shown = FIELDS.get(name), self.aliases.get(name, name)
        shown = shown if self.values.get(shown) is self.values[name] else name  # errors name the field of the file
        value = self.values[name] if field is None else field.checked(shown, self.values)
        return Section(value, self.seen, f"{self.path}{name}.") if isinstance(value, Mapping) else value

    def _lacks(self, what: str) -> InputError:
        kind = self.values.get("model_type", "this model")
        return InputError(f"the configuration of {kind} has no {what}, which Lamina needs to build it")


class Section(dict[str, Any]):
    """An object inside a configuration that records which fields are read. Iterating and copying read all of it."""

    def __init__(self, values: Mapping[str, Any], seen: set[str], path: str) -> None:
        super().__init__(values)
        self.seen, self.path = seen, path

    def __getitem__(self, name: str) -> Any:
        self.seen.add(self.path + name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(self.path + name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.seen.add(f"{self.path}{name}")
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:  # `dict(section)` and `section | …` come here too
        self._read_all()
        return super().__iter__()

    def keys(self) -> Any:
        self._read_all()
        return super().keys()

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def __or__(self, other: Any) -> Any:
        self._read_all()
        return super().__or__(other)

    def _read_all(self) -> None:
        self.seen.add(self.path + "*")


def unread_fields(values: Mapping[str, Any], seen: set[str], path: str) -> Iterator[str]:
    """Names of fields that are not in `seen`; of an object that was read, the fields inside it."""
    for name, value in values.items():
        if any(fnmatchcase(name, pattern) for pattern in NOT_FOR_INFERENCE):
            continue
        if path + name not in seen:
            yield path + name
        elif isinstance(value, Mapping) and f"{path}{name}.*" not in seen:
            yield from unread_fields(value, seen, f"{path}{name}.")


def contradiction(given: Mapping[str, Any]) -> InputError:
    text = " and ".join(f"{name}={value!r}" for name, value in given.items())
    return InputError(f"{text} in the configuration contradict each other")


def fields(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Each field with its path, those of objects inside too."""
    for name, value in values.items():
        yield f"{path}{name}", value  # names are numbers in tables such as id2label
        if isinstance(value, Mapping):
            yield from fields(value, f"{path}{name}.")


EMPTY = Config({})


def config_of(model: object) -> Config:
    """The `Config` that a model was built from; an empty one if it has none, or one of another type."""
    config = getattr(model, "config", None)
    return config if isinstance(config, Config) else EMPTY
