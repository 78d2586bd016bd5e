"""What each setting may be by itself: known names, bounds, and the one form in which the rest of the package reads it.

Names that users know from elsewhere and that are not settings here are answered with what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from lamina.errors import InputError

Values = dict[str, Any]
ALIASES = {"prefill_chunk_size": "prefill_chunk"}
OFF: Values = {"top_k": 0}
"""What None turns a setting to, where that is not its default."""

LONGEST = 2**31 - 1
"""Tokens of a row: positions have 32 bits in captured steps and in the noise."""
SEED = 2**64 - 1
LARGE = 1e9
"""The size up to which penalties and scales keep scores finite."""
WHOLE: dict[str, tuple[int, int]] = {
    "max_new_tokens": (1, LONGEST), "max_length": (1, LONGEST), "min_length": (0, LONGEST),
    "min_new_tokens": (0, LONGEST), "prefill_chunk": (1, LONGEST), "no_repeat_ngram_size": (0, LONGEST),
    "encoder_no_repeat_ngram_size": (0, LONGEST), "top_k": (0, LONGEST), "logprobs": (0, LONGEST),
    "num_beams": (1, 1024), "num_return_sequences": (1, 100_000), "num_assistant_tokens": (1, 1024),
    "prompt_lookup_num_tokens": (1, 1024), "max_matching_ngram_size": (1, 16), "assistant_early_exit": (1, LONGEST),
    "seed": (0, SEED), "pad_token_id": (-1, LONGEST), "bos_token_id": (0, LONGEST),
    "forced_bos_token_id": (0, LONGEST), "target_lookbehind": (0, 1024), "assistant_lookbehind": (0, 1024),
}  # fmt: skip
"""Whole numbers, the least and the most that each may be: what is made of them in memory stays within reason."""

REAL: dict[str, tuple[float, float]] = {
    "max_time": (0, LARGE), "temperature": (0, LARGE), "penalty_alpha": (0, 1), "top_p": (0, 1),
    "min_p": (0, 1), "top_h": (0, 1), "typical_p": (0, 1), "epsilon_cutoff": (0, 1), "eta_cutoff": (0, 1),
    "assistant_confidence_threshold": (0, 1), "repetition_penalty": (1 / LARGE, LARGE),
    "encoder_repetition_penalty": (1 / LARGE, LARGE), "length_penalty": (-50, 50),
    "presence_penalty": (-LARGE, LARGE), "frequency_penalty": (-LARGE, LARGE), "guidance_scale": (-LARGE, LARGE),
}  # fmt: skip
"""Real numbers, all of them finite, and the bounds of each."""
BIASES = (-1e30, 1e30)  # of sequence_bias: -1e9 and the like is what people write for "never"

ABOVE_ZERO = ("max_time", "top_h", "typical_p")

CHOICES: dict[str, tuple[Any, ...]] = {
    "early_stopping": (False, True, "never"),
    "num_assistant_tokens_schedule": ("constant", "heuristic", "heuristic_transient"),
}
ID_LISTS = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id")
ID_NAMES = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id", *ID_LISTS)
SEVERAL = ("stop_strings", "stop", "logits_processor")

ELSEWHERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beam_groups": ((1,), "groups of beams are not supported: use num_beams"),
    "diversity_penalty": ((0.0,), "groups of beams are not supported: use num_beams"),
    "constraints": ((), "use grammar, or prefix_allowed_tokens_fn"),
    "force_words_ids": ((), "use grammar, or prefix_allowed_tokens_fn"),
    "forced_decoder_ids": ((), "give those ids as decoder_input_ids"),
    "assistant_ensemble_weight": ((), "drafts are checked exactly here: leave it out"),
}
"""Names known from elsewhere that change results: the values that change nothing, and what to do instead."""

NEEDLESS: dict[str, str] = {
    "return_dict_in_generate": "a Result is always returned",
    "cache_implementation": "make the cache with model.new_cache(rows, capacity, slack, codec=…, residence=…) and pass "
    "cache=",
    "cache_config": "make the cache with model.new_cache(rows, capacity, slack, codec=…, residence=…) and pass cache=",
    "max_cache_len": "make the cache with model.new_cache(rows, capacity=…) and pass cache=",
    "past_key_values": "pass cache=",
    "input_ids": "give the ids first: generate(ids)",
    "inputs": "give the ids first: generate(ids)",
    "stopping_criteria": "pass stop=, which is called as stop(row, tokens, text)",
    "negative_prompt_ids": "pass negative_prompt=, in any form of prompt",
    "synced_gpus": "a model lives on one device",
    "tokenizer": "the checkpoint's own is used: set model.tokenizer for another",
    "assistant_tokenizer": "the assistant's own is used: set assistant_model.tokenizer for another",
    "compile_config": "call model.compile(…) before",
    "disable_compile": "nothing is compiled unless model.compile() is called",
    "low_memory": "beams share what they have in common",
    "use_mtp": "use assistant_model, prompt_lookup_num_tokens or assistant_early_exit",
    "speculation_type": "use assistant_model, prompt_lookup_num_tokens or assistant_early_exit",
    "continuous_batching_config": "give all prompts in one call",
    "generation_config": "pass its values by name: generate(prompt, do_sample=True, …)",
}
"""Names known from elsewhere that are not needed here, and why."""


def from_file(stored: Mapping[str, Any], defaults: Values) -> Values:
    """What a generation_config.json says. What is not known is ignored, unless it would change results."""
    for name, (neutral, advice) in ELSEWHERE.items():
        value = stored.get(name)
        if value not in (None, [], *neutral):
            raise InputError(
                f"the checkpoint's generation_config.json says {name}={short(value)}, which is not supported "
                f"({advice}). To go on without it, take it out of model.generation_defaults"
            )
    named = {ALIASES.get(name, name): value for name, value in stored.items()}
    return {name: value for name, value in named.items() if name in defaults and value is not None}


def from_caller(given: Mapping[str, Any], defaults: Values, also: Iterable[str]) -> Values:
    """What the caller says, by our names; None is what a setting is when it is off."""
    found: Values = {}
    for name, value in given.items():
        ours = ALIASES.get(name, name)
        if ours not in defaults:
            raise InputError(_unknown(name, value, [*defaults, *ALIASES, *also]))
        if ours in found:
            raise InputError(
                f"{name}={short(value)} and {ours}={short(found[ours])} are the same setting: give one of them"
            )
        if value is not None:
            found[ours] = value
        elif ours != "pad_token_id":  # which always is something
            found[ours] = OFF.get(ours, defaults[ours])
    return found


def _unknown(name: str, value: Any, known: list[str]) -> str:
    if name in ELSEWHERE:
        return f"{name}={short(value)} is not supported: {ELSEWHERE[name][1]}"
    if name in NEEDLESS:
        return f"{name} is not a parameter here: {NEEDLESS[name]}"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"there is no parameter {name!r}; the nearest known one is {nearest!r}"


def tidy(name: str, value: Any, flags: frozenset[str], from_file: bool = False) -> Any:
    """The value in the one form that the rest of the package reads, or an error that says what it must be."""
    try:
        return _tidy(name, value, flags)
    except _Wrong as wrong:
        where = "the checkpoint's generation_config.json says " if from_file else ""
        raise InputError(f"{where}{name}={short(value)}: it must be {wrong}") from None


class _Wrong(Exception):
    """What a value must be."""


def _tidy(name: str, value: Any, flags: frozenset[str]) -> Any:
    if value is None:
        return None
    if name in flags:
        if not isinstance(value, bool | np.bool_):
            raise _Wrong("True or False")
        return bool(value)
    if name in WHOLE:
        return _whole(value, *WHOLE[name])
    if name in REAL:
        return _real(value, *REAL[name], open_below=name in ABOVE_ZERO)
    if name in CHOICES:
        if not any(value is one or (isinstance(value, str) and value == one) for one in CHOICES[name]):
            raise _Wrong("one of " + ", ".join(repr(one) for one in CHOICES[name]))
    elif name in ID_LISTS:
        return tuple(dict.fromkeys(_ids(value)))
    elif name == "decoder_start_token_id":
        found = _ids(value)
        return found[0] if isinstance(value, Integral) else found
    elif name in SEVERAL:
        return _several(name, value)
    elif name == "bad_words_ids":
        what = "a list of id lists, none of them empty"
        words = [_ids(_listed(word, what), what) for word in _listed(value, what)]
        if not all(words):
            raise _Wrong(what)
        return tuple(words)
    elif name == "sequence_bias":
        return _biases(value)
    elif name == "dola_layers":
        if not (isinstance(value, str) and value in ("low", "high")):
            return _ids(value, '"low", "high" or a list of layer numbers')
    elif name == "exponential_decay_length_penalty":
        if len(pair := _listed(value, "a pair (from which new token, growth)")) != 2:
            raise _Wrong("a pair (from which new token, growth)")
        return _whole(pair[0], 0, LONGEST), _real(pair[1], 0, LARGE)
    elif name == "prefix_allowed_tokens_fn" and not callable(value):
        raise _Wrong("a function (row, tokens) -> ids")
    return value


def _whole(value: Any, least: int, most: int) -> int:
    whole = isinstance(value, Real) and not isinstance(value, bool) and (isinstance(value, Integral) or value % 1 == 0)
    if not whole or value < least:
        raise _Wrong(f"a whole number, at least {least}")
    if value > most:
        raise _Wrong(f"a whole number, at most {most}")
    return int(value)


def _real(value: Any, low: float, high: float, open_below: bool = False) -> float:
    right = isinstance(value, Real) and not isinstance(value, bool)
    if not right or not low <= value <= high or (open_below and value == low):
        raise _Wrong(f"a number{' above' if open_below else ', at least'} {low:g} and at most {high:g}")
    return float(value)


def _biases(value: Any) -> dict[tuple[int, ...], float]:
    what = "a mapping of id tuples to numbers"
    pairs = list(value.items()) if isinstance(value, Mapping) else [_listed(one, what) for one in _listed(value, what)]
    if any(len(pair) != 2 for pair in pairs):
        raise _Wrong(what)
    return {_ids(ids, what): _real(bias, *BIASES) for ids, bias in pairs}


def _ids(value: Any, what: str = "an id or a list of ids") -> tuple[int, ...]:
    found = [value] if isinstance(value, Integral) else _listed(value, what)
    if any(isinstance(one, bool) or not isinstance(one, Integral) or not 0 <= int(one) <= LONGEST for one in found):
        raise _Wrong(what)
    return tuple(int(one) for one in found)


def _listed(value: Any, what: str) -> list[Any]:
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
        value = value if isinstance(value, list) else [value]
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _Wrong(what)
    return list(value)


def short(value: Any) -> str:
    """A value in a few letters, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= 120 else f"{text[:117]}…"


def _several(name: str, value: Any) -> tuple[Any, ...]:
    if name == "stop_strings":
        found = (value,) if isinstance(value, str) else tuple(_listed(value, "a text or a list of texts"))
        if not all(isinstance(one, str) and one for one in found):
            raise _Wrong("a text or a list of texts, none of them empty")
        return found
    found = (value,) if callable(value) else tuple(_listed(value, "a function or a list of functions"))
    if not all(callable(one) for one in found):
        raise _Wrong("a function or a list of functions")
    return found


def check_ids(asked: Values, vocab: int) -> None:
    """Ids that the caller gave are in the vocabulary."""
    for name in ID_NAMES:
        found = asked.get(name) or ()
        for one in (found,) if isinstance(found, int) else found:
            if one >= vocab:
                raise InputError(f"{name}: id {one} is not in the vocabulary, ids go from 0 to {vocab - 1}")
