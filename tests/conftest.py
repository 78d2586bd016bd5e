"""Settings for every test: one thread each, so that two workers share two cores."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the commands that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # trust the processor's flags: no compiling to try them out
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; chosen before anyone imports Triton

import pytest
import torch

LONG = ("test_building", "test_cards", "test_aotinductor", "test_programs", "test_histories")
"""Files that begin first: a long test that began last would keep one core waiting for the other."""

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look at it again and again. Nor need it look every
    700 objects, as a test that counts on it calls it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
