"""Kinds of setting values: what a value must be, how it is normalised, and its type for editors.

`kind.read(value)` returns the value in the one form that the rest of the package reads, or raises `Wrong` with the end
of the sentence "it must be …". `kind.kept` is the type of that form and `kind.given` the type that callers may pass,
both as source text, from which the types for editors are written (docs/setting_types.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol

import numpy as np

MAX_TOKENS = 2**31 - 1
"""Largest number of tokens and largest id: captured steps and the sampling noise store positions in 32 bits."""
LARGE = 1e9
"""Penalties and scales up to this size keep scores finite."""
LARGEST_BIAS = 1e30
"""Of sequence_bias: people write -1e9 and the like for "never"."""


class Wrong(Exception):
    """A value is not of its kind. The text says what it must be."""


class ValueKind(Protocol):
    """What a setting's value must be."""

    @property
    def kept(self) -> str:
        """Type of the normalised value."""

    @property
    def given(self) -> str:
        """Type that callers may pass, without None."""

    def read(self, value: Any) -> Any:
        """The normalised value; `value` is not None. Raises `Wrong`."""


@dataclass(frozen=True)
class Flag:
    """True or False; 0 and 1 are refused."""

    kept: ClassVar[str] = "bool"
    given: ClassVar[str] = "bool"

    def read(self, value: Any) -> bool:
        if not isinstance(value, bool | np.bool_):
            raise Wrong("True or False")
        return bool(value)


@dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most`.

    >>> Whole(0, 9).read(5.0)
    5
    """

    least: int
    most: int = MAX_TOKENS
    kept: ClassVar[str] = "int"
    given: ClassVar[str] = "int"

    def read(self, value: Any) -> int:
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not (isinstance(value, Integral) or value % 1 == 0) or value < self.least:
            raise Wrong(f"a whole number, at least {self.least}")
        if value > self.most:
            raise Wrong(f"a whole number, at most {self.most}")
        return int(value)


@dataclass(frozen=True)
class Number:
    """A finite number from `low` to `high`; above `low` if `above`.

    >>> Number(0, 1).read(1)
    1.0
    """

    low: float
    high: float = LARGE
    above: bool = False
    kept: ClassVar[str] = "float"
    given: ClassVar[str] = "float"

    def read(self, value: Any) -> float:
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not self.low <= value <= self.high or (self.above and value == self.low):
            bound = "above" if self.above else "at least"
            raise Wrong(f"a number, {bound} {self.low:g} and at most {self.high:g}")
        return float(value)


@dataclass(frozen=True)
class OneOf:
    """One of a few values, compared by identity or as text: 1 is not True."""

    values: tuple[Any, ...]
    type: str
    """The type of the values, as source text."""

    @property
    def kept(self) -> str:
        return self.type

    @property
    def given(self) -> str:
        return self.type

    def read(self, value: Any) -> Any:
        if not any(value is one or (isinstance(value, str) and value == one) for one in self.values):
            raise Wrong("one of " + ", ".join(repr(one) for one in self.values))
        return value


@dataclass(frozen=True)
class TokenId(Whole):
    """An id of the vocabulary."""

    least: int = 0


@dataclass(frozen=True)
class TokenIds:
    """One id or several; kept as a tuple without repetitions. With `single`, one id is kept as an int.

    >>> TokenIds().read([4, 5, 4]), TokenIds().read(4), TokenIds(single=True).read(4)
    ((4, 5), (4,), 4)
    """

    single: bool = False
    given: ClassVar[str] = "GivenIds"

    @property
    def kept(self) -> str:
        return "int | Ids" if self.single else "Ids"

    def read(self, value: Any) -> int | tuple[int, ...]:
        ids = read_ids(value)
        if self.single:
            return ids[0] if isinstance(value, Integral) else ids
        return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class Texts:
    """One text or several, none of them empty; kept as a tuple."""

    kept: ClassVar[str] = "tuple[str, ...]"
    given: ClassVar[str] = "str | Sequence[str]"

    def read(self, value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else tuple(listed(value, "a text or a list of texts"))
        if not all(isinstance(one, str) and one for one in texts):
            raise Wrong("a text or a list of texts, none of them empty")
        return texts


@dataclass(frozen=True)
class Function:
    """A callable; `signature` says in words how it is called, `type` is its type as source text."""

    signature: str
    type: str

    @property
    def kept(self) -> str:
        return self.type

    @property
    def given(self) -> str:
        return self.type

    def read(self, value: Any) -> Any:
        if not callable(value):
            raise Wrong(f"a function {self.signature}")
        return value


@dataclass(frozen=True)
class Functions:
    """One callable or several, kept as a tuple; `type` is the type of one, as source text."""

    type: str

    @property
    def kept(self) -> str:
        return f"tuple[{self.type}, ...]"

    @property
    def given(self) -> str:
        return f"{self.type} | Sequence[{self.type}]"

    def read(self, value: Any) -> tuple[Any, ...]:
        functions = (value,) if callable(value) else tuple(listed(value, "a function or a list of functions"))
        if not all(callable(one) for one in functions):
            raise Wrong("a function or a list of functions")
        return functions


@dataclass(frozen=True)
class Custom:
    """Any other kind: `reader` normalises the value or raises `Wrong`; None keeps it as it is."""

    kept: str = "Any"
    given: str = "Any"
    reader: Callable[[Any], Any] | None = None

    def read(self, value: Any) -> Any:
        return value if self.reader is None else self.reader(value)


def read_ids(value: Any, what: str = "an id or a list of ids") -> tuple[int, ...]:
    """One id, or a list, array or tensor of ids, as a tuple; `what` names them in the error."""
    ids = [value] if isinstance(value, Integral) else listed(value, what)
    if any(isinstance(id, bool) or not isinstance(id, Integral) or not 0 <= int(id) <= MAX_TOKENS for id in ids):
        raise Wrong(what)
    return tuple(int(id) for id in ids)


def read_id_sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    """Lists of ids, as bad_words_ids has them."""
    what = "a list of id lists, none of them empty"
    sequences = tuple(read_ids(listed(one, what), what) for one in listed(value, what))
    if not all(sequences):
        raise Wrong(what)
    return sequences


def read_biases(value: Any) -> dict[tuple[int, ...], float]:
    """{(id, …): bias} or [[[id, …], bias], …], as sequence_bias has them."""
    what = "a mapping of id tuples to numbers"
    pairs = list(value.items()) if isinstance(value, Mapping) else [listed(one, what) for one in listed(value, what)]
    if any(len(pair) != 2 for pair in pairs):
        raise Wrong(what)
    return {read_ids(ids, what): Number(-LARGEST_BIAS, LARGEST_BIAS).read(bias) for ids, bias in pairs}


def listed(value: Any, what: str) -> list[Any]:
    """The items of a list, array or tensor; `what` names the expected value in the error."""
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
        value = value if isinstance(value, list) else [value]
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise Wrong(what)
    return list(value)
