"""Builds every kernel of a decode step for a GPU, without one: `python -m tests.kernels.building FAMILY[:TOKENS] …`

With TOKENS, those of a captured pass of so many tokens a row.

Run apart from the tests, whose kernels are interpreted. Building finds what the interpreter lets through: types that do
not meet, tuples of another length. Prints how many kernels each family has.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from lamina.kernels import launch


class NoDevice:
    """What building asks of a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def build(family: str, tokens: int | None, dtype: torch.dtype) -> int:
    from lamina.runtime.rehearse import build_kernels, without_numbers
    from tests.families.cases import FIRST, cases

    built: set[Any] = set()
    compile_one = jit.JITFunction._do_compile

    def noted(self: Any, key: Any, *args: Any) -> Any:
        built.add((self.__name__, key))
        return compile_one(self, key, *args)

    jit.JITFunction._do_compile = noted
    try:
        build_kernels(without_numbers(cases(family)[dict(FIRST)[family]]().to_dict(), dtype), tokens=tokens)
    finally:
        jit.JITFunction._do_compile = compile_one
    return len(built)


def main() -> None:
    driver.set_active(NoDevice())
    launch.pdl = lambda: True
    from lamina.kernels import splits

    splits.multiprocessors = lambda: 132
    for asked in sys.argv[1:]:
        family, _, tokens = asked.partition(":")
        print(asked, build(family, int(tokens) if tokens else None, torch.bfloat16), flush=True)


if __name__ == "__main__":
    main()
