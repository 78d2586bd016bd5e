"""What a plan says is what a run then holds, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lamina
from lamina import Cache, CapacityError, InputError, Model, Pool
from lamina.cache.summary import lines
from lamina.config import Config
from lamina.generation.prefill.chunks import SHARE
from lamina.planning import Plan
from lamina.planning.bytes import decode_bytes
from lamina.rehearsal.meter import AllocationMeter
from tests.laws.toys import toy
from tests.planning.models import FAMILIES, T5, config, model, owned, source

WAYS: dict[str, dict[str, Any]] = {
    "reserved": dict(rows=2, length=41, prompt=39, slack=3),
    "grown": dict(rows=3, length=36, prompt=30, prefill_chunk=16, reserve=False),
    "fixed, not reserved": dict(rows=1, length=7, capacity=50, prompt=3, reserve=False, slack=1),
}


def run(model: Model, plan: Plan) -> Cache:
    """Does what a plan describes."""
    use = plan.use
    ids = torch.arange(use.rows * use.length).reshape(use.rows, use.length) % model.vocab
    given = None if use.source is None else model.encode(ids[:, : use.source] % model.vocab)
    pool = None
    if use.page is not None:
        pool = Pool(model, use.rows * -(-use.length // use.page) * use.page, use.rows, use.page, use.slack, use.codec)
    cache = model.new_cache(use.rows, use.capacity, use.slack, given, use.codec, use.residence, pool)
    if use.reserve:
        cache.reserve(use.length)
    chunk = use.prefill_chunk or use.read
    with torch.no_grad():
        for piece in [*ids[:, : use.read].split(chunk, 1), *ids[:, use.read :].split(1, 1)]:
            if piece.numel():
                model(piece, cache=cache, logits="last")
    return cache


@pytest.mark.parametrize(
    ("family", "way"),
    [(family, way) for way in WAYS for family in (["gemma2", "mamba2"] if "fixed" in way else FAMILIES)],
)
def test_the_cache_of_a_run_is_the_plans_to_the_byte(family: str, way: str) -> None:
    subject = model(family)
    plan = lamina.plan(config(family), dtype=torch.bfloat16, source=source(family), **WAYS[way])
    cache = run(subject, plan)
    assert plan.cache == owned(cache)
    assert list(plan.lines) == lines(cache)  # what print(cache) shows
    assert plan.weights == sum(x.nbytes for x in {*subject.parameters(), *subject.buffers()})


@pytest.mark.parametrize("codec", ["k5v4", "int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "deepseek_v3", "t5"])
def test_a_cache_in_codes_is_the_plans_to_the_byte_too(family: str, codec: str) -> None:
    subject = model(family)
    plan = lamina.plan(config(family), dtype=torch.bfloat16, source=source(family), codec=codec, **WAYS["grown"])
    assert list(plan.lines) == lines(run(subject, plan))
    if family == "llama":
        (line,) = (line for line in plan.lines if line.kind == "attention")
        assert plan.moved is not None and line.slots is not None
        assert plan.moved.tokens == line.nbytes / line.slots * plan.use.length


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "deepseek_v3", "t5"])
def test_a_cache_in_pages_and_its_pool_are_the_plans_to_the_byte_too(family: str) -> None:
    subject = model(family)
    for way, codec in (("reserved", None), ("fixed, not reserved", "int8")):
        asked = dict(WAYS[way]) | {"page": 4, "codec": codec, "reserve": True}
        plan = lamina.plan(config(family), dtype=torch.bfloat16, source=source(family), **asked)
        cache = run(subject, plan)
        *kept, besides = plan.lines
        assert kept == lines(cache)
        assert cache.pages is not None and cache.pool is not None and cache.pool.free == 0
        assert besides.nbytes + sum(cache.pages.own_and_shared) == cache.pool.nbytes
        assert "in pages of 4" in str(plan)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *((family, "grown") for family in ("llama", "gemma2", "deepseek_v3", "t5")),
        *(("falcon_h1", way) for way in WAYS),
    ],
)
def test_a_cache_on_the_host_is_the_plans_to_the_byte_too(family: str, way: str) -> None:
    given: dict[str, Any] = dict(dtype=torch.bfloat16, source=source(family), residence="host", **WAYS[way])
    plan = lamina.plan(config(family), **given)
    cache = run(model(family), plan)
    assert list(plan.lines) == lines(cache)
    assert plan.host == cache.nbytes
    assert plan.cache + plan.host == owned(cache)
    assert cache.fetcher is not None and len(cache.fetcher.buffers) == 2
    near = lamina.plan(config(family), **given | {"residence": "device"})
    assert near.host == 0 and near.fetched is None
    assert plan.growing <= near.growing and (plan.scratch or 0) <= (near.scratch or 0)


def test_a_cache_on_the_host_is_as_fast_as_the_slower_of_memory_and_link() -> None:
    given: dict[str, Any] = dict(length=100, bandwidth="1GB/s", residence="host")
    plan = lamina.plan(config("llama"), **given)
    assert plan.moved is not None and plan.fetched == plan.moved.tokens + plan.moved.new
    assert plan.tokens_per_second == 1e9 / plan.moved.total
    slow = lamina.plan(config("llama"), link="1MB/s", **given)
    assert slow.tokens_per_second == 1e6 / plan.fetched
    assert "at 1 GB/s and 0.001 GB/s" in str(slow)
    assert lamina.plan(config("llama"), **given | {"residence": "device"}, link="1MB/s").link == 1e6
    shared = lamina.plan(toy("shared"), length=10, residence="host")
    assert shared.moved is not None and shared.fetched is not None
    assert shared.fetched < shared.moved.tokens + shared.moved.new


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_generate_leaves_the_cache_that_was_planned(family: str) -> None:
    subject = model(family, torch.float32)
    cache = subject.new_cache(2)
    subject.generate([[1, 2, 3], [4, 5, 6]], max_new_tokens=40, cache=cache, eos_token_id=())
    assert lines(cache) == list(lamina.plan(subject, rows=2, length=43, prompt=3).lines)


OWN = [
    "sliding, keep",
    "shared",
    "latent, selected",
    "tokens",
    "cross",
    "nothing to remember",
    "from outside, among others",
]


@pytest.mark.parametrize("kind", OWN)
def test_models_of_ones_own_are_planned_too(kind: str) -> None:
    plan = lamina.plan(toy(kind), source=4 if kind == "cross" else None, **WAYS["grown"])
    assert list(plan.lines) == lines(run(toy(kind), plan))
    assert plan.scratch is not None
    assert plan.moved is not None and (plan.moved.total > 0 or kind == "nothing to remember")


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2"])
def test_what_growing_holds_besides_is_what_a_cache_that_grows_holds(family: str) -> None:
    plan = lamina.plan(config(family), rows=2, length=150, prompt=3, reserve=False, dtype=torch.float32)
    subject = model(family, torch.float32)
    with AllocationMeter() as held:
        cache = subject.new_cache(2)
        for length in range(3, 151):
            cache.reserve(length)
        cache._kept_logits(67, torch.float32)
    assert held.now == plan.cache
    assert held.most - held.now == plan.growing > 0
    assert [line.slots for line in plan.lines if line.kind == "attention"] in ([256], [])


def test_each_way_of_making_room_is_priced() -> None:
    plan = lamina.plan(config("llama"), length=100)
    rooms = {room.way: room for room in plan.rooms}
    token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, numbers, bytes
    assert rooms["reserved"].nbytes == rooms["fixed"].nbytes == plan.cache
    assert plan.lines[0].nbytes == 100 * token
    assert rooms["grown"].nbytes - rooms["reserved"].nbytes == 28 * (token + 8)  # 32, 64, 128 slots
    assert rooms["reserved"].growing == rooms["fixed"].growing == 0 < rooms["grown"].growing


def test_windows_and_states_cost_the_same_at_any_length() -> None:
    short, long = (lamina.plan(config("gemma2"), length=length, prompt=1) for length in (8192, 16384))
    one, two = ({line.kind: line for line in plan.lines} for plan in (short, long))
    ring = next(kind for kind in one if "sliding" in kind)
    assert one[ring] == two[ring]
    assert 2 * one["attention"].nbytes == two["attention"].nbytes
    states = [lamina.plan(config("mamba2"), length=length, prompt=1) for length in (64, 1_000_000)]
    assert states[0].lines[:2] == states[1].lines[:2]
    assert states[1].cache - states[0].cache == 8 * (1_000_000 - 64)  # the ids


def test_slack_costs_slots_and_a_second_state() -> None:
    plain, slack = (lamina.plan(config("mamba2"), length=50, slack=n) for n in (0, 4))
    conv, state = plain.lines[:2]
    assert slack.lines[0].slots == (conv.slots or 0) + 4
    assert slack.lines[1].nbytes > 2 * state.nbytes


# -- what fits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", dict(rows=2, prefill_chunk=16)), ("lfm2", dict(prompt=2, reserve=False, slack=2))],
)
def test_the_largest_context_and_the_most_rows_are_the_largest(family: str, settings: dict[str, Any]) -> None:
    def total(**more: int) -> int:
        return lamina.plan(config(family), **{"length": 20} | settings | more).total

    budget = 400_000
    found = lamina.plan(config(family), length=20, memory=budget, **settings)
    assert found.fits and found.most_length is not None and found.most_rows is not None
    assert total(length=found.most_length) <= budget < total(length=found.most_length + 1)
    assert total(rows=found.most_rows) <= budget < total(rows=found.most_rows + 1)


def test_without_a_length_it_is_the_largest_in_the_smallest_chunks() -> None:
    found = lamina.plan(config("llama"), memory="2MB", rows=3)
    asked: dict[str, Any] = dict(memory="2MB", rows=3, length=9)
    known, least, whole = (lamina.plan(config("llama"), prefill_chunk=n, **asked) for n in (None, 256, 100_000))
    assert found.fits and found.use.length == found.most_length == known.most_length and found.most_rows is None
    assert found.most_length == least.most_length and found.most_length > (whole.most_length or 0)
    assert found.chunk == found.most_length_chunk == 256 and known.chunk == 9
    assert "read in chunks of 256" in str(found)


def test_a_prompt_that_does_not_fit_in_one_pass_is_planned_in_chunks() -> None:
    whole, chunked = (lamina.plan(config("llama"), length=4000, prefill_chunk=n) for n in (None, 1024))
    left = whole.weights + whole.cache + round((chunked.scratch or 0) / SHARE) + 1
    found = lamina.plan(config("llama"), length=4000, memory=left)
    assert found.fits and found.chunk == 1024 and found.scratch == chunked.scratch and found.total < whole.total
    assert str(found).splitlines()[0].endswith("prompt of 4,000 in chunks of 1,024")
    assert lamina.plan(config("llama"), length=4000, memory="30MB").chunk == 4000


def test_a_length_that_does_not_fit_is_told_with_what_does() -> None:
    found = lamina.plan(config("llama"), length=100_000, memory="2MB")
    assert found.fits is False and found.most_rows == 0
    assert found.most_length is not None and found.most_length < 100_000
    assert "it does not fit" in str(found)


def test_the_positions_of_a_model_end_its_context() -> None:
    from tests.laws.toys import Attend, LearnedPositions

    table = LearnedPositions(Attend())
    assert lamina.plan(table, memory="1GB").most_length == 10
    assert lamina.plan(table).use.length == 10
    with pytest.raises(
        CapacityError, match="11 tokens were asked for, but the model has positions for 10: give length="
    ):
        lamina.plan(table, length=11)


# -- decoding ------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_decode_step_are_those_of_the_benchmark() -> None:
    plan = lamina.plan(model("deepseek_v3"), rows=3, length=20, bandwidth="2GB/s")
    assert plan.moved == decode_bytes(model("deepseek_v3"), 3, 20)
    assert plan.moved is not None
    assert plan.tokens_per_second == pytest.approx(3 * 2e9 / plan.moved.total)
    assert lamina.plan(T5, length=9, source=7).moved == decode_bytes(model("t5", torch.float32), 1, 9, source=7)
    assert lamina.plan(config("llama"), length=9).tokens_per_second is None


# -- what is given -------------------------------------------------------------------------------------------------


def test_a_model_its_configuration_and_its_files_give_the_same_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("falcon_h1") | {"dtype": "bfloat16"}))
    plans = [
        lamina.plan(what, length=30, dtype=dtype, device="cuda")
        for what, dtype in (
            (model("falcon_h1"), None), (config("falcon_h1"), torch.bfloat16),
            (Config(config("falcon_h1")), torch.bfloat16), (tmp_path, None), (str(tmp_path / "config.json"), None),
        )
    ]  # fmt: skip
    assert [plan.name for plan in plans] == ["FalconH1", "falcon_h1", "falcon_h1", tmp_path.name, "config"]
    first = plans[0].as_dict() | {"name": "", "positions": 0}
    assert all(plan.as_dict() | {"name": "", "positions": 0} == first for plan in plans)


def test_planning_leaves_a_model_as_it_was() -> None:
    subject = model("mamba")
    before = subject([[1, 2, 3]])
    lamina.plan(subject, length=10)
    assert all(x.device.type == "cpu" for x in subject.parameters())
    assert torch.equal(before, subject([[1, 2, 3]]))  # type: ignore[arg-type]


def test_a_shape_is_planned_in_bfloat16_and_prints_as_a_table() -> None:
    plan = lamina.plan("smollm2-135m", length=8192, bandwidth="100GB/s")
    text = str(plan).splitlines()
    assert text[:6] == [
        "smollm2-135m in bfloat16: 1 row of 8,192 tokens, reserved, prompt of 8,192 in one pass",
        "what               layers  slots  dtype           bytes",
        "-----------------  ------  -----  --------  -----------  ---------",
        "weights                           bfloat16  269,030,144  256.6 MiB",
        "attention              30  8,192  bfloat16  188,743,680  180.0 MiB",
        "token ids                  8,192  int64          65,536   64.0 KiB",
    ]
    assert text[9].split() == ["all", *f"{plan.total:,}".split(), "537.9", "MiB"]
    assert "speed            at most 218.4 tokens/s at 100 GB/s" in text
    assert json.loads(json.dumps(plan.as_dict()))["total"] == plan.total


@pytest.mark.parametrize(
    ("what", "settings", "match"),
    [
        ("smollm2-135m", dict(memory="200MiB"), "weights of smollm2-135m take 256.6 MiB in bfloat16, with one token in "
         "each of 1 row it is 257.6 MiB, and the budget is 200.0 MiB: give more, or ask for a smaller dtype or fewer"),
        ("smollm2-135m", dict(memory="257MiB", rows=1000), "in each of 1000 rows it is .* and the budget is 257.0 MiB"),
        ("smollm2-135m", dict(memory="20 G"), "memory '20 G' is not a size: give a number and B, kB, .* such as 24GiB"),
        ("smollm2-135m", dict(length=0), "length=0: it must be at least 1"),
        ("smollm2-135m", dict(length=9, capacity=8), "9 tokens do not fit a capacity of 8: give a larger one or none"),
        ("smollm2-135m", dict(length=9, prompt=10), "a prompt of 10 tokens is longer than the whole row, length=9"),
        ("smollm2-135m", dict(source=9), "source=9 was given, but this model reads none"),
        (T5, dict(), "this model reads a source: say how many tokens it has with source=…"),
        ("nowhere", dict(), "nowhere is neither a folder with config.json, nor a config.json, nor a .gguf .* llama-3"),
        ({"hidden_size": 3}, dict(), "has no 'model_type'"),
        ({"model_type": "gpt5"}, dict(), "model_type 'gpt5' is not among the"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, dict(), "quantized with 'awq'"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_a_way_out(what: Any, settings: dict[str, Any], match: str) -> None:
    with pytest.raises((InputError, CapacityError), match=match):
        lamina.plan(what, **settings)


def test_a_loaded_model_has_its_dtype() -> None:
    with pytest.raises(InputError, match=r"this model is in torch.bfloat16, not in torch.float32: give its config"):
        lamina.plan(model("llama"), dtype=torch.float32)
