"""Rows end where the model has no more positions, however tokens are searched for; longer prompts are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lamina.config import Config
from lamina.errors import CapacityError, InputError
from lamina.generation.chat import Chat
from lamina.generation.stopping import Stopping
from lamina.model import Model
from lamina.nn.attention.rope_settings import positions_of
from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.families.test_t5 import FIRST as T5_FIRST
from tests.families.test_t5 import pair as t5_pair
from tests.generation.drafted import like
from tests.generation.rows import PROMPTS, held, model_of
from tests.generation.text import reader, tokenizer
from tests.laws.toys import Attend, LearnedPositions, toy

CONTEXT = 16  # the prompts have 11, 1 and 3 tokens

STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drawn": dict(do_sample=True, seed=3),
    "lookup": dict(prompt_lookup_num_tokens=4),
    "early exit": dict(assistant_early_exit=1, num_assistant_tokens=5),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "contrastive": dict(penalty_alpha=0.6, top_k=3),
    "dola": dict(dola_layers="low"),
    "guided": dict(guidance_scale=1.5),
    "without a cache": dict(use_cache=False),
}


def made_for(model: Model, monkeypatch: pytest.MonkeyPatch, positions: int = CONTEXT) -> Model:
    """The model as if its checkpoint had been made for so many positions."""
    monkeypatch.setattr(model, "config", model.config.with_values(max_position_embeddings=positions))
    assert model.context == positions
    return model


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    return made_for(model_of("llama"), monkeypatch)


def watch(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The highest position of every pass from now on."""
    seen, prepare = [], type(model).prepare

    def prepared(self: Model, positions: Tensor) -> Any:
        seen.append(int(positions.max()))
        return prepare(self, positions)

    monkeypatch.setattr(type(model), "prepare", prepared)
    monkeypatch.setattr(model, "uncaptured", "its positions are watched", raising=False)  # a host reads them
    return seen


# -- how many there are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (dict(max_position_embeddings=512), 512),
        (dict(n_positions=1024), 1024),
        (dict(), None),
        (dict(max_position_embeddings=131072, rope_scaling=dict(
            rope_type="llama3", factor=8.0, original_max_position_embeddings=8192)), 131072),
        (dict(max_position_embeddings=163840, rope_parameters=dict(
            rope_type="yarn", factor=40.0, original_max_position_embeddings=4096)), 163840),
        (dict(max_position_embeddings=32768, rope_scaling=dict(
            type="yarn", factor=4.0, original_max_position_embeddings=32768)), 131072),
        (dict(max_position_embeddings=32768, rope_scaling=dict(
            type="yarn", original_max_position_embeddings=4096)), 32768),
        (dict(max_position_embeddings=4096, rope_scaling=dict(type="linear", factor=4.0)), 16384),
        (dict(max_position_embeddings=4096, rope_scaling=dict(type="dynamic", factor=2.0)), 4096),
        (dict(max_position_embeddings=4096, rope_scaling=dict(type="dynamic", factor=2.0), context=6000), 6000),
        (dict(max_position_embeddings=16384, rope_scaling=dict(
            type="linear", factor=4.0, original_max_position_embeddings=4096)), 16384),
        (dict(max_position_embeddings=131072, rope_scaling=dict(
            type="longrope", original_max_position_embeddings=4096)), 4096),
        (dict(max_position_embeddings=131072, original_max_position_embeddings=4096, context=9000, rope_scaling=dict(
            type="su")), 9000),
    ],
)  # fmt: skip
def test_a_configuration_names_its_positions_with_and_without_scaling(
    config: dict[str, Any], expected: int | None
) -> None:
    assert positions_of(Config(config)) == expected


def test_every_family_says_how_many_positions_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for family, name in FIRST:
        theirs, model = pair(family, name)
        expected = None if family.startswith("mamba") else theirs.config.max_position_embeddings
        assert model.context == expected
    made = model_of("mamba")
    monkeypatch.setattr(made, "config", made.config.with_values(max_position_embeddings=9))
    assert made.context is None  # nothing in it has a position
    t5 = t5_pair(T5_FIRST)[1]
    monkeypatch.setattr(t5, "config", t5.config.with_values(n_positions=9))
    assert t5.context is None
    assert toy("full").context is None  # no configuration
    assert LearnedPositions(Attend()).context == 10


# -- where rows end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_pass_reaches_past_the_context_and_rows_say_why_they_ended(
    model: Model, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen = watch(model, monkeypatch)
    settings = STRATEGIES[name]
    result = model.generate(PROMPTS, 12, eos_token_id=(), **settings)
    each = len(result.tokens) // len(PROMPTS)
    assert [len(row) for row in result.tokens] == [n for n in (5, 12, 12) for _ in range(each)]
    assert result.reasons == [reason for reason in ("context", "length", "length") for _ in range(each)]
    assert max(seen) == CONTEXT - 1
    further = model.generate(PROMPTS, 12, eos_token_id=(), beyond_context=True, **settings)
    assert max(seen) > CONTEXT - 1 and set(further.reasons) == {"length"}
    if name != "beams":  # which rank by length
        assert result.tokens == [row[:n] for row, n in zip(further.tokens, (5, 12, 12), strict=True)]


def test_an_equal_limit_of_the_caller_is_its_own_reason(model: Model) -> None:
    for limit in (dict(max_new_tokens=5), dict(max_length=16), dict(max_length=14)):
        assert model.generate(PROMPTS[:1], eos_token_id=(), **limit).reasons == ["length"]
    assert model.generate(PROMPTS[:1], max_length=17, eos_token_id=()).reasons == ["context"]
    assert Stopping([2, 2], ends=["length", "context"]).most == [2, 2]


def test_an_assistant_drafts_no_further_than_its_own_positions(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assistant = like(model, 0.0)
    settings = dict(assistant_model=assistant, num_assistant_tokens=4, assistant_confidence_threshold=0.0)
    expected, drafted = model.generate(PROMPTS, 12, eos_token_id=()), []
    for positions in (13, CONTEXT):
        monkeypatch.setattr(assistant, "config", model.config.with_values(max_position_embeddings=positions))
        result = model.generate(PROMPTS, 12, eos_token_id=(), **settings)
        assert (result.tokens, result.reasons) == (expected.tokens, expected.reasons)
        drafted.append(sum(result.speculation.drafted))
    assert drafted[0] < drafted[1]


def test_what_guidance_leads_away_from_ends_rows_too(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(model, monkeypatch)
    result = model.generate(PROMPTS, 12, eos_token_id=(), guidance_scale=2.0, negative_prompt=[[4] * 14])
    assert [len(row) for row in result.tokens] == [2, 2, 2] and set(result.reasons) == {"context"}
    assert max(seen) < CONTEXT
    with pytest.raises(InputError, match="the negative prompt of row 0 has 16 tokens, and the model was made for 16"):
        model.generate(PROMPTS, 12, guidance_scale=2.0, negative_prompt=[[4] * 16])


def test_a_stream_says_that_a_row_ended_by_the_context(model: Model) -> None:
    events = list(model.stream(PROMPTS[:1], 12, eos_token_id=()))
    assert [event.reason for event in events] == [None] * 4 + ["context"]


def test_one_cached_row_for_many_and_several_sequences_of_each_end_there(model: Model) -> None:
    cache = model.generate(PROMPTS[2:], 4, eos_token_id=()).cache
    result = model.generate(
        [[1], [2, 3, 4]], 40, eos_token_id=(), cache=cache, do_sample=True, num_return_sequences=2, seed=1
    )
    assert result.cache.lengths.tolist() == [CONTEXT] * 4 and set(result.reasons) == {"context"}


# -- what is refused -------------------------------------------------------------------------------------------------


def test_prompts_that_fill_the_context_are_refused_with_both_counts(model: Model) -> None:
    for length, text in (
        (30, "row 1 has 30 tokens with its prompt, and the model was made for 16: give fewer, or beyond_context=True"),
        (16, "row 1 has 16 tokens with its prompt, and the model was made for 16, which leaves no room for a new one"),
    ):
        with pytest.raises(InputError, match=text):
            model.generate([[1], [2] * length], 3)
        for settings in STRATEGIES.values():
            with pytest.raises(InputError, match="the model was made for 16"):
                model.generate([[2] * length], 3, **settings)
        assert len(model.generate([[2] * length], 3, eos_token_id=(), beyond_context=True).tokens[0]) == 3
    assert model.generate([[2] * 15], 3, eos_token_id=()).reasons == ["context"]


def test_a_refused_continuation_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("llama", "gemma2", "qwen3_next"):
        model, cache = made_for(model_of(family), monkeypatch), held(family)
        before = cache.tokens
        for prompts, whole in (([[1] * 5, [2], [3]], None), ([before[0][:3] + [9] * 20, *before[1:]], True)):
            with pytest.raises(InputError, match="tokens with its prompt, and the model was made for 16"):
                model.generate(prompts, 2, cache=cache, whole=whole)
            assert cache.tokens == before
        done = model.generate([[1], [2], [3]], 9, cache=cache, eos_token_id=(), beyond_context=True)
        assert [len(row) for row in done.tokens] == [9, 9, 9]


def test_a_table_of_positions_ends_rows_and_nothing_goes_beyond_it() -> None:
    model = LearnedPositions(Attend())
    result = model.generate([[1, 2, 3], [4]], 20, eos_token_id=())
    assert result.cache.lengths.tolist() == [10, 10] and result.reasons == ["context", "context"]
    with pytest.raises(
        InputError, match="row 0 has 12 tokens with its prompt, and the model has 10 positions: give fe"
    ):
        model.generate([[1] * 12], 3)
    with pytest.raises(CapacityError, match="cannot reserve 23 tokens: the capacity is 10"):
        model.generate([[1, 2, 3]], 20, beyond_context=True)


def test_a_capacity_is_asked_for_no_more_than_the_context(model: Model) -> None:
    cache = model.new_cache(capacity=CONTEXT)
    assert model.generate([[1, 2]], 1000, cache=cache, eos_token_id=()).reasons == ["context"]
    with pytest.raises(CapacityError, match="cannot reserve 16 tokens: the capacity is 15"):
        model.generate([[1, 2]], 1000, cache=model.new_cache(capacity=CONTEXT - 1), eos_token_id=())


# -- chats -----------------------------------------------------------------------------------------------------------


def test_a_chat_that_does_not_fit_is_refused_with_the_counts_and_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made_for(reader(), monkeypatch, 60)
    chat = Chat(model, max_new_tokens=6)
    assert len(chat.send("the thing").tokens[0]) == 6
    messages, cache = list(chat.messages), chat.cache.tokens
    asked = [*messages, {"role": "user", "content": "they think " * 40}]
    count = len(tokenizer().encode(tokenizer().chat(asked), special=False))
    text = f"row 0 has {count} tokens with its prompt, and the model was made for 60"
    with pytest.raises(InputError, match=text):
        chat.send("they think " * 40)
    with pytest.raises(InputError, match=text):
        list(chat.stream("they think " * 40))
    assert chat.messages == messages and chat.cache.tokens == cache
    result = chat.send("x")
    assert result.reasons[0] in ("eos", "length", "context") and chat.cache.lengths.tolist()[0] <= 60


def test_an_answer_that_meets_the_context_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made_for(reader(), monkeypatch, 40)
    chat = Chat(model, max_new_tokens=100, eos_token_id=())
    assert chat.send("a").reasons == ["context"]
    assert chat.cache.lengths.tolist() == [40]
    with pytest.raises(InputError, match="and the model was made for 40"):
        chat.send("b")
    further = Chat(model, max_new_tokens=100, eos_token_id=(), beyond_context=True)
    assert len(further.send("a").tokens[0]) == 100
