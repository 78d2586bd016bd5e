"""Kernels are not only interpreted: they build for a GPU, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys

FAMILIES = ("mamba2", "llama", "qwen3_next", "deepseek_v3", "deepseek_v32")  # every kind of kernel is in one of them
PASSES = ("gemma2:4", "qwen3_next:2", "falcon_h1:16", "glm_moe_dsa:2")  # of so many tokens a row
CODECS = ("llama:k8v4", "llama:k5v8", "llama:fp8", "deepseek_v3:int4")
PAGES = ("llama:p64", "deepseek_v3:p64", "gemma2:4,p16", "llama:k8v4,p48", "deepseek_v3:int8,p64")
BESIDE = "lfm2:beside"  # while plain passes run


def test_the_kernels_of_decode_steps_and_of_passes_build_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = ["products", "mixtures", "slack", "mamba2:s2", *FAMILIES, *PASSES, *CODECS, *PAGES, BESIDE]
    command = [sys.executable, "-m", "tests.kernels.building", *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = dict(line.split() for line in done.stdout.splitlines())
    least = {one: 3 for one in asked} | dict.fromkeys(CODECS, 1) | dict.fromkeys([*PAGES, BESIDE], 0)
    assert all(int(counts[one]) > least[one] for one in asked), done.stdout
