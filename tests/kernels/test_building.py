"""Kernels are not only interpreted: they build for a GPU, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys

# Every kind of kernel is in one of them.
FAMILIES = ("mamba2", "llama", "qwen3_next", "deepseek_v3", "llama:k8v4", "llama:k5v8", "llama:fp8", "deepseek_v3:int4")


def test_the_kernels_of_a_decode_step_build_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.building", *FAMILIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert all(int(counts[name]) > (1 if ":" in name else 3) for name in FAMILIES), done.stdout  # what is not built yet
