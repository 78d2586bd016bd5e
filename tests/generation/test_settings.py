"""Settings: defaults < the checkpoint's file < the caller, and what is refused, in which words."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

import lamina
from lamina.config import Config
from lamina.errors import InputError
from lamina.generation.settings.settings import Settings, settings_of
from lamina.generation.settings.validate import defaults, read
from lamina.model import Model
from lamina.notices import notice
from lamina.sampling.kinds import Flag, Number, Whole
from lamina.sampling.setting import by_name, registered
from tests.families.cases.llama import make


def model_of(file: dict[str, Any] | None = None) -> Model:
    """As much of a model as settings look at."""

    model = Model()
    model.vocab, model.config, model.generation_defaults = 100, Config({"eos_token_id": 2}), file or {}
    return model


def given(file: dict[str, Any] | None = None, **values: Any) -> Settings:
    return settings_of(model_of(file), values)


def test_defaults_are_those_that_transformers_uses() -> None:
    theirs = GenerationConfig._get_default_generation_params()
    ours = defaults()
    known = {name: value for name, value in theirs.items() if name in ours and name != "max_length"}
    assert len(known) > 20
    for name, value in known.items():
        assert ours[name] == value, name
    assert given().most_new(7) == theirs["max_length"]


def test_every_parameter_of_transformers_is_a_setting_or_is_answered() -> None:
    unanswered = []
    for name in GenerationConfig().to_dict():
        if name in ("transformers_version", "_from_model_config", "is_assistant"):
            continue
        try:
            given(**{name: None})
        except InputError as error:
            if "there is no parameter" in str(error):
                unanswered.append(name)
    assert unanswered == []


def test_the_caller_beats_the_file_and_the_file_beats_the_defaults() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [7, 8], "transformers_version": "5"}
    assert given(file) == given(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[7, 8])
    assert given(file, temperature=0.8).temperature == 0.8
    assert given(file, temperature=0.8).top_p == 0.9
    assert given(file, eos_token_id=3).eos_token_id == (3,)
    assert given().eos_token_id == (2,)


def test_none_turns_a_setting_off_whatever_the_file_says() -> None:
    file = {"do_sample": True, "top_k": 20, "top_p": 0.5, "min_p": 0.1, "eos_token_id": 5, "pad_token_id": 9}
    found = given(file, top_k=None, top_p=None, min_p=None, eos_token_id=None, pad_token_id=None)
    assert (found.top_k, found.top_p, found.min_p, found.eos_token_id, found.pad_token_id) == (0, 1.0, None, (), 9)
    assert given(file, eos_token_id=[]).eos_token_id == ()


def test_values_of_the_file_that_do_not_apply_are_not_used() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_k": 20, "num_beams": 4, "length_penalty": 2.0,
            "num_return_sequences": 3, "num_assistant_tokens": 5}  # fmt: skip
    assert given(file, do_sample=False, num_beams=1).describe() == "eos_token_id=(2,), pad_token_id=2"
    assert given(file, prompt_lookup_num_tokens=4).num_beams == 1
    assert given(file, num_beams=2).num_return_sequences == 1
    assert given(file, penalty_alpha=0.6, top_k=4).describe() == (
        "penalty_alpha=0.6, top_k=4, eos_token_id=(2,), pad_token_id=2"
    )
    assert given({"penalty_alpha": 0.6}, do_sample=True).strategy == "plain"
    assert given({"num_beams": 4}, use_cache=False).num_beams == 4
    assert given({"use_cache": False}, num_beams=4).use_cache  # whatever the file says
    assert given({"num_beams": 4}, guidance_scale=2).num_beams == 1
    assert given({"max_length": 4096}, max_new_tokens=5).most_new(100) == 5
    assert given({"max_new_tokens": 50}, max_length=110).most_new(100) == 10
    assert given({"max_new_tokens": 50, "max_length": 60}).most_new(100) == 50
    assert given({"min_new_tokens": 9}, max_new_tokens=5).least_new(3) == 0
    assert given({"max_length": 20}, min_length=30, max_new_tokens=None).most_new(3) == 20


def test_ids_come_from_the_configuration_and_the_tokenizer_where_nobody_says() -> None:
    tokenizer = SimpleNamespace(
        eos_ids=(4,), bos_id=5, special_tokens={"pad_token": "<pad>"}, backend=SimpleNamespace(token_to_id=lambda t: 6)
    )
    model = model_of()
    assert (settings_of(model, {}).bos_token_id, settings_of(model, {}).pad_token_id) == (None, 2)
    model.tokenizer = tokenizer  # type: ignore[assignment]
    found = settings_of(model, {})
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (5, (4,), 6)
    model.config = Config({"bos_token_id": 0, "pad_token_id": 0})
    found = settings_of(model, {})
    assert (found.bos_token_id, found.pad_token_id) == (0, 0)
    model.start_ids = (1,)
    assert settings_of(model, {}).decoder_start_token_id == 1
    assert settings_of(model, {"decoder_start_token_id": [3, 4]}).decoder_start_token_id == (3, 4)


def test_values_are_brought_to_one_form() -> None:
    def stop(row: int, tokens: list[int], text: str) -> bool:
        return False

    found = given(
        stop=stop, logits_processor=[stop], eos_token_id=torch.tensor([3, 4, 3]), suppress_tokens=np.array([5]),
        bad_words_ids=[[5, 5], [6]], sequence_bias=[[[1, 2], 3]], max_new_tokens=np.int64(7), max_time=3,
        exponential_decay_length_penalty=[5, 1.1], prefill_chunk_size=16.0,
    )  # fmt: skip
    assert found == Settings(
        stop=(stop,), logits_processor=(stop,), eos_token_id=(3, 4), suppress_tokens=(5,), pad_token_id=3,
        bad_words_ids=((5, 5), (6,)), sequence_bias={(1, 2): 3.0}, max_new_tokens=7, max_time=3.0,
        exponential_decay_length_penalty=(5, 1.1), prefill_chunk=16,
    )  # fmt: skip
    assert isinstance(found.max_time, float) and isinstance(found.prefill_chunk, int)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"top_pp": 0.9}, "there is no parameter 'top_pp'; the nearest known one is 'top_p'"),
        ({"num_beam": 3}, "the nearest known one is 'num_beams'"),
        ({"attention_maks": 3}, "the nearest known one is 'attention_mask'"),
        ({"num_beam_groups": 2}, "num_beam_groups=2 is not supported: groups of beams"),
        ({"past_key_values": 2}, "past_key_values is not a parameter here: pass cache="),
        ({"prefill_chunk": 2, "prefill_chunk_size": 3}, "are the same setting"),
        ({"do_sample": True, "temperature": -1}, "temperature=-1: it must be a number, at least 0"),
        ({"do_sample": True, "temperature": 1e40}, r"temperature=1e\+40: .* at most 1e\+09"),
        ({"top_k": 5, "do_sample": False}, "top_k=5 and do_sample=False: top_k applies to sampling only; leave"),
        ({"temperature": 0, "top_p": 0.9, "do_sample": False}, "top_p=0.9 and do_sample=False: top_p applies to"),
        ({"temperature": 0.5, "do_sample": None}, "temperature=0.5 and do_sample=False: temperature applies to"),
        ({"temperature": 0.5, "penalty_alpha": 0.6}, "temperature=0.5 and penalty_alpha=0.6: contrastive search does"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5: it must be a number, at least 0 and at most 1"),
        ({"do_sample": 1}, "do_sample=1: it must be True or False"),
        ({"do_sample": True, "top_k": 2.5}, "top_k=2.5: it must be a whole number, at least 0"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: it must be a number, at least 1e-09 and at most 1e"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: it must be a whole number, at least 1"),
        ({"max_new_tokens": 5, "max_length": 9}, "max_new_tokens=5 and max_length=9 say the same in two ways"),
        ({"min_new_tokens": 5, "min_length": 9}, "min_new_tokens=5 and min_length=9 say the same in two ways"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens=5 and max_new_tokens=4: the minimum"),
        ({"min_length": 5, "max_length": 4}, "min_length=5 and max_length=4: the minimum must not exceed the maximum"),
        ({"num_return_sequences": 3}, "num_return_sequences=3 and do_sample=False .* num_beams=3 or more"),
        ({"num_return_sequences": 3, "do_sample": True, "temperature": 0},
         "num_return_sequences=3 and temperature=0.0 and num_beams=1: .* use a temperature above 0, or num_beams=3"),
        ({"num_return_sequences": 3, "num_beams": 2}, "num_return_sequences=3 and num_beams=2: .* use num_beams=3"),
        ({"num_beams": 2, "prompt_lookup_num_tokens": 3}, "num_beams=2 and prompt_lookup_num_tokens=3 are different"),
        ({"num_beams": 2, "penalty_alpha": 0.5}, "num_beams=2 and penalty_alpha=0.5 are different ways to search"),
        ({"dola_layers": "low", "assistant_early_exit": 1}, "dola_layers='low' and assistant_early_exit=1 are"),
        ({"dola_layers": "middle"}, "dola_layers='middle': it must be \"low\", \"high\" or a list of layer numbers"),
        ({"penalty_alpha": 0.5, "do_sample": True}, "penalty_alpha=0.5 and do_sample=True: contrastive search does"),
        ({"guidance_scale": 2, "num_beams": 2}, "guidance_scale=2.0 and num_beams=2: guidance works token by token"),
        ({"length_penalty": 2.0}, "length_penalty=2.0 does nothing without num_beams: add num_beams=4"),
        ({"early_stopping": "always", "num_beams": 2}, "early_stopping='always': it must be one of False, True"),
        ({"num_assistant_tokens": 3}, "num_assistant_tokens=3 does nothing without a draft: add assistant_model"),
        ({"max_matching_ngram_size": 3}, "does nothing without prompt lookup: add prompt_lookup_num_tokens=10"),
        ({"negative_prompt": "no"}, "negative_prompt='no' does nothing without guidance: add guidance_scale"),
        ({"forced_bos_token_id": 3, "suppress_tokens": [3]}, "a token cannot be forced and suppressed"),
        ({"eos_token_id": 100}, "eos_token_id: id 100 is not in the vocabulary, ids go from 0 to 99"),
        ({"suppress_tokens": "a"}, "suppress_tokens='a': it must be an id or a list of ids"),
        ({"bad_words_ids": [1, 2]}, r"bad_words_ids=\[1, 2\]: it must be a list of id lists"),
        ({"stop_strings": ["a", ""]}, "it must be a text or a list of texts, none of them empty"),
        ({"stop_strings": "a"}, "stop_strings works on text, and this checkpoint has no tokenizer"),
        ({"stop": "a"}, "it must be a function or a list of functions"),
        ({"penalty_alpha": 0.5, "top_k": 2000}, "top_k=2000: contrastive search tries at most 1024 candidates"),
        ({"assistant_model": 5}, "assistant_model=5: it must be a model, as lamina.load gives one, not a int"),
        ({"prefix_allowed_tokens_fn": 5}, r"prefix_allowed_tokens_fn=5: it must be a function \(row, tokens\)"),
        ({"decoder_start_token_id": 3}, "decoder_start_token_id=3 is for models that read a source"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused_with_both_values_and_the_way_out(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        settings_of(model_of(), values, also=("attention_mask", "cache"))


def test_what_the_caller_says_is_refused_where_the_file_stands_against_it_and_the_file_is_named() -> None:
    with pytest.raises(InputError, match=r"num_beams=2 \(from generation_config.json\): each beam gives one"):
        given({"num_beams": 2}, num_return_sequences=3)
    with pytest.raises(InputError, match=r"the checkpoint's generation_config.json says top_p=2: it must be a number"):
        given({"top_p": 2})


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"eta_cutoff": 0.1, "num_beams": 2}],
    ids=str,
)
def test_settings_of_sampling_without_do_sample_sample_and_say_so(
    values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    notice.cache_clear()
    assert given(**values) == given(**values, do_sample=True)
    assert given({"do_sample": False}, **values) == given(**values, do_sample=True)
    names = " and ".join(name for name in values if name != "num_beams")
    first, second = (one.getMessage() for one in caplog.records)
    assert first.startswith(f"lamina: tokens are sampled because of {names}: pass do_sample=True")
    assert f"{names}, against the do_sample=False of generation_config.json" in second


def test_sampling_is_not_turned_on_by_what_does_not_ask_for_it(caplog: pytest.LogCaptureFixture) -> None:
    notice.cache_clear()
    assert not given({"temperature": 0.7, "top_p": 0.9}).do_sample
    assert not given(temperature=1.0, top_k=0, top_p=None).do_sample
    assert not given(penalty_alpha=0.6, top_k=4).do_sample
    assert not given({"penalty_alpha": 0.6}, top_k=4).do_sample
    assert given(temperature=0, top_p=0.9) == given()
    assert given(do_sample=True, temperature=0.7).do_sample and given({"do_sample": True}, top_p=0.5).do_sample
    assert caplog.records == []
    assert given({"penalty_alpha": 0.6}, temperature=0.7) == given(do_sample=True, temperature=0.7)


def test_values_that_change_nothing_are_no_contradiction() -> None:
    assert given(temperature=1.0, top_p=1.0, top_k=50, length_penalty=1.0, num_return_sequences=1) == given()
    assert given(temperature=0, top_k=0, do_sample=False) == given()


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-40, 1e-300, 9e-7])
def test_a_temperature_of_nothing_takes_the_best_token(temperature: float) -> None:
    assert given(do_sample=True, temperature=temperature) == given()
    assert given(do_sample=True, temperature=temperature, top_p=0.9, min_p=0.1) == given()
    assert given({"do_sample": True, "top_k": 20}, temperature=temperature) == given()
    assert given({"do_sample": True, "temperature": temperature}) == given()
    assert given(do_sample=True, temperature=temperature, num_beams=3) == given(num_beams=3)
    assert given(do_sample=True, temperature=1e-6).do_sample


NUMBERS = {one.name: one.kind for one in registered() if isinstance(one.kind, Whole | Number)}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_of_their_kind_and_within_their_bounds(name: str) -> None:
    setting, kind = by_name()[name], NUMBERS[name]
    whole = isinstance(kind, Whole)
    low, high = (kind.least, kind.most) if isinstance(kind, Whole) else (kind.low, kind.high)
    wrong = [high + 1, high * 1e6, 10**400, -(10**400), math.nan, math.inf, -math.inf, "3", b"3", [3], {}, 3j, object()]
    wrong += [True, np.True_, low - 1, *([1.5, Fraction(3, 2)] if whole else [])]
    for value in wrong:
        with pytest.raises(InputError, match=rf"{name}=.*: it must be a (whole )?number"):
            read(setting, value)
    inside = (high + max(low, 0)) // 2 + 1 if whole else (low + high) / 2
    right: list[Any] = [inside, Fraction(inside) if isinstance(inside, int) else np.float64(inside)]
    right += [np.uint64(inside), np.int64(min(inside, 2**62))] if whole and inside < 2**31 else []
    for value in right:
        found = read(setting, value)
        assert found == value and type(found) is (int if whole else float)
    assert read(setting, None) is None


@pytest.mark.parametrize("name", [one.name for one in registered() if isinstance(one.kind, Flag)])
def test_flags_are_true_or_false(name: str) -> None:
    setting = by_name()[name]
    assert read(setting, np.True_) is True and read(setting, False) is False
    for value in (1, 0, "True", [], 1.0, torch.tensor(True)):
        with pytest.raises(InputError, match=f"{name}=.*: it must be True or False"):
            read(setting, value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("eos_token_id", [True, [True], -1, [1, -1], 1.5, [1.5], "a", ["a"], 2**31, [[1]]]),
        ("decoder_start_token_id", [True, -1, "a", 1.5, [None]]),
        ("bad_words_ids", [5, [[]], [[1], []], ["ab"], [[1.5]], "ab", [[-1]]]),
        ("sequence_bias", [5, [1], [[1]], [[[1], 2, 3]], {(1,): "x"}, {(1,): math.inf}, {(1,): -math.inf},
                           {(1,): math.nan}, {(1,): 1e31}, {"ab": 1.0}, {(1.5,): 1.0}, "ab"]),
        ("dola_layers", ["middle", 1.5, [1.5], np.array(["low"]), [-1]]),
        ("early_stopping", [0, 1, "always", []]),
        ("num_assistant_tokens_schedule", ["slow", 3, np.array([1, 2])]),
        ("exponential_decay_length_penalty", [5, [1], [1, 2, 3], [1.5, 2], [1, math.nan], [1, math.inf], ["a", 1]]),
        ("stop_strings", [5, [5], "", [""], [None]]),
        ("stop", [5, [5], "stop"]),
        ("logits_processor", [5, [5]]),
    ],
)  # fmt: skip
def test_lists_hold_what_they_should(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InputError, match=f"{name}=.*: it must be "):
            read(by_name()[name], value)


def test_errors_stay_short_whatever_was_given() -> None:
    with pytest.raises(InputError) as caught:
        given(stop_strings=[5] * 10_000)
    assert len(str(caught.value)) < 250
    with pytest.raises(InputError, match="seed=a number of 16610 bits: it must be a whole number, at most 1844"):
        given(seed=10**5000)


def test_values_of_the_file_that_would_take_all_memory_are_refused_unless_the_caller_has_others() -> None:
    with pytest.raises(InputError, match=r"generation_config.json says num_beams=1000000000: .* at most 1024"):
        given({"num_beams": 10**9})
    assert given({"num_beams": 10**9}, num_beams=2).num_beams == 2


def test_keys_of_the_file_that_would_change_results_raise_and_others_are_ignored() -> None:
    with pytest.raises(InputError, match=r"generation_config.json says num_beam_groups=3.*model.generation_defaults"):
        given({"num_beam_groups": 3})
    file = {"num_beam_groups": 1, "diversity_penalty": 0.0, "cache_implementation": "hybrid", "chat_format": "chatml",
            "return_dict_in_generate": True, "constraints": None, "force_words_ids": []}  # fmt: skip
    assert given(file) == given()


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        ({}, "plain"), ({"do_sample": True}, "plain"), ({"num_beams": 2}, "beams"),
        ({"num_beams": 2, "do_sample": True}, "beams"), ({"assistant_early_exit": 2}, "assisted"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"), ({"dola_layers": [1, 2], "do_sample": True}, "dola"),
    ],
)  # fmt: skip
def test_settings_name_their_strategy(values: dict[str, Any], strategy: str) -> None:
    assert given(**values).strategy == strategy


def test_lengths_are_counted_from_each_rows_prompt() -> None:
    found = given(max_length=10, min_length=8)
    assert [(found.least_new(n), found.most_new(n)) for n in (1, 7, 9)] == [(7, 9), (1, 3), (0, 1)]
    with pytest.raises(InputError, match="max_length=10 leaves no room after a prompt of 10 tokens"):
        found.most_new(10)
    with pytest.raises(InputError, match=r"a prompt of 3 tokens must get 27 new ones .* and may get 5"):
        given(min_length=30, max_new_tokens=5).least_new(3)


def test_settings_are_frozen_and_show_what_differs_from_the_defaults() -> None:
    found = given(do_sample=True, top_p=0.9, assistant_model=model_of())
    assert (
        repr(found) == "Settings(do_sample=True, assistant_model=Model, top_p=0.9, eos_token_id=(2,), pad_token_id=2)"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.top_p = 0.5  # type: ignore[misc]
    assert eval(repr(given(num_beams=3, max_time=2.5))) == given(num_beams=3, max_time=2.5)


def test_every_setting_has_a_sentence_that_says_what_it_is() -> None:
    for setting in registered():
        assert re.fullmatch(r"\S.{10,}[.]", setting.meaning), setting.name


def test_a_loaded_checkpoint_keeps_what_its_file_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(make()).save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "top_p": 0.7, "eos_token_id": [3, 4]}))
    model = lamina.load(tmp_path, device="cpu")
    assert model.eos_ids == (3, 4)
    assert settings_of(model, {}).top_p == 0.7
    file.unlink()
    assert settings_of(lamina.load(tmp_path, device="cpu"), {}).do_sample is False
