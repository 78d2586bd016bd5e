"""A Jinja sandbox whose templates end: rendering is limited in time and in the size of what it makes.

Templates come with checkpoints, and Jinja's own sandbox lets them loop for hours or build a text of many gigabytes.
Here every loop, call, filter and operator that can take long or grow a value passes through `tick` or `made`:

    {% for … %}          the syntax tree gets a call of `tick` in every loop
    a ~ b, x[1:], ==     the tree calls filters and tests in their place, also for != and in
    + * ** %             Jinja hands intercepted operators to `call_binop`
    f(…), x.method(…)    `call`; the size of what a text method returns is estimated before it runs
    x | filter, is test  every filter and test is wrapped
    {{ x }}, blocks      `finalize` and `concat`
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from functools import update_wrapper, wraps
from typing import Any, cast

from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.ext import LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lamina.checkpoint.chat.literal import Literal
from lamina.checkpoint.chat.template_sizes import formatted_size, printed_size
from lamina.checkpoint.chat.template_syntax import Generation

SECONDS = 10.0
"""How long one rendering may take."""
CHARACTERS = 16 * 2**20
"""How long a prompt, or any text or list that is made on the way, may be."""
ALTOGETHER = 2**30
"""How many characters and elements one rendering may make, those it drops included."""
WIDTH = 100_000
"""The largest width, count or precision that a filter or method is given; Jinja's `range` has the same limit."""
BITS = 1024
"""How long a whole number may be."""

LEFT_OUT = {"striptags", "urlize", "wordwrap", "xmlattr"}  # filters for HTML; slow on some texts
REFUSED = {"encode", "translate", "to_bytes"}  # methods that leave text behind, or grow it by a table
SIZED = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "zfill"}
BACKWARDS = {"rfind", "rindex", "rpartition", "rsplit"}  # slow for long needles
LOOKING = {"count", "endswith", "find", "index", "rfind", "rindex", "startswith"}
CUTTING = {"partition", "removeprefix", "removesuffix", "rpartition", "rsplit", "split"}
COMPARING = {"in", "eq", "ne"}
PRINTING = {
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "pprint", "replace", "safe",
    "string", "title", "trim", "truncate", "upper", "urlencode", "wordcount",
}  # fmt: skip


class LimitError(Exception):
    """A template takes too long, or makes something too large."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering.

    literal  what has put stand-ins for characters into the messages, if anything has: a template that looks for a text
             in a message finds it all the same

    >>> Sandbox().from_string("{{ 'a' * n }}").render(n=3)
    'aaa'
    >>> Sandbox().from_string("{{ 'a' * n }}").render(n=10**9)
    Traceback (most recent call last):
    lamina.checkpoint.chat.sandbox.LimitError: makes a text or list of 1,000,000,000 elements, and the limit is ...
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, literal: Literal | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, LoopControlExtension],
            finalize=self.printable,
            cache_size=0,
        )
        self._literal = literal
        self._end = time.monotonic() + SECONDS
        self._made = 0
        own = {
            "tojson": self._to_json, "join": self._join, "sum": self._sum, "[:]": self._new,
            "~": lambda values: self.concat(map(self._text, values)),
        }  # fmt: skip
        self.filters = {k: self._filter(k, v) for k, v in DEFAULT_FILTERS.items() if k not in LEFT_OUT} | own
        self.tests = {name: self._test(name, cast(Any, test)) for name, test in DEFAULT_TESTS.items()}
        del self.globals["lipsum"]

    # -- limits --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Called at least once in each round of a loop."""
        if time.monotonic() > self._end:
            raise LimitError(f"ran for more than {SECONDS:g} s")

    def made(self, size: int) -> None:
        """A text or list of this size is about to be made."""
        self.tick()
        self._made += size
        if size > CHARACTERS:
            raise LimitError(f"makes a text or list of {size:,} elements, and the limit is {CHARACTERS:,}")
        if self._made > ALTOGETHER:
            raise LimitError(f"makes texts and lists of more than {ALTOGETHER:,} elements altogether")

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a template, a block or a macro writes."""
        size, kept = 0, []
        for piece in pieces:
            size += len(piece)
            if size > CHARACTERS:
                self.made(size)
            kept.append(piece)
        self.made(size)
        return "".join(kept)

    def printable(self, value: Any) -> Any:
        """A value that is about to be printed."""
        if not isinstance(value, str):
            self.made(printed_size(value))
        return value

    def _text(self, value: Any) -> str:
        return str(self.printable(value))

    def _new(self, value: Any) -> Any:
        """A value that was just made."""
        if isinstance(value, str | list | tuple):
            self.made(len(value))
        return value

    # -- operators and calls -------------------------------------------------------------------------------------------

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(one) if isinstance(one, str | list | tuple) else None for one in (left, right)]
        numbers = isinstance(left, int) and isinstance(right, int)
        match operator:
            case "+" if None not in sizes:
                self.made(len(left) + len(right))
            case "*" if numbers:
                self._number(left.bit_length() + right.bit_length())
            case "*" if sizes[0] is not None and isinstance(right, int):
                self.made(sizes[0] * max(right, 0))
            case "*" if sizes[1] is not None and isinstance(left, int):
                self.made(sizes[1] * max(left, 0))
            case "**" if numbers:
                self._number(left.bit_length() * right)
            case "%" if isinstance(left, str):
                self.made(formatted_size(left, right if isinstance(right, tuple) else (right,)))
        return super().call_binop(context, operator, left, right)

    def _number(self, bits: int) -> None:
        if bits > BITS:
            raise LimitError(f"computes a number of about {bits:,} bits, and the limit is {BITS:,}")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            args = __self._arguments(name, owner, args, kwargs)
            if name in LOOKING:
                __obj = getattr(__self._plain(owner), name)
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
                __self.made(sum(len(owner) + len(one) for one in args[0] if isinstance(one, str)))
        result = super().call(__context, __obj, *args, **kwargs)
        return result if result is owner else __self._new(result)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in REFUSED and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            self.made(formatted_size(value.__self__, (*args, *kwargs.values())))
            return wrapped(*args, **kwargs)

        return update_wrapper(bounded, value)

    def _arguments(self, name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a text method or filter, checked; what it looks for is marked as the text may be."""
        if name == "replace":
            args += tuple(kwargs.pop(key) for key in ("old", "new", "count") if key in kwargs)
        given = (*args, *kwargs.values())
        widths = [value for value in given if isinstance(value, int)]
        if name in SIZED and max(widths, default=0) > WIDTH:
            raise LimitError(f"calls {name} with {max(widths):,}, and the limit is {WIDTH:,}")
        match name:
            case "expandtabs":
                self.made(len(text) + text.count("\t") * max(widths, default=8))
            case "indent":
                wide = [len(value) for value in given if isinstance(value, str)]
                self.made(len(text) + (text.count("\n") + 1) * max([4, *widths, *wide]))
            case "replace" if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
                old = self._marked(args[0])
                self.made(len(text) + text.count(old) * len(args[1]))
                return (old, *args[1:])
            case _ if name in BACKWARDS and any(isinstance(value, str) and len(value) > 1000 for value in args):
                raise LimitError(f"calls {name} with a text of more than 1,000 characters")
        return tuple(map(self._marked, args)) if name in CUTTING else args

    def _marked(self, value: Any) -> Any:
        return value if self._literal is None or not isinstance(value, str) else self._literal.mark(value)

    def _plain(self, value: Any) -> Any:
        return value if self._literal is None or not isinstance(value, str) else self._literal.plain(value)

    # -- filters and tests ---------------------------------------------------------------------------------------------

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own argument comes before the value

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            before, values = args[:first], args[first:]
            if values:
                value, rest = values[0], values[1:]
                if name in PRINTING:
                    self.printable(value)
                if name in ("indent", "replace"):
                    value = str(value)
                if name == "format" and isinstance(value, str):
                    self.made(formatted_size(value, (*rest, *kwargs.values())))
                elif name in SIZED or isinstance(value, str):
                    rest = self._arguments(name, value if isinstance(value, str) else "", rest, kwargs)
                values = (value, *rest)
            return self._new(function(*before, *values, **kwargs))

        return bounded

    def _test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return function(*(map(self._plain, args) if name in COMPARING else args), **kwargs)

        return bounded

    def _join(self, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        found = value if attribute is None else map(make_attrgetter(self, attribute), value)
        between, pieces = self._text(d), []
        for n, one in enumerate(found):
            self.tick()
            pieces += [between, self._text(one)] if n else [self._text(one)]
        return self.concat(pieces)

    def _sum(self, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        for one in iterable if attribute is None else map(make_attrgetter(self, attribute), iterable):
            self.tick()
            if isinstance(start, str | list | tuple):
                self.made(len(start) + len(one))
            start = start + one
        return start

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own filter escapes <, > and & for HTML, which a prompt must not have."""
        if isinstance(indent, int) and indent > WIDTH:
            raise LimitError(f"calls tojson with an indent of {indent:,}, and the limit is {WIDTH:,}")
        self.printable(value)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self.concat(encoder.iterencode(value))
