"""Arguments of the wrong kind are refused by name, before anything runs; streams refuse at the call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lamina
from lamina.errors import InputError
from lamina.generation import generate
from lamina.generation.settings.options import CALL
from lamina.model import Model
from tests.families.harness import pair
from tests.generation.text import reader

PROMPTS = [[5, 9, 12], [7]]
WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(cache=5), "cache=5: it must be a cache, as model.new_cache() and result.cache are"),
    (dict(cache=[]), "cache=[]: it must be a cache"),
    (dict(whole="x"), "whole='x': it must be True, False or None"),
    (dict(whole=1), "whole=1: it must be True, False or None"),
    (dict(prefixes=5), "prefixes=5: it must be a lamina.PrefixStore"),
    (dict(row_ids=5), "row_ids=5: it must be a list of whole numbers, one for each sequence"),
    (dict(row_ids=[1, 2, 3]), "row_ids has 3 ids for 2 sequences"),
    (dict(chat_options=5), "chat_options=5: it must be a mapping"),
    (dict(attention_mask="x"), "attention_mask='x': it must be a tensor of 0 and 1"),
    (dict(decoder_attention_mask=5), "decoder_attention_mask=5: it must be a tensor of 0 and 1"),
    (dict(inputs_embeds=5), "inputs_embeds=5: it must be a tensor [B, T, width] or a list of tensors [T, width]"),
    (dict(inputs_embeds="x"), "inputs_embeds='x': it must be a tensor"),
    (dict(assistant_model=5), "assistant_model=5: it must be a model"),
    (dict(top_pp=1), "there is no parameter 'top_pp'"),
    (dict(temperature="hot", do_sample=True), "temperature='hot': it must be a number"),
    (dict(suppress_tokens=range(67)), "suppress_tokens excludes all 67 ids"),
    (dict(grammar={"regex": "a"}), "grammar works on text, and this checkpoint has no tokenizer"),
    (dict(watermarking_config={"bias": float("nan")}), "bias must be a number"),
    (dict(dola_layers=[99]), "dola_layers=(99,): give"),
    (dict(assistant_early_exit=99), "assistant_early_exit=99: the model has 4 layers"),
    (dict(use_cache=False, inputs_embeds=torch.zeros(2, 3, 32)), "the prompts name [3, 1] ids"),
]


@pytest.fixture(scope="module")
def model() -> Model:
    return pair("gemma2", "sliding and full in turn")[1]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[f"{next(iter(given))}" for given, _ in WRONG])
def test_what_is_of_the_wrong_kind_is_refused_by_name_by_streams_too(
    model: Model, given: dict[str, Any], message: str
) -> None:
    for call in (model.generate, model.stream):
        with pytest.raises(InputError, match=re.escape(message)):
            call(PROMPTS, 3, **given)  # type: ignore[operator]


def test_a_listener_must_be_callable(model: Model) -> None:
    with pytest.raises(InputError, match="stream=5: it must be a function that is called with each event"):
        model.generate(PROMPTS, 3, stream=5)  # type: ignore[arg-type]


def test_every_argument_that_has_a_kind_is_checked() -> None:
    from lamina.generation.settings.arguments import KINDS

    assert set(KINDS) | {"decoder_input_ids", "row_ids"} == {*CALL, "stream"}


Refused = Callable[[Model], dict[str, Any]]
CACHES: dict[str, tuple[Refused, str]] = {
    "another model's": (
        lambda model: dict(prompts=PROMPTS, cache=reader().new_cache(2)),
        "this cache was made by another model",
    ),
    "too few rows": (
        lambda model: dict(prompts=[*PROMPTS, [1]], cache=model.new_cache(2)),
        "3 prompts were given, the cache has 2 rows",
    ),
    "none wanted": (
        lambda model: dict(prompts=PROMPTS, cache=model.new_cache(2), use_cache=False),
        "use_cache=False and a cache were given",
    ),
    "whole embeddings": (
        lambda model: dict(inputs_embeds=torch.zeros(1, 3, 32), cache=model.new_cache(1), whole=True),
        "whole=True: embeddings cannot be compared",
    ),
    "a store and a cache": (
        lambda model: dict(
            prompts=PROMPTS, cache=model.new_cache(2), prefixes=lamina.PrefixStore(model, bytes=1 << 20)
        ),
        "prefixes",
    ),
    "no prompt": (lambda model: dict(prompts=5), "prompts must be text"),
    "no such id": (lambda model: dict(prompts=[[1, 99]]), "id 99 at row 0, token 1 is not in the vocabulary"),
}


@pytest.mark.parametrize("case", CACHES)
def test_prompts_and_caches_that_do_not_go_together_are_refused_at_the_call(model: Model, case: str) -> None:
    given, message = CACHES[case]
    for call in (model.generate, model.stream):
        with pytest.raises(InputError, match=message):
            call(**given(model))  # type: ignore[operator]


def test_a_stream_runs_nothing_before_its_first_event_is_asked_for(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    forward = type(model).forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counting)
    cache = model.new_cache(2)
    stream = model.stream(PROMPTS, 3, cache=cache, eos_token_id=())
    assert passes == [] and cache.tokens == [[], []]
    assert [event.token for event in stream if event.row == 0] == stream.result.tokens[0]
    assert passes and stream.result.tokens == generate(model, PROMPTS, 3, eos_token_id=()).tokens
