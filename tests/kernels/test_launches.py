"""What a captured step launches: every launch costs microseconds, however small, so there are few, and all are ours."""

from __future__ import annotations

import pytest

from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.kernels.launches import launches, pass_launches

CASES = dict(FIRST)
LAUNCHES = {"falcon_h1": 8, "gemma2": 7, "lfm2": 5, "llama": 5, "mamba": 4, "mamba2": 3}  # of a later block


@pytest.mark.parametrize("family", LAUNCHES)
def test_a_block_launches_so_many_kernels_and_nothing_of_pytorchs(family: str) -> None:
    start, blocks, end = launches(pair(family, CASES[family])[1])
    assert not [name for part in [start, *blocks, end] for name in part if name.startswith("aten.")]
    assert len(blocks[1]) == LAUNCHES[family], blocks[1]
    assert end == ["_norm_kernel", "rows_kernel", "_finish"]


@pytest.mark.parametrize(("family", "layer"), [("qwen3_next", 1), ("lfm2", 1), ("llama4", 0), ("llama4", 3)])
def test_norms_rotary_and_gate_of_attention_take_no_launch_but_one_each(family: str, layer: int) -> None:
    model = pair(family, CASES[family])[1]
    first = ["_norm_kernel"] if layer == 0 else []  # later ones are done by the products in front and behind
    expected = [*first, "rows_kernel", "_attend_token", "rows_kernel"]
    assert launches(model)[1][layer][: len(expected)] == expected


@pytest.mark.parametrize("family", ["falcon_h1", "gemma2", "llama", "qwen3_next"])
def test_embedding_and_angles_are_one_launch_each(family: str) -> None:
    assert launches(pair(family, CASES[family])[1])[0] == ["_positions", "_embed", "_angles"]


def test_latent_attention_is_products_and_three_launches() -> None:
    block = launches(pair("deepseek_v3", CASES["deepseek_v3"])[1])[1][1]
    between = [name for name in block if name in ("_into_latent", "_attend_latent", "_out_alone")]
    assert between == ["_into_latent", "_attend_latent", "_out_alone"]
    assert not [name for name in block if name.startswith("aten.")]


def test_attention_over_codes_is_two_launches_and_latents_in_codes_one_more() -> None:
    coded = launches(pair("llama", CASES["llama"])[1], codec="int4")[1][1]
    at = coded.index("_encode")
    assert coded[at : at + 2] == ["_encode", "_attend_codes"] and "_rotate" not in coded
    assert not [name for name in coded if name.startswith("aten.")]
    plain, coded = (
        launches(pair("deepseek_v3", CASES["deepseek_v3"])[1], codec=codec)[1][1] for codec in (None, "int4")
    )
    assert [name for name in coded if name not in plain] == ["_encode"] and len(coded) == len(plain) + 1


@pytest.mark.parametrize("family", [family for family in CASES if family != "llama4"])
def test_a_pass_of_several_tokens_launches_nothing_of_pytorchs(family: str) -> None:
    reading, taking_in = pass_launches(pair(family, CASES[family])[1], rows=2, tokens=4)
    assert not [name for name in reading + taking_in if name.startswith("aten.")]
    assert taking_in[-1] == "_commit_tokens"


def test_taking_in_is_a_launch_for_each_ring_and_state_and_one_for_the_rest() -> None:
    for family, expected in (
        ("llama", []), ("gemma2", ["_rotate"] * 2), ("mamba", ["_convolve", "_selective_scan"] * 2),
        ("mamba2", ["_convolve", "_ssd"] * 2),
    ):  # fmt: skip
        assert pass_launches(pair(family, CASES[family])[1], rows=1, tokens=2)[1] == [*expected, "_commit_tokens"]
