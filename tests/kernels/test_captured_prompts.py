"""Captured prompts give what plain passes give, over every kind of layer and store; a failing one changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lamina
from lamina.cache.spec import Keeping, Recurrent
from lamina.errors import CaptureError, InputError
from lamina.generation.feed import feed_rest
from lamina.generation.prefill.prompt_reader import PromptReader
from lamina.generation.prefill.watch import Watch
from lamina.generation.prompt import from_rows
from lamina.kernels.launch import Launched, dry
from lamina.model import Model
from lamina.recurrence import RGLRU
from lamina.runtime import Graphs
from lamina.runtime.cuda_graph import copy_in
from lamina.runtime.prompts.captured_prompt import CapturedPrompt
from lamina.runtime.prompts.eligibility import why_no_prompts, why_not_prompted, why_unserved
from lamina.runtime.prompts.prebuild import build_prompt_kernels
from tests.kernels.passes import same
from tests.kernels.runs import small, tiny
from tests.kernels.test_encoder_decoders import built
from tests.kernels.test_passes_ragged import held_by
from tests.kernels.test_sharing import Sloped

WIDTHS = (8, 16)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch, few_programs: None) -> None:
    """Graphs of few tokens: the interpreter is slow."""
    monkeypatch.setattr("lamina.runtime.prompts.captured_prompt.WIDTHS", WIDTHS)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are captured wherever kernels could do them, as if the model were on a GPU."""
    monkeypatch.setattr(
        "lamina.generation.prefill.prompt_reader.why_no_prompts", lambda model, cache: why_not_prompted(cache)
    )


def compare(model: Model, captured: lamina.Cache, plain: lamina.Cache, pieces: list[tuple[int, list[int]]]) -> None:
    """Prompts of these lengths, one after the other, through both; then plain passes go on from both."""
    torch.manual_seed(0)
    one = Graphs(model).prompt_of(2, captured)
    for tokens, counts in pieces:
        ids = torch.randint(1, 30, (2, tokens))
        one.feed(captured, ids, counts)
        model(ids, cache=plain, counts=counts, logits="last")
        captured.poison()
        same(captured, plain)
    more = torch.tensor([[1, 2], [3, 4]])
    torch.testing.assert_close(model(more, cache=captured), model(more, cache=plain), rtol=1e-4, atol=1e-4)


PIECES = [(11, [11, 4]), (13, [0, 13]), (5, [5, 2])]
KINDS = ["llama", "gemma2", "mamba", "mamba2", "falcon_h1", "qwen3_next", "deepseek_v3", "glm_moe_dsa"]


@torch.no_grad()
@pytest.mark.parametrize("family", KINDS)
def test_ragged_prompts_one_after_the_other_are_plain_passes(family: str) -> None:
    model = small(family)
    compare(model, model.new_cache(2), model.new_cache(2), PIECES)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "glm_moe_dsa"])
def test_prompts_in_pages_are_plain_passes(family: str) -> None:
    model = small(family)
    pool = lamina.Pool(model, tokens=96, page=4)
    compare(model, model.new_cache(2, pool=pool), model.new_cache(2), PIECES)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "codec"), [("gemma2", "k8v4"), ("gemma2", "fp8"), ("deepseek_v3", "int8"), ("glm_moe_dsa", "int8")]
)
def test_prompts_in_codes_and_pages_are_plain_passes(family: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.runtime.prompts.captured_prompt.WIDTHS", (4,))
    model = small(family)
    pool = None if codec == "fp8" else lamina.Pool(model, tokens=32, page=4, codec=codec)
    captured = model.new_cache(2, codec=codec) if pool is None else model.new_cache(2, pool=pool)
    compare(model, captured, model.new_cache(2, codec=codec), [(4, [4, 3]), (3, [0, 3])])


@torch.no_grad()
def test_an_indexer_scores_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.runtime.prompts.captured_prompt.MOST_SCORED", (5, 6))
    model = small("glm_moe_dsa")
    one = Graphs(model).prompt_of(2)
    captured, plain = model.new_cache(2), model.new_cache(2)
    for tokens, counts in PIECES[:2]:
        ids = torch.randint(1, 30, (2, tokens))
        one.feed(captured, ids, counts)
        model(ids, cache=plain, counts=counts, logits="last")
        same(captured, plain)
    assert one._scores is not None and one._scores.shape[:2] == (2, 3)


@torch.no_grad()
@pytest.mark.parametrize("family", ["umt5", "t5gemma", "switch_transformers"])
def test_decoders_with_a_source_read_captured_prompts(family: str) -> None:
    model, captured, plain = built(family)
    compare(model, captured, plain, [(7, [7, 3])])


@torch.no_grad()
def test_one_program_serves_other_caches_and_growth() -> None:
    model = small("falcon_h1")
    one, ids = Graphs(model).prompt_of(2), torch.randint(1, 60, (2, 6))
    plain = model.new_cache(2)
    model(ids, cache=plain, logits="last")
    model(ids, cache=plain, logits="last")
    for number in range(2):
        cache = model.new_cache(2)
        one.feed(cache, ids)
        if number:
            cache.reserve(90)  # new memory, elsewhere
        one.feed(cache, ids)
        same(cache, plain)
    assert one.captures == 1


@torch.no_grad()
def test_all_that_the_host_knows_is_copied_in_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(tensor: torch.Tensor, values: Any) -> None:
        sizes.append(tensor.numel())
        copy_in(tensor, values)

    monkeypatch.setattr("lamina.runtime.captured.copy_in", counted)
    model = small("gemma2")
    one, cache, plain = Graphs(model).prompt_of(2), model.new_cache(2), model.new_cache(2)
    ids, counts = torch.randint(1, 30, (2, 7)), torch.tensor([7, 3])
    ids[1, 3:] = 10**6  # padding may hold anything
    one.feed(cache, ids, counts)
    assert len(sizes) == 1
    model(ids.masked_fill(ids > 100, 0), cache=plain, counts=counts, logits="last")
    same(cache, plain)


@torch.no_grad()
def test_rows_without_tokens_stay_bit_for_bit() -> None:
    for family in ("gemma2", "falcon_h1"):
        model = small(family)
        cache, one = model.new_cache(2), Graphs(model).prompt_of(2)
        one.feed(cache, torch.randint(1, 60, (2, 8)))
        before = held_by(cache, 1)
        one.feed(cache, torch.randint(1, 60, (2, 5)), counts=[5, 0])
        assert all(torch.equal(one, other) for one, other in zip(before, held_by(cache, 1), strict=True))


@torch.no_grad()
def test_what_does_not_fit_or_cannot_be_captured_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("mamba2")
    cache, ids = model.new_cache(1, capacity=9), torch.randint(1, 60, (1, 7))
    one = Graphs(model).prompt_of(1)
    one.feed(cache, ids)
    before, tokens = held_by(cache, 0), cache.tokens
    with pytest.raises(lamina.CapacityError, match="row 0 holds 7 tokens and 7 more were given"):
        one.feed(cache, ids)
    with pytest.raises(InputError, match="captured prompt of 1 rows and up to 16 tokens was given 17 tokens"):
        one.feed(cache, torch.ones(1, 17, dtype=torch.int64))
    with pytest.raises(InputError, match="id 99 at row 0"):
        one.feed(cache, torch.tensor([[99]]))

    def fails(*args: Any, **how: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(model.head, "forward", fails)  # behind all layers
    fresh = Graphs(model).prompt_of(1)
    with pytest.raises(CaptureError, match="its capture failed: RuntimeError: no such kernel"):
        fresh.feed(cache, ids[:, :1])
    assert cache.tokens == tokens and cache._open_pass is None
    assert all(torch.equal(one, other) for one, other in zip(before, held_by(cache, 0), strict=True))


class Own(RGLRU):
    """A rule from outside the package."""


def test_what_is_not_served_says_why() -> None:
    assert "Triton" in (why := why_no_prompts(small("llama")) or "") or "on cpu" in why
    for slack, reason in ((0, None), (2, "its slack is 2, and no kernel moves the base state of the rule Own")):
        layer = Recurrent(Own(channels=2)).layer(Keeping(1, None, slack, torch.float32, torch.device("cpu")))
        assert why_unserved(layer.spec, layer, torch.float32) == reason


def test_more_rows_than_captured_steps_have_are_read_by_plain_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.runtime.eligibility.why_no_graphs", lambda model: None)
    model, reason = small("llama"), "65 rows; captured steps, and so captured prompts, have up to 64"
    assert why_no_prompts(model, rows=65) == why_no_prompts(model, model.new_cache(65)) == reason
    assert why_no_prompts(model, rows=64) is None and why_no_prompts(model, model.new_cache(64)) is None


# -- generate ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_second_prompt_of_a_size_is_captured_and_says_so(on_a_gpu: None) -> None:
    model = tiny()
    model.graphs.clear()
    expected = model.generate([[3, 4, 5, 6], [7]], 2, eos_token_id=None)
    plain = "not captured, since a prompt of this size is captured when another one comes; attention: sdpa"
    assert expected.prompt_how == f"one pass of up to 4 tokens a row; {plain}"
    found = model.generate([[3, 4, 5, 6], [7]], 2, eos_token_id=None)
    assert found.prompt_how == "one captured graph of up to 4 tokens a row" and found.tokens == expected.tokens
    more = model.generate([[8, 9], [1, 2, 3]], 2, eos_token_id=None, cache=found.cache)  # behind what is known
    again = model.generate([[8, 9], [1, 2, 3]], 2, eos_token_id=None, cache=expected.cache)
    assert more.prompt_how == "one captured graph of up to 3 tokens a row" and more.tokens == again.tokens
    long = model.generate([[3] * 20, [4]], 2, eos_token_id=None, prefill_chunk=9)  # the first of three pieces is new
    assert long.prompt_how == f"2 captured graphs and one pass of up to 9 tokens a row; {plain}"


@torch.no_grad()
def test_a_rest_that_is_longer_than_captured_passes_take_is_one_captured_prompt(
    on_a_gpu: None, passes_by_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.generation.feed.most_tokens", lambda rows: 2)
    model = small("mamba2")
    model.graphs.clear()
    fast, slow, rest = model.new_cache(2), model.new_cache(2), [[4, 5, 6, 7, 8], [9]]
    for number in range(3):
        how = Watch()
        feed_rest(model, rest, fast, None, how)
        model(from_rows(rest).ids, cache=slow, counts=[5, 1], logits="last")
        assert how.captured == (3 if number == 0 else 1)  # passes of two tokens until the prompt's size comes again
        same(fast, slow)


@torch.no_grad()
def test_a_prompt_that_cannot_be_captured_is_read_by_plain_passes_with_the_reason(on_a_gpu: None) -> None:
    torch.manual_seed(0)
    model = Sloped().requires_grad_(False).eval()
    results = [model.generate([[1, 2, 3]], 2, eos_token_id=None) for _ in range(3)]
    assert results[1].prompt_how.startswith(
        "one pass of up to 3 tokens a row; not captured, since its capture failed: InputError: attend(bias=…)"
    )
    assert results[2].prompt_how == results[1].prompt_how
    assert results[0].tokens == results[1].tokens and model.graphs.why_no_prompt(1) is not None


def test_a_caller_that_finds_the_graphs_in_use_runs_a_plain_pass(on_a_gpu: None) -> None:
    model = tiny()
    model.graphs.clear()
    prompt, cache = from_rows([[1, 2, 3]]), model.new_cache(1)
    with model.graphs.prompt_of(1, cache), PromptReader(model, cache) as reader:
        assert not reader.feed(prompt, 0, [3])
        assert reader.reason == "another caller is using the captured prompts of this shape"
    with PromptReader(model, cache) as reader:
        assert not reader.feed(prompt, 0, [3]) and "when another one comes" in (reader.reason or "")
        assert not reader.feed(from_rows([[1] * 17]), 0, [17])
        assert reader.reason == "rows of up to 17 tokens; captured prompts of 1 rows have up to 16 per row"


def test_programs_of_prompts_are_kept_apart_and_few() -> None:
    graphs = Graphs(tiny())
    for rows in range(1, 8):
        graphs.prompt_of(rows).release()
    assert [key[1] for key in graphs.kept] == [4, 5, 6, 7] and graphs.captures == 0
    assert isinstance(graphs.prompt_of(7), CapturedPrompt)


@torch.no_grad()
def test_all_widths_can_be_captured_ahead_without_a_change_to_the_cache() -> None:
    model = small("mamba2")
    cache, ids = model.new_cache(1), torch.randint(1, 60, (1, 5))
    model(ids, cache=cache, logits="last")
    before, one = held_by(cache, 0), Graphs(model).prompt_of(1, cache)
    one.prepare(cache)
    assert one.captures == len(WIDTHS) and one.wants(3) and not one.wants(17)
    assert all(torch.equal(one, other) for one, other in zip(before, held_by(cache, 0), strict=True))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"_attend_prompt", "_store_tokens"}),
        ("falcon_h1", {"_attend_prompt", "_store_tokens", "_load_inputs", "_copy_state"}),
        ("deepseek_v3", {"_attend_latent", "_store_tokens"}),
        ("glm_moe_dsa", {"_attend_latent", "_attend_selected", "_index_scores", "_select_tokens", "_store_tokens"}),
    ],
)
def test_kernels_that_read_tables_are_requested_before_the_first_prompt(
    family: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[Launched] = []

    def build(*programs: Callable[[], object]) -> None:
        with dry(requested):
            for program in programs:
                program()

    monkeypatch.setattr("lamina.runtime.prompts.prebuild.build_together", build)
    build_prompt_kernels(small(family))
    names = {
        "_attend_prompt", "_attend_latent", "_attend_selected", "_index_scores", "_select_tokens", "_store_tokens",
        "_load_inputs", "_copy_state",
    }  # fmt: skip
    assert {one.kernel for one in requested} & names == expected
