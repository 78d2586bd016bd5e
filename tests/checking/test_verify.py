"""`verify` holds on every family, and catches faults that are planted on purpose."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lamina
from lamina.cache.layers.base import Key
from lamina.cache.layers.layout import Layout
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.cache.step import Step
from lamina.cache.storage.prefetch import StagedStorage
from lamina.checking import tolerance
from lamina.checking.basics import BASICS
from lamina.checking.laws import LAWS
from lamina.checking.verification import Verification
from lamina.checking.verify import without_plans
from lamina.checkpoint import progress
from lamina.model import Model
from lamina.models.llama import Llama
from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.laws.toys import KINDS, Attend, LearnedPositions, Toy, toy


@pytest.fixture(params=FIRST, ids=[family for family, _ in FIRST])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield pair(*request.param)[1]


def test_every_law_holds_on_every_family(model: Model) -> None:
    report = lamina.verify(model, tries=1)
    assert report, str(report)
    assert list(report.cases) == report.laws == [*BASICS, *LAWS]
    assert set(report.worst) == set(report.laws)
    assert "FAILED" not in str(report) and "not tried" not in str(report)


def first(family: str) -> Model:
    return pair(family, dict(FIRST)[family])[1]


def test_every_law_holds_on_the_host() -> None:
    report = lamina.verify(first("falcon_h1"), tries=1, length=12, residence="host")
    assert report, str(report)
    assert "kept on the host" in str(report)


def test_a_token_that_does_not_reach_the_host_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedStorage, "_write_through", lambda *_: None)
    report = lamina.verify(first("llama"), laws=["chunking"], tries=1, residence="host")
    assert report.first is not None and report.first.where == "layer 0"


def test_a_mask_off_by_one_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = first("gemma2")
    right = Layout.positions

    def shifted(self: Layout, slots: int, lengths: Tensor) -> Tensor:
        held = right(self, slots, lengths)
        return torch.where(held >= 0, held - 1, held) if self.ring else held

    monkeypatch.setattr(Layout, "positions", shifted)
    report = lamina.verify(model, tries=1)
    assert not report.ok
    assert report.first is not None
    assert "sliding" in " ".join(report.first.kinds)
    sliding = next(i for i, entry in enumerate(model.specs) if entry["attention"].window.span)
    assert report.first.where == f"layer {sliding}"


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "falcon_h1"])
def test_a_state_not_rewound_is_caught_and_named(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentLayer, "rewind", lambda *_: None)
    report = lamina.verify(first(family), tries=1, length=10)
    assert {found.law for found in report.differences} == {"rewind"}
    assert report.first is not None
    assert report.first.where.startswith("layer 0")


def test_padding_that_leaks_into_a_state_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RecurrentLayer.leave

    def careless(self: RecurrentLayer, step: Step, key: Key, inputs: Any, constants: Any, state: Tensor) -> None:
        _, state = self.rule.chunk(self.state(step, inputs), inputs, constants, None)
        right(self, step, key, inputs, constants, state)

    monkeypatch.setattr(RecurrentLayer, "leave", careless)
    report = lamina.verify(first("mamba2"), tries=1)
    broken = {found.law for found in report.differences}
    assert "independence" in broken
    assert "chunking" not in broken
    assert report.first is not None
    assert "SSD" in report.first.kinds


def test_a_wrong_position_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Llama.prepare

    def from_zero(self: Llama, positions: Tensor) -> object:
        return right(self, torch.arange(positions.shape[1]).expand_as(positions))

    monkeypatch.setattr(Llama, "prepare", from_zero)
    report = lamina.verify(first("llama"), tries=1, laws=["chunking"])
    assert report.first is not None
    assert report.first.where == "layer 0"
    assert report.first.position > 0


def test_a_fault_outside_the_blocks_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Llama.unembed
    monkeypatch.setattr(Llama, "unembed", lambda self, x: right(self, x) * (1 + 0.01 * (x.shape[1] == 1)))
    report = lamina.verify(first("llama"), tries=1, laws=["chunking"])
    assert report.first is not None
    assert report.first.where == "model"
    assert "outside blocks" in str(report)


def test_the_report_is_a_table_of_laws_and_kinds() -> None:
    report = lamina.verify(first("llama"), tries=1, laws=["chunking", "rewind"], length=8)
    lines = str(report).splitlines()
    assert lines[1].split() == ["law", "attention", "cases", "error", "seconds"]
    assert [line.split()[:3] for line in lines[3:8]] == [
        ["determinism", "ok", "12"],
        ["inputs", "ok", "3"],
        ["precision", "ok", "3"],
        ["chunking", "ok", "12"],
        ["rewind", "ok", "6"],
    ]
    assert all(report.seconds[law] >= 0 for law in report.laws)


def test_the_verdict_says_how_many_cases_of_which_kinds_were_checked() -> None:
    report = lamina.verify(first("gemma2"), tries=1, laws=["chunking", "rewind"], length=8)
    checked, verdict = str(report).splitlines()[-2:]
    assert checked == (
        "checked: layers: attention, sliding 8 / attention; codec: none; caches: growing and fixed 8 and fixed 15, "
        f"slack 3 and 0, on the device; {report.tokens} tokens compared"
    )
    assert report.tokens == 6 * (8 + 4 + 2)  # four ways of keeping, of which two can be rewound
    assert verdict == "ok: the cache changes nothing, in 36 cases of 5 laws"
    assert repr(report) == "Report(ok, 36 cases)"


def test_an_unknown_law_is_refused_by_name() -> None:
    with pytest.raises(lamina.InputError, match="there is no law 'gravity'; known: chunking"):
        lamina.verify(first("llama"), laws=["gravity"])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tries": 0}, "tries=0: give a whole number of at least 1, or nothing would be checked"),
        ({"tries": -1}, "tries=-1: "),
        ({"tries": True}, "tries=True: "),
        ({"tries": 1.5}, "tries=1.5: "),
        ({"length": 0}, "length=0: give a whole number of at least 2"),
        ({"length": 1}, "length=1: "),
        ({"rows": 0}, "rows=0: "),
        ({"rows": 1}, "rows=1: give a whole number of at least 2, or a row would have no neighbour"),
        ({"seed": -1}, "seed=-1: "),
        ({"seed": 2**64}, "seed=18446744073709551616: "),
        ({"laws": []}, "laws is empty, so nothing would be checked"),
        ({"residence": "moon"}, "moon"),
    ],
)
def test_what_would_check_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(lamina.InputError) as error:
        lamina.verify(toy("full"), **given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_row_longer_than_the_positions_of_a_model_is_refused() -> None:
    with pytest.raises(lamina.InputError, match="length=11: the model has positions for 10"):
        lamina.verify(LearnedPositions(Attend()), length=11)


def test_what_is_not_a_model_is_refused() -> None:
    with pytest.raises(lamina.InputError, match=r"verify takes a lamina\.Model or a transformers model, not Linear"):
        lamina.verify(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_report_without_cases_is_not_ok() -> None:
    report = lamina.Report("nothing", ["chunking"], ["attention"])
    assert not report.ok
    assert str(report).splitlines()[-2:] == ["not tried: chunking", "FAILED: 0 cases were checked, not every law"]
    assert not lamina.Report("no laws", [], []).ok


# -- what holds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_law_holds_on_every_kind_of_memory(kind: str) -> None:
    report = lamina.verify(toy(kind), tries=1, length=10)
    assert report, str(report)


def test_a_table_of_positions_is_read_to_its_end_by_growing_caches_too() -> None:
    report = lamina.verify(LearnedPositions(Attend(), Attend()), tries=1)
    assert report, str(report)
    assert "rows of [10, 5, 2] tokens" in str(report)
    assert "caches: growing and fixed 10, slack 3 and 0" in str(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_law_holds_in_half_precision_with_experts(dtype: torch.dtype) -> None:
    report = lamina.verify(copy.deepcopy(first("deepseek_v3")).to(dtype), tries=1, length=10)
    assert report, str(report)
    assert all(error < tolerance.ceiling(dtype) for error in report.worst.values())


def test_rows_mixed_before_experts_are_caught_although_experts_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(first("deepseek_v3")).to(torch.bfloat16)
    block = model.blocks[1]
    right = block.forward
    monkeypatch.setattr(block, "forward", lambda x, *rest: right(x + x.roll(1, 0) * (len(x) > 1), *rest))
    report = lamina.verify(model, tries=1, length=8, laws=["independence"])
    assert report.first is not None and report.first.where == "layer 1", str(report)


def test_the_same_numbers_give_the_same_report() -> None:
    one, two = (lamina.verify(toy("sliding"), tries=1, length=8) for _ in range(2))
    assert one.worst == two.worst and one.tokens == two.tokens


# -- tolerances --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", tolerance.CEILINGS, ids=str)
def test_no_noise_raises_a_tolerance_past_its_ceiling(dtype: torch.dtype) -> None:
    assert tolerance.allowed(0.78, dtype, 4.0) == tolerance.ceiling(dtype) <= 0.25
    assert tolerance.allowed(0.0, dtype, 4.0) == tolerance.least(dtype) < tolerance.ceiling(dtype)


def test_products_in_tf32_round_as_in_float16() -> None:
    cuda, before = torch.device("cuda"), torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        assert tolerance.rounds_as(torch.float32, cuda) == torch.float16
        assert tolerance.rounds_as(torch.bfloat16, cuda) == torch.bfloat16
        assert tolerance.rounds_as(torch.float32, torch.device("cpu")) == torch.float32
        torch.backends.cuda.matmul.allow_tf32 = False
        assert tolerance.rounds_as(torch.float32, cuda) == torch.float32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_what_is_not_finite_is_infinitely_wrong() -> None:
    exact = torch.ones(3, 2)
    found = torch.tensor([[1.0, 1.5], [1.0, torch.nan], [torch.inf, 1.0]])
    assert tolerance.errors(found, exact, tolerance.scales(exact)).tolist() == [0.5, torch.inf, torch.inf]


def test_a_block_that_runs_in_one_dtype_only_is_checked_without_double_precision() -> None:
    class Fixed(Attend):
        def forward(self, x: Tensor, memory: Any, shared: Tensor) -> Tensor:
            return super().forward(x.view(torch.int32).view(torch.float32), memory, shared)

    report = lamina.verify(Toy(Attend(), Fixed(), dtype=torch.float32), tries=1, length=8)
    assert report, str(report)
    assert "note: rounding was not measured: blocks do not run in double precision" in str(report)


# -- determinism -------------------------------------------------------------------------------------------------------


def test_dropout_left_on_fails_first_and_says_what_to_do() -> None:
    class Dropped(Attend):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(0.1)

        def forward(self, x: Tensor, memory: Any, shared: Tensor) -> Tensor:
            return super().forward(self.dropout(x), memory, shared)

    model = Toy(Attend(), Dropped(), dtype=torch.float32)
    assert lamina.verify(model, tries=1, length=8)
    report = lamina.verify(model.train(), tries=1, length=8)
    assert {found.law for found in report.differences} == {"determinism"}
    assert {found.where for found in report.differences} == {"layer 1"}
    assert "note: the model is in training mode, in which dropout is on: call model.eval()" in str(report)
    assert f"not tried: precision, {', '.join(LAWS)}" in str(report)
    assert repr(report) == "Report(FAILED at layer 1, law determinism, 6 cases)"


def test_noise_outside_the_blocks_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Toy(Attend(), dtype=torch.float32)
    monkeypatch.setattr(model, "embed", lambda ids: model.embedding(ids) + 0.1 * torch.rand(1))
    report = lamina.verify(model, tries=1, length=8)
    assert {found.where for found in report.differences} == {"model"}
    assert {found.law for found in report.differences} == {"determinism"}


def test_bits_that_differ_on_a_gpu_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Jitter(Attend):
        def forward(self, x: Tensor, memory: Any, shared: Tensor) -> Tensor:
            return super().forward(x, memory, shared) * (1 + 1e-6 * torch.rand(1))

    model = Toy(Attend(), Jitter(), dtype=torch.float32)
    assert not lamina.verify(model, tries=1, length=8)
    monkeypatch.setattr(Verification, "_excused", lambda self: tolerance.least(torch.float32))
    report = lamina.verify(model, tries=1, length=8)
    assert report, str(report)
    assert str(report).splitlines()[3].split()[:2] == ["determinism", "rounding"]
    assert "two equal passes differ in the last bits" in str(report) and "in layer 1" in str(report)


def test_a_state_on_the_module_that_breaks_the_next_pass_is_named() -> None:
    class Keeps(Attend):
        kept: Tensor | None = None

        def forward(self, x: Tensor, memory: Any, shared: Tensor) -> Tensor:
            last, self.kept = self.kept, x
            return super().forward(x if last is None else x + last, memory, shared)

    report = lamina.verify(Toy(Attend(), Keeps(), dtype=torch.float32), tries=1, length=8)
    assert report.first is not None and report.first.where == "layer 1"
    assert "raised RuntimeError: The size of tensor a" in str(report)
    with pytest.raises(RuntimeError):
        raise report.first.raised or AssertionError


# -- how long it takes -------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """How often the device is waited for: each time is a number that Python reads."""

    waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += str(func).split(".")[1] in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
        return func(*args, **(kwargs or {}))


def test_passes_are_few_and_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0
    right = lamina.Cache.step

    def counted(self: lamina.Cache, *given: Any, **more: Any) -> Step:
        nonlocal passes
        passes += 1
        return right(self, *given, **more)

    monkeypatch.setattr(lamina.Cache, "step", counted)
    with Counting() as device:
        report = lamina.verify(toy("full"))
    assert sum(report.cases.values()) == 222
    assert passes < 650
    assert device.waits < 250


def test_attention_on_a_gpu_builds_no_plan_for_each_shape() -> None:
    class OnGPU:
        device, dtype = torch.device("cuda"), torch.bfloat16

    before = torch.backends.cuda.cudnn_sdp_enabled()
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt), without_plans(OnGPU(), notes):  # type: ignore[arg-type]
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise KeyboardInterrupt
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert notes == ["attention ran without cuDNN, which builds a plan for each of hundreds of shapes"]
    with without_plans(toy("full"), notes):
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert len(notes) == 1


def test_a_progress_bar_counts_laws(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    lamina.verify(toy("full"), tries=1, length=4, laws=["chunking"])
    told = capsys.readouterr()
    assert "verifying" in told.err and "5/5" in told.err
    assert told.out == ""
    lamina.verify(toy("full"), tries=1, length=4, laws=["chunking"], progress=False)
    assert capsys.readouterr().err == ""
