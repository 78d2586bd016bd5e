"""`model.generate` gives the tokens that transformers' `generate` gives with the same weights and the same settings.

Rows are ragged and decoded together here; the truth is transformers with each row alone.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, WatermarkingConfig

import lamina
from lamina.model import Model
from tests.families.cases.llama import make
from tests.families.harness import pair
from tests.families.test_t5 import pair as t5_pair
from tests.generation.text import CHATML, tokenizer, unreadable

NEW = 10
ROWS = [[5, 9, 12, 3, 44, 8, 21, 9, 12, 3, 50], [7], [30, 31, 32]]
FAMILIES = {"llama": "grouped", "gemma2": "sliding and full in turn"}  # the latter's window is 8 tokens
both = pytest.mark.parametrize("family", FAMILIES)


def theirs_alone(theirs: Any, rows: list[list[int]], **settings: Any) -> list[list[int]]:
    """What transformers makes of each row alone."""
    settings = dict(eos_token_id=None, pad_token_id=0, do_sample=False) | settings
    if "max_length" not in settings:
        settings.setdefault("max_new_tokens", NEW)
    made = [theirs.generate(torch.tensor([row]), **settings)[0].tolist() for row in rows]
    start = [1 if theirs.config.is_encoder_decoder else len(row) for row in rows]
    return [tokens[n:] for tokens, n in zip(made, start, strict=True)]


def same(
    theirs: Any, ours: Model, rows: list[list[int]] = ROWS, *, changes: bool = True, also: Any = None, **settings: Any
) -> lamina.generation.Result:
    """Checks that the tokens are the same, and others than without these settings. also: what transformers is given
    in another form."""
    expected = theirs_alone(theirs, rows, **settings | (also or {}))
    given = dict(eos_token_id=()) | settings
    if "max_length" not in given:
        given.setdefault("max_new_tokens", NEW)
    result = ours.generate(rows, **given)
    assert result.tokens == expected
    if changes:
        assert result.tokens != free(theirs, rows)
    return result


def free(theirs: Any, rows: list[list[int]] = ROWS) -> list[list[int]]:
    """The greedy tokens that nothing changes."""
    return _free(theirs, tuple(map(tuple, rows)))


@functools.cache
def _free(theirs: Any, rows: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return theirs_alone(theirs, [list(row) for row in rows])


def models(family: str) -> tuple[Any, Model]:
    return pair(family, FAMILIES[family])


# -- one setting after the other ---------------------------------------------------------------------------------------

Made = Callable[[list[list[int]]], dict[str, Any]]
SETTINGS: dict[str, Made] = {
    "repetition_penalty": lambda free: dict(repetition_penalty=1.7),
    "no_repeat_ngram_size": lambda free: dict(no_repeat_ngram_size=2),
    "bad_words_ids": lambda free: dict(bad_words_ids=[[free[0][2]], free[1][:2], [*free[2][:2], free[2][2]]]),
    "sequence_bias": lambda free: dict(sequence_bias={(free[0][1],): -3.0, (free[1][0], 4): 6.0, (60,): 0.5}),
    "suppress_tokens": lambda free: dict(suppress_tokens=[free[0][0], free[1][3]]),
    "begin_suppress_tokens": lambda free: dict(begin_suppress_tokens=[row[0] for row in free]),
    "forced_bos_token_id": lambda free: dict(forced_bos_token_id=9),
    "forced_bos_token_id and begin_suppress_tokens": lambda free: dict(
        forced_bos_token_id=9, begin_suppress_tokens=[9, 27, 18]
    ),
    "forced_eos_token_id": lambda free: dict(forced_eos_token_id=11),
    "forced_eos_token_id at max_length": lambda free: dict(forced_eos_token_id=11, max_length=14),
    "several eos ids": lambda free: dict(eos_token_id=[free[0][1], free[2][4]]),
    "min_length": lambda free: dict(min_length=7, eos_token_id=[row[1] for row in free]),
    "min_new_tokens": lambda free: dict(min_new_tokens=6, eos_token_id=[row[3] for row in free]),
    "exponential_decay_length_penalty": lambda free: dict(
        exponential_decay_length_penalty=(3, 1.9), eos_token_id=13
    ),
    "prefix_allowed_tokens_fn": lambda free: dict(
        prefix_allowed_tokens_fn=lambda row, tokens: [int(tokens[-1] * 7 + len(tokens)) % 67, 3, 4]
    ),
    "encoder_repetition_penalty": lambda free: dict(encoder_repetition_penalty=4.0),
    "guidance_scale": lambda free: dict(guidance_scale=2.0),
    "max_length": lambda free: dict(max_length=14),
}  # fmt: skip


@both
def test_greedy_tokens_are_the_same(family: str) -> None:
    same(*models(family), changes=False)


@both
@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_by_itself_gives_the_same_tokens(family: str, name: str) -> None:
    theirs, ours = models(family)
    same(theirs, ours, **SETTINGS[name](free(theirs)))


def test_several_settings_together_give_the_same_tokens() -> None:
    theirs, ours = models("gemma2")
    same(
        theirs, ours, repetition_penalty=1.2, no_repeat_ngram_size=3, suppress_tokens=[8], guidance_scale=1.5,
        eos_token_id=[48, 3], min_new_tokens=5, forced_eos_token_id=[3], renormalize_logits=True,
    )  # fmt: skip


@both
def test_no_ngram_of_the_prompt_occurs_again(family: str) -> None:
    theirs, ours = models(family)
    rows = [row + new for row, new in zip(ROWS, free(theirs), strict=True)]
    same(theirs, ours, rows, encoder_no_repeat_ngram_size=2)


@both
def test_a_negative_prompt_leads_away_from_it(family: str) -> None:
    theirs, ours = models(family)
    negative = [4, 40, 41]
    also = dict(negative_prompt_ids=torch.tensor([negative]))
    expected = theirs_alone(theirs, ROWS, guidance_scale=2.0, **also)
    for form in ([negative], [negative] * 3):
        result = ours.generate(ROWS, NEW, guidance_scale=2.0, negative_prompt=form, eos_token_id=())
        assert result.tokens == expected != free(theirs)


@both
@pytest.mark.parametrize(
    "config",
    [dict(bias=2.5), dict(bias=3.0, seeding_scheme="selfhash", context_width=2)],
    ids=["lefthash", "selfhash"],
)
def test_a_watermark_marks_the_same_tokens(family: str, config: dict[str, Any]) -> None:
    also = dict(watermarking_config=WatermarkingConfig(**config))
    same(*models(family), [*ROWS[:1], *ROWS[2:]], watermarking_config=config, also=also)


def test_invalid_scores_are_removed() -> None:
    theirs, ours = (copy.deepcopy(model) for model in models("llama"))
    with torch.no_grad():
        theirs.lm_head.weight[5] = torch.nan
        theirs.lm_head.weight[6, :20] = torch.inf
        ours.head.weight.copy_(theirs.lm_head.weight)
    assert ours.generate(ROWS, NEW, eos_token_id=()).tokens == [[5] * NEW] * 3
    same(theirs, ours, remove_invalid_values=True)


# -- scores ------------------------------------------------------------------------------------------------------------


@both
def test_logits_and_scores_are_the_same_at_every_token(family: str) -> None:
    theirs, ours = models(family)
    settings: dict[str, Any] = dict(
        repetition_penalty=1.3, suppress_tokens=[8, 9], renormalize_logits=True, max_new_tokens=NEW,
        output_scores=True, output_logits=True,
    )  # fmt: skip
    result = ours.generate(ROWS, eos_token_id=(), **settings)
    for row, prompt in enumerate(ROWS):
        truth = theirs.generate(
            torch.tensor([prompt]), eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, **settings
        )
        for found, expected in ((result.logits, truth.logits), (result.scores, truth.scores)):
            torch.testing.assert_close(found[row], torch.cat(expected), rtol=1e-4, atol=1e-4)


FILTERS: list[dict[str, Any]] = [
    dict(), dict(top_k=0), dict(top_k=5), dict(top_k=0, top_p=0.6), dict(temperature=0.6, min_p=0.1, top_k=0),
    dict(top_k=0, typical_p=0.5), dict(top_k=0, epsilon_cutoff=0.02), dict(top_k=0, eta_cutoff=0.1),
    dict(top_k=0, top_h=0.4), dict(temperature=1.4, top_k=20, top_p=0.9, repetition_penalty=1.5),
]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_what_is_drawn_from_has_the_same_scores(filters: dict[str, Any]) -> None:
    theirs, ours = models("llama")
    settings = dict(do_sample=True, max_new_tokens=1, output_scores=True, **filters)
    result = ours.generate(ROWS, eos_token_id=(), **settings)
    for prompt, scores in zip(ROWS, result.scores, strict=True):
        truth = theirs.generate(
            torch.tensor([prompt]), eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, **settings
        )
        torch.testing.assert_close(scores, torch.cat(truth.scores), rtol=1e-4, atol=1e-4)


# -- drafts ------------------------------------------------------------------------------------------------------------

REPEATING = [[11, 12, 13, 14, 11, 12, 13, 20, 11, 12], [18, 18, 18], [7]]


@both
def test_prompt_lookup_gives_the_same_tokens(family: str) -> None:
    result = same(*models(family), REPEATING, changes=False, prompt_lookup_num_tokens=3, max_matching_ngram_size=2)
    assert result.speculation.acceptance_rate > 0
    same(*models(family), REPEATING, prompt_lookup_num_tokens=3, repetition_penalty=1.4)


@both
def test_an_assistant_gives_the_same_tokens(family: str) -> None:
    theirs, ours = models(family)
    assistants = [copy.deepcopy(model) for model in (theirs, ours)]
    for assistant in assistants:
        torch.manual_seed(3)
        for parameter in assistant.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.02)
    also = dict(assistant_model=assistants[0])
    same(theirs, ours, changes=False, assistant_model=assistants[1], also=also)
    same(theirs, ours, assistant_model=assistants[1], no_repeat_ngram_size=2, also=also)


@both
def test_an_early_exit_gives_the_same_tokens(family: str) -> None:
    theirs, ours = models(family)
    assert ours.generate(ROWS, NEW, assistant_early_exit=1, eos_token_id=()).tokens == free(theirs)


# -- a source ----------------------------------------------------------------------------------------------------------

T5 = "own head, few buckets, gated silu"
SOURCES = [[5, 9, 12, 3, 44, 8, 21, 9, 12, 3], [7, 40], [30, 31, 32]]


@pytest.mark.parametrize(
    "settings",
    [
        dict(encoder_repetition_penalty=6.0), dict(forced_bos_token_id=9), dict(repetition_penalty=2.0),
        dict(no_repeat_ngram_size=1), dict(max_length=5), dict(forced_eos_token_id=4),
        dict(begin_suppress_tokens=[9, 3, 21], forced_bos_token_id=9),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_with_a_source_gives_the_same_tokens(settings: dict[str, Any]) -> None:
    same(*t5_pair(T5), SOURCES, **settings)


def test_no_ngram_of_the_source_occurs() -> None:
    theirs, ours = t5_pair(T5)
    sources = [row + new for row, new in zip(SOURCES, free(theirs, SOURCES), strict=True)]
    for n in (1, 2):
        same(theirs, ours, sources, encoder_no_repeat_ngram_size=n)


def test_what_a_decoder_begins_with_may_be_given() -> None:
    theirs, ours = t5_pair(T5)
    begun = [[0, 8, 3], [0, 60], [0]]
    result = ours.generate(SOURCES, NEW, decoder_input_ids=begun, eos_token_id=())
    for source, start, tokens in zip(SOURCES, begun, result.tokens, strict=True):
        truth = theirs.generate(
            torch.tensor([source]), decoder_input_ids=torch.tensor([start]), max_new_tokens=NEW, eos_token_id=None
        )
        assert [*start, *tokens] == truth[0].tolist()


# -- text --------------------------------------------------------------------------------------------------------------


@functools.cache
def readers() -> tuple[Any, Model, Any]:
    """A random llama that knows the tokens of `tokenizer`, in both libraries, and transformers' form of it."""
    torch.manual_seed(1)
    theirs = LlamaForCausalLM(make(vocab_size=tokenizer().vocab_size)).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(std=0.3)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = lamina.load(folder, device="cpu")
    ours.tokenizer = tokenizer()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend, chat_template=CHATML)
    return theirs, ours, words


def texts() -> list[list[int]]:
    return [tokenizer().encode(text) for text in ("the theory of", "http", "they think naïve 😀")]


def test_stop_strings_end_rows_at_the_same_token_wherever_tokens_are_cut() -> None:
    theirs, ours, words = readers()
    settings: dict[str, Any] = dict(max_new_tokens=14, suppress_tokens=list(unreadable()), no_repeat_ngram_size=2)
    new = ours.generate(texts(), eos_token_id=(), **settings)
    assert new.tokens == theirs_alone(theirs, texts(), **settings)
    for row, text in enumerate(new.text):
        for start, end in ((0, 1), (5, 6), (4, 9)):
            settings["stop_strings"] = [text[start:end], "q!q"]
            result = ours.generate(texts(), eos_token_id=(), **settings)
            assert result.tokens == theirs_alone(theirs, texts(), tokenizer=words, **settings)
            assert result.reasons[row] == "stop"
            assert result.text[row] == text[: text.index(text[start:end])]


def test_a_chat_is_read_as_the_template_writes_it() -> None:
    theirs, ours, words = readers()
    chat = [{"role": "user", "content": "the thing"}]
    ids: Tensor = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    result = ours.generate(chat, NEW, eos_token_id=())
    assert result.prompts == ids.tolist()
    assert result.tokens == theirs_alone(theirs, ids.tolist())
