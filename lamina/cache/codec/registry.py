"""The formats that a codec may name: the built-in ones and those that other packages register.

    @lamina.register_format("absmax8")
    class AbsMax8(lamina.FieldFormat): ...

    model.new_cache(codec="absmax8")
    model.new_cache(codec=lamina.Codec(keys=8, values="absmax8"))

A name is a word, or a number of bits as in `Codec(keys=8)`. Cache files store the names, so the process that loads a
file must have registered the same formats.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.codec.formats import Field, FieldFormat

FormatName = int | str
FormatFactory = Callable[["Field"], "FieldFormat | None"]
"""Makes the format of one field: a subclass of `FieldFormat`, or a function. None: this field is stored unquantized."""

Factory = TypeVar("Factory", bound=FormatFactory)

PART_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
"""Dtypes that PyTorch can index, fill and copy on every device. A float8 part is stored as uint8."""

_FORMATS: dict[FormatName, FormatFactory] = {}
_BUILT_IN: set[FormatName] = set()
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_CODEC_OF_BITS = re.compile(r"int\d+|k\d+v\d+")


@overload
def register_format(name: FormatName) -> Callable[[Factory], Factory]: ...
@overload
def register_format(name: FormatName, factory: Factory) -> Factory: ...
def register_format(name: FormatName, factory: Any = None) -> Any:
    """Makes a format known under a name, which `codec=` and `Codec(keys=…, values=…)` then accept.

    name      a word, or a number of bits
    factory   a subclass of `FieldFormat`, or a function from a `Field` to a format; without it, `register_format(name)`
              is a decorator

    A name that is taken is refused, unless the same class or function was defined again, as in a notebook.

    >>> lamina.register_format("absmax8", AbsMax8)          # doctest: +SKIP
    >>> model.new_cache(codec="absmax8")                    # doctest: +SKIP
    """
    if factory is None:
        return lambda factory: register_format(name, factory)
    if type(name) is int:
        valid = name > 0
    else:
        valid = isinstance(name, str) and bool(_WORD.fullmatch(name)) and not _CODEC_OF_BITS.fullmatch(name)
    if not valid:
        raise InputError(
            f"a format cannot be named {name!r}: a name is a number of bits, or a word of letters, digits, '_', '.' "
            "and '-' that begins with a letter and is not the name of a codec such as 'int8' or 'k8v4'"
        )
    if not callable(factory):
        raise InputError(f"format {name!r} is {factory!r}: it must be a subclass of lamina.FieldFormat, or a function")
    before = _FORMATS.get(name)
    if before is not None and (name in _BUILT_IN or _definition(before) != _definition(factory)):
        raise InputError(f"there is a format {name!r} already, {before!r}: choose another name")
    _FORMATS[name] = factory
    return factory


def unregister_format(name: FormatName) -> None:
    """Removes a format that `register_format` added. Caches that use it go on; no new one can."""
    if name in _BUILT_IN or name not in _FORMATS:
        raise InputError(f"{name!r} is not a format that was registered from outside the package")
    del _FORMATS[name]


def register_built_in(name: FormatName, factory: FormatFactory) -> None:
    """Registers a format that can neither be removed nor replaced."""
    register_format(name, factory)
    _BUILT_IN.add(name)


def format_names() -> tuple[FormatName, ...]:
    """Every registered name, the built-in ones first.

    >>> format_names()[:6]
    (8, 6, 5, 4, 'fp8', 'plain')
    """
    return tuple(_FORMATS)


def is_registered(name: object) -> bool:
    return type(name) in (int, str) and name in _FORMATS


def check_format_name(name: object, what: str) -> None:
    """Raises InputError unless a format has this name; `what` says where the name was given."""
    if is_registered(name):
        return
    listed = ", ".join(map(repr, format_names()))
    raise InputError(
        f"{what}={name!r}: there is no such format; the nearest is {nearest(name, format_names())!r}. Formats are "
        f"{listed}; a number is a number of bits, and lamina.register_format(name, class) adds a format"
    )


def nearest(name: object, known: Iterable[FormatName]) -> FormatName:
    """The known name that is spelled most like this one."""
    by_text = {str(one): one for one in known}
    return by_text[difflib.get_close_matches(str(name), by_text, n=1, cutoff=0.0)[0]]


def make_format(name: FormatName, field: Field) -> FieldFormat | None:
    """The format of this name for one field; None if the field is stored unquantized."""
    check_format_name(name, "format")
    made = _FORMATS[name](field)
    if made is None or name in _BUILT_IN:
        return made
    made.name = str(name)
    _check_parts(made)
    return made


def _check_parts(made: FieldFormat) -> None:
    parts = getattr(made, "parts", None)
    if not isinstance(parts, dict) or not parts:
        raise InputError(f"format {made.name!r} has parts={parts!r}: its __init__ must set name -> (width, dtype)")
    for part, (width, dtype) in parts.items():
        if not part.isidentifier() or width < 1 or dtype not in PART_DTYPES:
            raise InputError(
                f"format {made.name!r} has a part {part!r} of {width} values of {dtype}: a part has a name like a "
                "variable's, at least one value, and an integer or floating-point dtype of PyTorch; write float8 and "
                "packed bits as torch.uint8"
            )


def _definition(factory: FormatFactory) -> tuple[object, object]:
    """Where a class or function was defined: the same when its definition runs again."""
    return getattr(factory, "__module__", None), getattr(factory, "__qualname__", factory)
