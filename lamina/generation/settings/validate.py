"""Each setting by itself: known names, and values within their bounds, in the one form that the package reads.

Names of other libraries that are not settings here get an error that says what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from lamina.errors import InputError
from lamina.sampling.kinds import TokenId, TokenIds, Wrong
from lamina.sampling.setting import NOT_GIVEN, Setting, by_name, id_list, registered

Values = dict[str, Any]
"""The values of settings, by name."""

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beam_groups": ((1,), "groups of beams are not supported: use num_beams"),
    "diversity_penalty": ((0.0,), "groups of beams are not supported: use num_beams"),
    "constraints": ((), "use grammar, or prefix_allowed_tokens_fn"),
    "force_words_ids": ((), "use grammar, or prefix_allowed_tokens_fn"),
    "forced_decoder_ids": ((), "give those ids as decoder_input_ids"),
    "assistant_ensemble_weight": ((), "drafts are verified exactly here: leave it out"),
}
"""Parameters of transformers that change results: the values that change nothing, and what to do instead."""

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
    "low_memory": "beams share the memory of their common tokens",
    "use_mtp": "use assistant_model, prompt_lookup_num_tokens or assistant_early_exit",
    "speculation_type": "use assistant_model, prompt_lookup_num_tokens or assistant_early_exit",
    "continuous_batching_config": "give all prompts in one call",
    "generation_config": "pass its values by name: generate(prompt, do_sample=True, …)",
}
"""Parameters of transformers that are not needed here, and why."""


def defaults() -> Values:
    """The default of every setting."""
    return {one.name: one.default for one in registered()}


def from_file(stored: Mapping[str, Any]) -> Values:
    """The settings in a generation_config.json. Unknown names are ignored unless they would change results."""
    for name, (neutral, advice) in UNSUPPORTED.items():
        value = stored.get(name)
        if value not in (None, [], *neutral):
            raise InputError(
                f"the checkpoint's generation_config.json says {name}={short(value)}, which is not supported "
                f"({advice}). To go on without it, take it out of model.generation_defaults"
            )
    known = by_name()
    return {known[name].name: value for name, value in stored.items() if name in known and value is not None}


def from_caller(given: Mapping[str, Any], also: Iterable[str]) -> Values:
    """The settings that the caller passes, with None replaced by the value that turns a setting off.

    also   other parameters that the caller could have meant, for the error about an unknown name
    """
    known = by_name()
    found: Values = {}
    for name, value in given.items():
        if name not in known:
            raise InputError(_unknown(name, value, [*known, *also]))
        setting = known[name]
        if setting.name in found:
            raise InputError(
                f"{name}={short(value)} and {setting.name}={short(found[setting.name])} are the same setting: "
                "give one of them"
            )
        if value is not None:
            found[setting.name] = value
        elif setting.off is not NOT_GIVEN:
            found[setting.name] = setting.off
    return found


def _unknown(name: str, value: Any, known: list[str]) -> str:
    if name in UNSUPPORTED:
        return f"{name}={short(value)} is not supported: {UNSUPPORTED[name][1]}"
    if name in NEEDLESS:
        return f"{name} is not a parameter here: {NEEDLESS[name]}"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"there is no parameter {name!r}; the nearest known one is {nearest!r}"


def read(setting: Setting, value: Any, from_file: bool = False) -> Any:
    """The value in the form that the package reads, or an error that says what it must be; None stays None."""
    try:
        return None if value is None else setting.kind.read(value)
    except Wrong as wrong:
        where = "the checkpoint's generation_config.json says " if from_file else ""
        raise InputError(f"{where}{setting.name}={short(value)}: it must be {wrong}") from None


def check_ids(asked: Values, vocab: int) -> None:
    """Refuses token ids of the caller that are not in the vocabulary."""
    known = by_name()
    for name, value in asked.items():
        if isinstance(known[name].kind, TokenId | TokenIds):
            for id in id_list(value):
                if id >= vocab:
                    raise InputError(f"{name}: id {id} is not in the vocabulary, ids go from 0 to {vocab - 1}")


def short(value: Any) -> str:
    """The repr of a value, cut at 120 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= 120 else f"{text[:117]}…"
