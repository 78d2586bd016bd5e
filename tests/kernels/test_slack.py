"""Captured steps, passes and prompts over recurrences with slack: the cache is the one that plain passes make, at any
point, so it can be rewound, forked and continued by either."""

from __future__ import annotations

import pytest
import torch

import lamina
from bench.captured_checks import with_slack
from bench.device_models import Family
from lamina.model import Model
from lamina.runtime import Graphs
from tests.families.harness import pair
from tests.kernels.captured_twins import Twins
from tests.kernels.launches import launches
from tests.kernels.runs import small

FAMILIES = {  # every rule
    "mamba": None,
    "mamba2": None,
    "falcon_h1": None,
    "qwen3_next": None,
    "recurrent_gemma": "two recurrent, one sliding",
    "rwkv": "typical",
    "kimi_linear": "tied, all layers dense, low-rank queries",
}
every_family = pytest.mark.parametrize("family", FAMILIES)
pytestmark = pytest.mark.usefixtures("few_programs")


def model_of(family: str) -> Model:
    name = FAMILIES[family]
    return small(family) if name is None else pair(family, name)[1]


def of_slack(model: Model, slack: int) -> Twins:
    return Twins(model, *(model.new_cache(2, slack=slack) for _ in range(2)))


@torch.no_grad()
@every_family
def test_steps_keep_what_plain_passes_keep_and_rewind_like_them(family: str) -> None:
    twins = of_slack(model_of(family), 1)
    twins.step(4, [4, 2])  # from an empty cache, and the log is full every second token
    twins.rewind_and_go_on()
    twins.step(2, [1, 2])


@torch.no_grad()
@every_family
def test_passes_move_bases_over_logged_and_over_new_tokens(family: str) -> None:
    twins = of_slack(model_of(family), 2)
    for T in (4, 2, 4):  # with more tokens than the slack, and fewer
        twins.read(T)
    twins.rewind_and_go_on()
    twins.read(2)


@torch.no_grad()
@every_family
def test_prompts_move_bases_over_logged_and_over_new_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.runtime.prompts.captured_prompt.WIDTHS", (8,))
    twins = of_slack(model_of(family), 2)
    for counts in ([7, 2], [1, 5], [0, 8], [2, 1]):
        twins.prompt(counts)
        twins.rewind_and_go_on()


def test_all_ways_over_one_cache_as_bench_device_check_tries_them_on_a_gpu() -> None:
    assert with_slack(Family(None, small("mamba2"), torch.zeros(0))) == (True, "yes")


@torch.no_grad()
def test_an_aborted_pass_changes_nothing() -> None:
    twins = of_slack(small("mamba2"), 2)
    twins.read(4)
    before = [x.clone() for layer in twins.captured.every_layer() for x in layer.data.values()]
    with twins.graphs.pass_of(2, 4, twins.captured) as one:
        one.read(twins.captured, torch.ones(2, 4, dtype=torch.int64))
        one.abort()
    after = [x for layer in twins.captured.every_layer() for x in layer.data.values()]
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, after, strict=True))
    twins.rewind_and_go_on()


@torch.no_grad()
def test_forks_and_files_of_a_cache_after_captured_steps(tmp_path: object) -> None:
    model = small("falcon_h1")
    twins = of_slack(model, 2)
    twins.step(6, [6, 3])
    fork = twins.captured.fork()
    twins.captured.save(f"{tmp_path}/cache.safetensors")  # with the constants that rewinding needs
    loaded = lamina.load_cache(f"{tmp_path}/cache.safetensors", model)
    more = torch.tensor([[1, 2], [3, 4]])
    found = []
    for cache in (twins.captured, twins.plain, fork, loaded):
        cache.rewind([2, 1])
        found.append(model(more, cache=cache))
    for one in found[1:]:
        torch.testing.assert_close(found[0], one, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_programs_are_for_caches_with_or_without_slack() -> None:
    model = small("mamba2")
    graphs, ids = Graphs(model), torch.tensor([[1, 2]])
    with graphs.pass_of(1, 2) as plain:
        message = "no captured passes: this pass is for recurrences without slack; borrow one for this cache"
        with pytest.raises(lamina.InputError, match=message):
            plain.read(model.new_cache(slack=1), ids)
    for slack in (1, 4):
        with graphs.pass_of(1, 2, model.new_cache(slack=slack)) as one:
            one.read(model.new_cache(slack=slack), ids)
            with pytest.raises(lamina.InputError, match="this pass is for recurrences with slack"):
                one.read(model.new_cache(), ids)
    assert graphs.captures == 2  # one serves any slack
    ringed = small("gemma2")
    with Graphs(ringed).pass_of(1, 2) as one:  # no recurrence: the same program
        one.read(ringed.new_cache(slack=2), ids)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mamba", ["_convolve_product", "_move_scan", "_selective_scan", "_log_inputs"]),
        ("mamba2", ["_convolve", "_move_ssd", "_ssd", "_log_inputs"]),
        ("qwen3_next", ["_convolve", "_move_delta", "_gated_delta", "_log_inputs"]),
        ("recurrent_gemma", ["_convolve", "_move_lru", "_rg_lru", "_log_inputs"]),
    ],
)
def test_slack_takes_two_launches_around_the_rule(family: str, expected: list[str]) -> None:
    block = launches(model_of(family), slack=2)[1][0]
    first, last = next(i for i, name in enumerate(block) if name.startswith("_conv")), block.index("_log_inputs")
    assert [name for name in block[first : last + 1] if not name.startswith(("rows_", "tiles_"))] == expected
    assert "_log_inputs" not in launches(model_of(family))[1][0]
