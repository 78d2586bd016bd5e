"""Writes the types of all settings for editors, from their declarations: `python docs/setting_types.py`

Type checkers need classes written out, so `lamina/generation/settings/typed.py` is generated, and
`tests/typing/settings.py` with it: there mypy checks that each setting may be passed back in the form in which
`Settings` stores it. Run it after adding or changing a `Setting`.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lamina.generation.settings import declared  # noqa: E402, F401  registers the settings
from lamina.sampling.setting import Setting, registered  # noqa: E402

HEAD = '''"""The types of all settings, for editors. Written by `python docs/setting_types.py`; do not edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from torch import Tensor

if TYPE_CHECKING:
    from lamina.model import Model

Ids = tuple[int, ...]
GivenIds = int | Sequence[int] | Tensor
Stop = Callable[[int, list[int], str], bool]
Processor = Callable[..., Tensor]
'''
FIELDS = '''
@dataclass(frozen=True)
class SettingFields:
    """The fields of `Settings`: every setting with its stored type, default and meaning."""
'''
OPTIONS = '''
class Options(TypedDict, total=False):
    """Every setting but `max_new_tokens`, which is an argument of its own, with the types that callers may pass."""
'''
TEST = '''"""Every setting may be passed in the form in which `Settings` stores it; mypy reads this file. Written by
`python docs/setting_types.py`; do not edit."""

from __future__ import annotations

from lamina.generation import Settings
from lamina.generation.settings.options import AllOptions


def as_options(settings: Settings) -> AllOptions:
    return AllOptions(
'''


def stored(setting: Setting) -> str:
    """The type of a field of `Settings`."""
    kind = setting.kind.kept
    return kind if setting.default is not None or kind == "Any" else f"{kind} | None"


def given(setting: Setting) -> str:
    """The type of a keyword argument; None turns it off."""
    return setting.kind.given if setting.kind.given == "Any" else f"{setting.kind.given} | None"


def typed() -> str:
    """The text of typed.py."""
    fields, options = [], []
    for group, settings in groupby(registered(), key=lambda one: one.group):
        rule = f"    # -- {group} ".ljust(120, "-")
        fields.append(rule)
        options.append(rule)
        for one in settings:
            default = f'"{one.default}"' if isinstance(one.default, str) else repr(one.default)
            fields += [f"    {one.name}: {stored(one)} = {default}", f'    """{one.meaning}"""']
            if one.name != "max_new_tokens":
                options.append(f"    {one.name}: {given(one)}")
    return "\n".join([HEAD, FIELDS, *fields, "", OPTIONS, *options, ""])


def test_of_types() -> str:
    """The text of tests/typing/settings.py."""
    return TEST + "".join(f"        {one.name}=settings.{one.name},\n" for one in registered()) + "    )\n"


FILES = {"lamina/generation/settings/typed.py": typed, "tests/typing/settings.py": test_of_types}

if __name__ == "__main__":
    for name, text in FILES.items():
        (ROOT / name).write_text(text())
