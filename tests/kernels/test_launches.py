"""What a captured step launches: every launch costs microseconds, however small, so there are few, and all are ours."""

from __future__ import annotations

import pytest

from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.kernels.launches import launches

CASES = dict(FIRST)
LAUNCHES = {"falcon_h1": 11, "gemma2": 8, "lfm2": 8, "llama": 8, "mamba": 7, "mamba2": 4}  # of a later block


@pytest.mark.parametrize("family", LAUNCHES)
def test_a_block_launches_so_many_kernels_and_nothing_of_pytorchs(family: str) -> None:
    start, blocks, end = launches(pair(family, CASES[family])[1])
    assert not [name for part in [start, *blocks, end] for name in part if name.startswith("aten.")]
    assert len(blocks[1]) == LAUNCHES[family], blocks[1]
    assert end == ["_norm_kernel", "rows_kernel", "_finish"]


@pytest.mark.parametrize(("family", "layer"), [("qwen3_next", 1), ("lfm2", 1), ("llama4", 0), ("llama4", 3)])
def test_norms_rotary_and_gate_of_attention_take_no_launch_but_one_each(family: str, layer: int) -> None:
    model = pair(family, CASES[family])[1]
    gate = ["_gate_kernel"] if family == "qwen3_next" else []
    expected = ["_norm_kernel", "rows_kernel", "_rotate", "_attend", *gate, "rows_kernel", "_norm_kernel"]
    assert launches(model)[1][layer][: len(expected)] == expected


@pytest.mark.parametrize("family", ["falcon_h1", "gemma2", "llama", "qwen3_next"])
def test_embedding_and_angles_are_one_launch_each(family: str) -> None:
    assert launches(pair(family, CASES[family])[1])[0] == ["_positions", "_embed", "_angles"]


def test_latent_attention_is_products_and_three_launches() -> None:
    block = launches(pair("deepseek_v3", CASES["deepseek_v3"])[1])[1][1]
    between = [name for name in block if name in ("_into_latent", "_attend_latent", "_out_of_latent")]
    assert between == ["_into_latent", "_attend_latent", "_out_of_latent"]
    assert not [name for name in block if name.startswith("aten.")]


def test_codes_take_one_launch_more() -> None:
    plain, coded = (launches(pair("llama", CASES["llama"])[1], codec=codec)[1][1] for codec in (None, "int4"))
    assert [name for name in coded if name not in plain] == ["_encode", "_attend_codes"]
    assert len(coded) == len(plain) + 1
    plain, coded = (
        launches(pair("deepseek_v3", CASES["deepseek_v3"])[1], codec=codec)[1][1] for codec in (None, "int4")
    )
    assert [name for name in coded if name not in plain] == ["_encode"] and len(coded) == len(plain) + 1
