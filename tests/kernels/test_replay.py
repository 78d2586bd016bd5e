"""Tokens are chosen, drawn and ended in a captured step as in plain passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import lamina
from lamina.errors import InputError
from lamina.generation.settings.settings import settings_of
from lamina.generation.stopping import Reason, Stopping
from lamina.generation.strategies.captured import decode_captured, why_plain
from lamina.generation.strategies.plain import decode_plain
from lamina.runtime.graphs import Graphs, weights_stay
from lamina.sampling.chain import Facts, chain_of
from lamina.sampling.chooser import Chooser
from lamina.sampling.history import History
from tests.generation.test_outside_filter import NEAR_BEST
from tests.generation.text import tokenizer, unreadable
from tests.kernels.runs import NEW, PROMPTS, begin, both, tiny

pytestmark = pytest.mark.usefixtures("few_programs")

# -- choosing ----------------------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    dict(do_sample=True, top_k=0),
    dict(do_sample=True, top_k=5, temperature=0.7),
    dict(do_sample=True, top_k=0, top_p=0.6),
    dict(do_sample=True, min_p=0.2, repetition_penalty=1.3),
    dict(repetition_penalty=1.8),
    dict(presence_penalty=2.0, frequency_penalty=0.5),
    dict(suppress_tokens=[18, 17], sequence_bias={(3,): 1.0}, begin_suppress_tokens=[50]),
    dict(renormalize_logits=True, remove_invalid_values=True, encoder_repetition_penalty=1.5),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_processors_and_draws_in_a_captured_step_give_the_tokens_of_plain_passes(settings: dict[str, Any]) -> None:
    model = tiny()
    made, _ = both(model, **settings)
    if settings.get("do_sample"):
        assert made.tokens != decode_plain(begin(model, **settings | {"seed": 1})).tokens


def test_a_filter_from_outside_the_package_is_part_of_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny(), dict(do_sample=True, top_k=0, near_best=0.1)
    lamina.register_setting(NEAR_BEST)
    try:
        made, _ = both(model, **given)
        assert made.tokens != decode_plain(begin(model, **given | {"near_best": 1.0})).tokens
        monkeypatch.setattr("lamina.generation.strategies.captured.why_not_captured", lambda model, cache: None)
        assert why_plain(begin(model, **given)) is None
    finally:
        lamina.unregister_setting("near_best")


def test_ends_that_processors_move_are_those_of_plain_passes() -> None:
    model = tiny()
    free = decode_plain(begin(model)).tokens
    made, _ = both(model, eos_token_id=[row[0] for row in free], min_new_tokens=2)
    assert min(len(row) for row in made.tokens) >= 2
    made, _ = both(model, exponential_decay_length_penalty=(1, 50.0), eos_token_id=9, forced_eos_token_id=9)
    assert [row[-1] for row in made.tokens] == [9, 9]


def test_seeds_share_a_captured_step_and_other_settings_have_their_own() -> None:
    model = tiny()
    model.__dict__.pop("_graphs", None)
    first: dict[str, Any] = dict(do_sample=True, top_k=7, suppress_tokens=[4, 5], eos_token_id=[60], min_new_tokens=1)
    first["max_new_tokens"] = 2
    one, other = (both(model, **first, seed=seed)[0].tokens for seed in (1, 2**40))
    decode_captured(begin(model, **first | {"suppress_tokens": [5, 4], "max_new_tokens": 1}))
    assert one != other and model.graphs.captures == 1
    first["max_new_tokens"] = 1
    for changes in ({"suppress_tokens": [4, 6]}, {"top_k": 8}, {"sequence_bias": {(3,): 1.0}}) * 2:
        decode_captured(begin(model, **first | changes))
    assert model.graphs.captures == 4


def test_equal_settings_give_equal_choosers() -> None:
    model = tiny()
    given: dict[str, Any] = dict(
        suppress_tokens=[4], begin_suppress_tokens=[5], forced_bos_token_id=3, forced_eos_token_id=[4, 3],
        min_length=3, eos_token_id=[6], exponential_decay_length_penalty=(2, 1.1), repetition_penalty=1.2,
        sequence_bias={(7,): 1.0, (1, 2): 2.0}, bad_words_ids=[[8], [9, 3]],
    )  # fmt: skip
    one, other = (
        Chooser(tuple(chain_of(settings_of(model, given), Facts(model.vocab, torch.device("cpu"))))) for _ in range(2)
    )
    assert one == other and hash(one) == hash(other)


@dataclass(frozen=True)
class Dries:
    """Excludes every id once a row has two new tokens."""

    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: torch.Tensor, history: History) -> torch.Tensor:
        return torch.where((history.lengths - history.prompts >= 2)[:, None], -torch.inf, scores)


@pytest.mark.parametrize(
    "settings",
    [{}, dict(do_sample=True), dict(stop=lambda row, tokens, text: False)],
    ids=["greedy", "drawn", "with a stop rule"],
)
def test_a_row_that_nothing_may_follow_ends_before_an_excluded_id_is_fed(settings: dict[str, Any]) -> None:
    model = tiny()
    given: dict[str, Any] = dict(logits_processor=[Dries()], **settings)
    both(model, **given, max_new_tokens=2)
    for way in (decode_captured, decode_plain):
        run = begin(model, **given, max_new_tokens=4)
        told: list[tuple[int, int, Reason | None]] = []
        if settings:
            run.on_token = lambda *event, told=told: told.append(event)  # type: ignore[misc]
        with pytest.raises(InputError, match="nothing may follow the tokens of row 0: logits_processor Dries"):
            way(run)
        assert [len(row) for row in run.cache.tokens] == [len(prompt) + 2 for prompt in PROMPTS]
        assert len(told) == (4 if settings else 0)


# -- ending ------------------------------------------------------------------------------------------------------------


def test_rows_end_on_the_device_and_are_told_in_order() -> None:
    model = tiny()
    free = decode_plain(begin(model)).tokens
    ends = [free[1][0], 66]
    made, _ = both(model, eos_token_id=ends)
    assert made.reasons == ["length", "eos"]
    told: list[tuple[int, int, Reason | None]] = []
    run = begin(model, eos_token_id=ends)
    run.on_token = lambda *event: told.append(event)
    assert decode_captured(run).tokens == made.tokens
    for row, (tokens, reason) in enumerate(zip(made.tokens, made.reasons, strict=True)):
        reasons = [None] * (len(tokens) - 1) + [reason]
        assert [event[1:] for event in told if event[0] == row] == list(zip(tokens, reasons, strict=True))


def test_rows_of_different_greatest_lengths_end_each_at_its_own() -> None:
    made, _ = both(tiny(), max_new_tokens=None, max_length=12)
    assert [len(tokens) for tokens in made.tokens] == [1, 11]


def test_stop_strings_and_functions_end_rows_of_a_captured_step() -> None:
    model = tiny()
    words = dict(suppress_tokens=unreadable(), repetition_penalty=1.4, max_new_tokens=4)
    free = decode_plain(begin(model, **words)).tokens
    text = tokenizer().decode(free[0])
    made, _ = both(model, stop_strings=text[1:3], **words)
    assert made.reasons[0] == "stop" and len(made.tokens[0]) < 4
    made, _ = both(model, stop=lambda row, tokens, text: row == 1 and len(tokens) == 2, **words)
    assert made.reasons == ["length", "stop"] and len(made.tokens[1]) == 2
    made, _ = both(model, max_time=1e-9, **words)
    assert made.reasons == ["time", "time"]


def test_rows_of_a_captured_step_end_by_the_context() -> None:
    model = tiny()
    expected = decode_plain(begin(model, max_new_tokens=5))
    for told in (None, lambda row, token, reason: None):
        run = begin(model, max_new_tokens=5)
        run.stopping = Stopping.of(run.settings, run.prompt_lengths, None, left=[2, 9])
        run.on_token = told
        made = decode_captured(run)
        assert made.reasons == ["context", "length"]
        assert made.tokens == [expected.tokens[0][:2], expected.tokens[1]]


def test_a_listener_that_fails_leaves_whole_tokens_and_the_step_goes_on_with_others() -> None:
    model = tiny()
    expected = decode_plain(begin(model)).tokens
    run = begin(model)
    calls: list[int] = []

    def told(row: int, token: int, reason: Reason | None) -> None:
        calls.append(row)
        if len(calls) == 4:
            raise KeyboardInterrupt

    run.on_token = told
    with pytest.raises(KeyboardInterrupt):
        decode_captured(run)
    assert run.cache.tokens == [prompt + new[:1] for prompt, new in zip(PROMPTS, expected, strict=True)]
    both(model)
    rest = model.generate([[], []], NEW - 1, cache=run.cache, eos_token_id=())
    assert rest.tokens == [new[1:] for new in expected]


@dataclass
class Unhashable:
    """A processor that may change, so that it cannot say which captured step is its own."""

    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: torch.Tensor, history: History) -> torch.Tensor:
        return scores


def test_what_is_not_replayed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    monkeypatch.setattr("lamina.generation.strategies.captured.why_not_captured", lambda model, cache: None)
    assert why_plain(begin(model, repetition_penalty=1.2, do_sample=True)) is None
    for given, text in (
        (dict(no_repeat_ngram_size=2), "NoRepeatNgram reads the tokens so far"),
        (dict(logits_processor=lambda scores, history: scores), "function reads the tokens so far"),
        (dict(logits_processor=Unhashable()), "Unhashable cannot be hashed"),
        (dict(eos_token_id=list(range(9))), "9 ids end a row, and a captured step compares up to 8"),
    ):
        reason = why_plain(begin(model, **given))
        assert reason is not None and text in reason


def test_a_call_reads_the_addresses_of_weights_once_and_the_next_call_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr("lamina.runtime.graphs.addresses", lambda model: looked.append(model) or [len(looked)])
    graphs = Graphs(tiny())
    with weights_stay():
        graphs.step(1, Chooser()).release()
        with weights_stay():
            graphs.step(1, Chooser()).release()
    assert len(looked) == 1 and len(graphs.kept) == 1
    graphs.step(2, Chooser()).release()
    assert len(looked) == 2 and [key[0] for key in graphs.kept] == [2]  # other addresses: the programs were dropped
