"""Settings that exclude or need each other.

What the caller passes beats generation_config.json: values of the file that do not apply to the caller's request are
dropped without a word, since such files often hold, say, a temperature beside `do_sample: false`. Values of the caller
that contradict each other, or would have no effect, are errors that name both values and the way out.

What a setting needs and which one it replaces is part of its declaration (`Setting.needs`, `Setting.instead_of`); rules
about several settings are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.errors import InputError
from lamina.generation.settings.validate import Values, defaults
from lamina.notices import notice
from lamina.sampling.filters import LEAST_TEMPERATURE
from lamina.sampling.guidance import GUIDANCE
from lamina.sampling.setting import filters, registered, same

Origins = dict[str, str]
"""Who set a value, by name: the "caller" or the "file". Names that are missing have their defaults."""

MOST_CANDIDATES = 1024
"""Most candidates (top_k) of contrastive search: each is a row of a cache."""


def strategies(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(strategy, name of the setting that selects it) for every search strategy that these values select."""
    chosen = [one for one in registered() if one.strategy and values[one.name] not in (None, 0, one.off)]
    return [(one.strategy or "", one.name) for one in chosen]


def settle(values: Values, origins: Origins) -> None:
    """Drops values of the file that do not apply, and refuses values of the caller that contradict each other. Changes
    `values` and `origins`."""
    rules = _Rules(values, origins)
    rules.two_ways()
    rules.lengths()
    rules.one_strategy()
    rules.guidance()
    rules.sampling()
    rules.needs()
    rules.returned_sequences()
    rules.forced_tokens()


class _Rules:
    def __init__(self, values: Values, origins: Origins) -> None:
        self.values, self.origins, self.defaults = values, origins, defaults()
        self.greedy_because = ""  # the temperature that switched sampling off, as the error shows it

    def drop(self, name: str) -> None:
        """Back to the default."""
        self.values[name] = self.defaults[name]
        self.origins.pop(name, None)

    def said(self, name: str) -> bool:
        """Whether the caller gave it another value than the default."""
        return self.origins.get(name) == "caller" and not same(self.values[name], self.defaults[name])

    def show(self, *names: str) -> str:
        """The values for an error: `a=1 and b=2 (from generation_config.json)`."""
        file = {name: " (from generation_config.json)" for name in names if self.origins.get(name) == "file"}
        return " and ".join(f"{name}={_short(self.values[name])}{file.get(name, '')}" for name in names)

    def not_both(self, one: str, other: str, why: str) -> None:
        """Of two values that exclude each other, drops the file's; an error if both are the caller's, or the file's."""
        if self.said(one) == self.said(other):
            raise InputError(f"{self.show(one, other)}: {why}; leave one out")
        self.drop(other if self.said(one) else one)

    def two_ways(self) -> None:
        """Pairs of settings that say the same, such as max_new_tokens and max_length: one of them counts."""
        for setting in registered():
            if (first := setting.instead_of) is None:
                continue
            second = setting.name
            if any(same(self.values[name], self.defaults[name]) for name in (first, second)):
                continue
            if self.said(first) and self.said(second):
                raise InputError(f"{self.show(first, second)} say the same in two ways: give one of them")
            self.drop(first if self.said(second) else second)

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
                raise InputError(f"{self.show(least, most)}: the minimum must not exceed the maximum")

    def one_strategy(self) -> None:
        found = [name for _, name in strategies(self.values)]
        if any(self.said(name) for name in found):
            for name in found:
                if not self.said(name):
                    self.drop(name)
            found = [name for name in found if self.said(name)]
        if len(found) > 1:
            raise InputError(f"{self.show(*found)} are different ways to search: give one of them")

    def guidance(self) -> None:
        """Guidance works with the plain strategy only."""
        for _, name in strategies(self.values) if GUIDANCE.met(self.values) else ():
            self.not_both("guidance_scale", name, "guidance works token by token, without another search strategy")

    def sampling(self) -> None:
        """Settings of filters apply to sampling only. If the caller gives one and does not give do_sample, tokens are
        sampled; a temperature of (nearly) 0 is greedy."""
        values = self.values
        greedy = values["temperature"] < LEAST_TEMPERATURE
        asking = [one.name for one in filters() if self.said(one.name) and not one.is_off(values[one.name])]
        if values["penalty_alpha"] and "top_k" in asking:
            asking.remove("top_k")  # the number of candidates
        if greedy and "temperature" in asking:
            asking.remove("temperature")
        if asking and not values["do_sample"]:
            if self.origins.get("do_sample") == "caller":
                raise InputError(
                    f"{self.show(asking[0], 'do_sample')}: {asking[0]} applies to sampling only; leave one out"
                )
            if values["penalty_alpha"]:
                self.not_both(asking[0], "penalty_alpha", "contrastive search does not sample")
            if not greedy:
                self._sample_for(asking)
        elif values["do_sample"] and values["penalty_alpha"]:
            self.not_both("penalty_alpha", "do_sample", "contrastive search does not sample")
        if values["penalty_alpha"] and values["top_k"] > MOST_CANDIDATES:
            raise InputError(f"{self.show('top_k')}: contrastive search tries at most {MOST_CANDIDATES} candidates")
        if values["do_sample"] and greedy:
            self.greedy_because = self.show("temperature")
            self.drop("do_sample")
        if not values["do_sample"]:
            for one in filters():
                if not (one.name == "top_k" and values["penalty_alpha"]):
                    self.drop(one.name)

    def _sample_for(self, asking: list[str]) -> None:
        """Turns sampling on for settings that need it, and says so once."""
        file = ", against the do_sample=False of generation_config.json" if "do_sample" in self.origins else ""
        notice(
            f"tokens are sampled because of {' and '.join(asking)}{file}: pass do_sample=True beside it to say so, or "
            "leave it out to take the best token",
            unexpected=True,
        )
        self.values["do_sample"], self.origins["do_sample"] = True, "caller"

    def needs(self) -> None:
        """Settings without effect: the caller's are errors, the file's are dropped."""
        for setting in registered():
            if (need := setting.needs) is None or need.met(self.values):
                continue
            if self.said(setting.name):
                raise InputError(
                    f"{self.show(setting.name)} does nothing without {need.what}: {need.advice}, or leave it out"
                )
            self.drop(setting.name)

    def returned_sequences(self) -> None:
        wanted, beams = self.values["num_return_sequences"], self.values["num_beams"]
        name = "num_return_sequences"
        if wanted > 1 and beams == 1 and not self.values["do_sample"]:
            if self.said(name):
                why = self.greedy_because or self.show("do_sample")
                advice = "use a temperature above 0" if self.greedy_because else "add do_sample=True"
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

    def forced_tokens(self) -> None:
        suppressed = set(self.values["suppress_tokens"] or ())
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = self.values[name]
            ids = {forced} if isinstance(forced, int) else set(forced or ())
            if ids and ids <= suppressed:
                raise InputError(f"{self.show(name, 'suppress_tokens')}: a token cannot be forced and suppressed")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else type(value).__name__
