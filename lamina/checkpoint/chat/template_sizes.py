"""How large a text of a chat template will be, before it is made."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.utils import Namespace


def printed_size(value: Any) -> int:
    """About how many characters a value is printed in. A list that is in many others counts each time.

    >>> printed_size(["ab", ["cde"]]), printed_size(5)
    (21, 32)
    """
    known: dict[int, int] = {}

    def size(one: Any) -> int:
        if isinstance(one, str):
            return len(one)
        if isinstance(one, Namespace):
            one = object.__getattribute__(one, "_Namespace__attrs")
        if not isinstance(one, list | tuple | Mapping | KeysView | ValuesView | ItemsView):
            return 32
        if id(one) not in known:
            known[id(one)] = 0  # where it is inside itself
            inside = (both for pair in one.items() for both in pair) if isinstance(one, Mapping) else one
            known[id(one)] = 2 + sum(size(part) + 4 for part in inside)
        return known[id(one)]

    return size(value)


WIDTHS = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?|\{[^{}]*:[^{}]*?(\d+|\{)(?:\.(\d+|\{))?")


def formatted_size(template: str, values: Iterable[Any]) -> int:
    """No fewer characters than a text formatted with % or {} has.

    >>> formatted_size("%s of %9d", ("ab", 5)), formatted_size("{:>20}", ["a"])
    (91, 27)
    """
    values = list(values)
    widths = [width for found in WIDTHS.findall(template) for width in found if width]
    longest = max((int(width) for width in widths if width.isdigit()), default=0)
    if any(not width.isdigit() for width in widths):  # a width among the values
        longest = max([longest, *(value for value in values if isinstance(value, int))])
    fields = template.count("%") + template.count("{")
    return len(template) + fields * (longest + max(map(printed_size, values), default=0))
