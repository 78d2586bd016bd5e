"""What settings may be together.

Every error names the values and the way out. Only what the caller passed can be wrong by not applying: a checkpoint's
generation_config.json often holds a temperature beside `do_sample: false`, and such values are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lamina.errors import InputError
from lamina.generation.settings.validate import Values
from lamina.sampling.filters import LEAST_TEMPERATURE

Origins = dict[str, str]
"""Which names were said by the "caller" or by the "file"; all others have their defaults."""

SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip
BEAMS = ("early_stopping", "length_penalty")
MOST_CANDIDATES = 1024  # of contrastive search, each a row of a cache
DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
DRAFTING = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


def same(a: Any, b: Any) -> bool:
    """Equal and of one kind: 1 is not True."""
    return a is b or (type(a) is type(b) and bool(a == b))


def strategies(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each way of searching that these values ask for, with the setting that asks for it."""
    found = [("beams", "num_beams")] if values["num_beams"] > 1 else []
    found += [("assisted", name) for name in DRAFTS if values[name] is not None]
    found += [("contrastive", "penalty_alpha")] if values["penalty_alpha"] else []
    found += [("dola", "dola_layers")] if values["dola_layers"] is not None else []
    return found


def settle(values: Values, origins: Origins, defaults: Values) -> None:
    """Drops what the file says and does not apply, and refuses what the caller says and contradicts itself."""
    rules = _Rules(values, origins, defaults)
    rules.one_of("max_new_tokens", "max_length")
    rules.one_of("min_new_tokens", "min_length")
    rules.lengths()
    rules.one_strategy()
    rules.plain()
    rules.sampling()
    rules.only_with("num_beams", values["num_beams"] > 1, BEAMS, "add num_beams=4 or more")
    drafts = any(values[name] is not None for name in DRAFTS)
    rules.only_with(
        "a draft", drafts, DRAFTING, "add assistant_model, prompt_lookup_num_tokens or assistant_early_exit"
    )
    lookbehinds = ("target_lookbehind", "assistant_lookbehind")
    assisted = values["assistant_model"] is not None
    rules.only_with("an assistant", assisted, lookbehinds, "add assistant_model, a model with another tokenizer")
    lookup = values["prompt_lookup_num_tokens"] is not None
    rules.only_with("prompt lookup", lookup, ("max_matching_ngram_size",), "add prompt_lookup_num_tokens=10")
    guided = values["guidance_scale"] not in (None, 1.0)
    rules.only_with("guidance", guided, ("negative_prompt",), "add guidance_scale=1.5 or another number but 1")
    rules.returned()
    rules.forced()


class _Rules:
    def __init__(self, values: Values, origins: Origins, defaults: Values) -> None:
        self.values, self.origins, self.defaults = values, origins, defaults
        self.zero = ""  # the temperature that made sampling greedy, as it was given

    def drop(self, name: str) -> None:
        self.values[name] = self.defaults[name]
        self.origins.pop(name, None)

    def said(self, name: str) -> bool:
        """Whether the caller gave it a value that does something."""
        return self.origins.get(name) == "caller" and not same(self.values[name], self.defaults[name])

    def show(self, *names: str) -> str:
        """The values as they were given, and whose they are."""
        file = {name: " (from generation_config.json)" for name in names if self.origins.get(name) == "file"}
        return " and ".join(f"{name}={_short(self.values[name])}{file.get(name, '')}" for name in names)

    def not_both(self, one: str, other: str, why: str) -> None:
        """Two that are both given and cannot be: what the caller says beats the file."""
        if self.said(one) == self.said(other):
            raise InputError(f"{self.show(one, other)}: {why}; leave one out")
        self.drop(other if self.said(one) else one)

    def one_of(self, new: str, whole: str) -> None:
        if any(same(self.values[name], self.defaults[name]) for name in (new, whole)):
            return
        if self.said(new) and self.said(whole):
            raise InputError(f"{self.show(new, whole)} say the same in two ways: give one of them")
        self.drop(new if self.said(whole) else whole)

    def lengths(self) -> None:
        for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
            low, high = self.values[least], self.values[most]
            if low is None or high is None or low <= high:
                continue
            if self.origins.get(least) == "file" and self.said(most):
                self.drop(least)
            elif self.origins.get(most) == "file" and self.said(least):
                self.drop(most)
            else:
                raise InputError(f"{self.show(least, most)}: the least must not be more than the most")

    def one_strategy(self) -> None:
        found = [name for _, name in strategies(self.values)]
        if any(self.said(name) for name in found):
            for name in found:
                if not self.said(name):
                    self.drop(name)
            found = [name for name in found if self.said(name)]
        if len(found) > 1:
            raise InputError(f"{self.show(*found)} are different ways to search: give one of them")

    def plain(self) -> None:
        """What works only where one token is made after the other."""

        def asked() -> list[str]:
            return [name for _, name in strategies(self.values)]

        def guided() -> bool:
            return self.values["guidance_scale"] not in (None, 1.0)

        for name in asked() if guided() else ():
            self.not_both("guidance_scale", name, "guidance leads one token after the other")

    def sampling(self) -> None:
        values = self.values
        if values["do_sample"] and values["penalty_alpha"]:
            self.not_both("penalty_alpha", "do_sample", "contrastive search draws nothing")
        if values["penalty_alpha"] and values["top_k"] > MOST_CANDIDATES:
            raise InputError(f"{self.show('top_k')}: contrastive search tries at most {MOST_CANDIDATES} candidates")
        if values["do_sample"] and values["temperature"] < LEAST_TEMPERATURE:
            self.zero = self.show("temperature")
            for name in ("do_sample", *SAMPLING):
                self.drop(name)
        if values["do_sample"]:
            return
        for name in SAMPLING:
            if name == "top_k" and values["penalty_alpha"]:
                continue
            least = {"temperature": LEAST_TEMPERATURE, "top_k": 1}.get(name)  # below it, nothing is drawn or cut
            off = least is not None and values[name] < least
            if self.said(name) and not off:
                raise InputError(f"{self.show(name, 'do_sample')}: it changes only what is drawn; add do_sample=True")
            self.drop(name)

    def only_with(self, what: str, there: bool, names: Iterable[str], advice: str) -> None:
        """These do something only with something else."""
        for name in () if there else names:
            if self.said(name):
                raise InputError(f"{self.show(name)} does nothing without {what}: {advice}, or leave it out")
            self.drop(name)

    def returned(self) -> None:
        wanted, beams = self.values["num_return_sequences"], self.values["num_beams"]
        name = "num_return_sequences"
        if wanted > 1 and beams == 1 and not self.values["do_sample"]:
            if self.said(name):
                why = self.zero or self.show("do_sample")
                advice = "use a temperature above 0" if self.zero else "add do_sample=True"
                raise InputError(
                    f"{self.show(name)} and {why} and {self.show('num_beams')}: one prompt has one best continuation; "
                    f"{advice}, or num_beams={wanted} or more"
                )
            self.drop(name)
        elif 1 < beams < wanted:
            if self.origins.get(name) == "file" and self.said("num_beams"):
                self.drop(name)
            else:
                raise InputError(f"{self.show(name, 'num_beams')}: each beam gives one; use num_beams={wanted} or more")

    def forced(self) -> None:
        suppressed = set(self.values["suppress_tokens"] or ())
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = self.values[name]
            ids = {forced} if isinstance(forced, int) else set(forced or ())
            if ids and ids <= suppressed:
                raise InputError(f"{self.show(name, 'suppress_tokens')}: a token cannot be forced and suppressed")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else type(value).__name__
