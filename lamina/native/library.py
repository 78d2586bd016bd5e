"""The native library, loaded with ctypes at its first use, and the number of threads that it uses.

library().lamina_run(operations, count, threads())
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from threading import Lock

import torch

from lamina.errors import InputError
from lamina.native.build import BuildError, is_built, load
from lamina.native.products import declare

_loading = Lock()
_threads: int | None = None


def library() -> ctypes.CDLL:
    """The loaded library, which is built first if it is not in the cache. Raises BuildError if it cannot be built."""
    with _loading:
        return _library()


@cache
def _library() -> ctypes.CDLL:
    if os.environ.get("LAMINA_NATIVE") == "0":
        raise BuildError("native programs are switched off by LAMINA_NATIVE=0")
    loaded = declare(load())
    loaded.lamina_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    loaded.lamina_run.restype = None
    loaded.lamina_run_on.argtypes = [*loaded.lamina_run.argtypes, ctypes.c_void_p, ctypes.c_int64]
    loaded.lamina_run_on.restype = None
    loaded.lamina_kernel.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64)]
    loaded.lamina_kernel.restype = ctypes.c_int64
    return loaded


@cache
def why_not() -> str | None:
    """Why the native library cannot be used, in words; None if it is loaded. Tried once in a process."""
    try:
        library()
    except (BuildError, OSError) as problem:
        return str(problem).strip().splitlines()[0]
    return None


def why_not_at_once() -> str | None:
    """Why the native library cannot be used without compiling it now; None if it is loaded."""
    if _library.cache_info().currsize == 0 and not _was_built():
        return "native kernels are not compiled yet: lamina build compiles them, or says why it cannot"
    return why_not()


@cache
def _was_built() -> bool:
    """Asked once: it reads all sources."""
    return is_built()


# -- threads ---------------------------------------------------------------------------------------------------------


def set_threads(count: int | None) -> None:
    """Sets how many threads native programs use; None: the default.

    >>> set_threads(2)
    >>> threads()
    2
    >>> set_threads(None)
    """
    global _threads
    if count is not None and count < 1:
        raise InputError(f"set_threads({count}): it must be 1 or more, or None for the default")
    _threads = count


def threads() -> int:
    """How many threads a native program uses: `set_threads`, else $LAMINA_THREADS, else one for each physical core, but
    not more than PyTorch uses (`torch.set_num_threads`, $OMP_NUM_THREADS)."""
    if _threads is not None:
        return _threads
    if given := os.environ.get("LAMINA_THREADS"):
        if not given.isdigit() or int(given) < 1:
            raise InputError(f"LAMINA_THREADS={given}: it must be a number from 1 on")
        return int(given)
    return max(1, min(torch.get_num_threads(), physical_cores()))


@cache
def pytorch_team() -> int | None:
    """The address of the function that runs work on PyTorch's threads, GOMP_parallel of the OpenMP library that PyTorch
    is linked with; None if it has another."""
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


@cache
def physical_cores() -> int:
    """Physical cores that this process may use: of several hardware threads of a core, one counts."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return max(1, len(cores))
