"""Every kind of memory for every target: files give the logits and tokens of eager passes. For aotinductor in C++ too.

These take minutes of a core for each target, so `make test` does not collect them; `make export-targets` runs them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina import ProgramError
from lamina.exporting.build_decode import build
from lamina.exporting.export import TARGETS
from tests.exporting.kinds import KINDS, REFUSED, compare, compare_in_cpp, file_name

CASES = [pytest.param(target, name, id=f"{target}: {name}") for target in TARGETS for name in KINDS]


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("decode") / "decode", "-O0")


@pytest.mark.parametrize(("target", "name"), CASES)
def test_a_kind_of_memory_equals_eager_passes(
    target: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / file_name(target)
    if (target, name) in REFUSED:
        with pytest.raises(ProgramError, match=REFUSED[target, name]):
            compare(name, target, path)
        assert not path.exists()
        return
    compare(name, target, path)
    if target == "aotinductor":
        compare_in_cpp(name, path, request.getfixturevalue("decode"))
