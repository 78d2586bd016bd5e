"""`Setting`: the one declaration of a parameter of `generate`, and the registry of all of them.

A declaration holds everything that is known of a parameter: its type and bounds (`kind`), default, meaning, conflicts,
and, if it changes scores, the factory of its processor and the stage at which that runs. Processors declare their
settings beside their class (filters.py, penalties.py, bans.py …); settings without a processor are declared in
`lamina.generation.settings.declared`. A new sampling filter is one class and one `Setting`, also outside this package:

    @dataclass(frozen=True)
    class Quantile(Filter):
        share: float
        keep: int = 1

        def cut(self, scores):
            return (scores < scores.quantile(self.share, dim=-1, keepdim=True)) & below_best(scores, self.keep)

    lamina.register_setting(
        Setting(
            "quantile", Number(0, 1), default=0.0, meaning="Drop this share of the vocabulary, the worst tokens.",
            stage=Stage.FILTER, processor=lambda share, context: Quantile(share, context.keep),
        )
    )
    model.generate("The sky is", do_sample=True, quantile=0.3)

It is checked, read from generation_config.json, shown by `Settings.describe()` and applied like the built-in ones.
Type checkers know the built-in names only; for them, pass a `dict[str, Any]`: `generate(prompt, **added)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from lamina.errors import InputError
from lamina.sampling.kinds import ValueKind, Wrong

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer
    from lamina.sampling.history import Processor

GROUPS = ("length", "search", "drafts", "sampling", "scores", "token ids", "execution", "output")
"""The groups in which settings are listed."""


class Stage(IntEnum):
    """When a processor runs, first to last; those of one stage run in the order in which they were registered.

    The order is that of transformers. Settings that transformers does not have stand beside similar ones.
    """

    BIAS = 1
    """Added to the scores of sequences."""
    PENALTY = 2
    """For ids that occurred."""
    BAN = 3
    """Repeated n-grams, and end tokens before the minimum length."""
    ALLOW = 4
    """Only ids that a function or a grammar lists; lifts earlier bans if they leave none of those."""
    BAN_WORDS = 5
    """Sequences that never occur; after ALLOW, which would lift them."""
    FORCE = 6
    """The first or last token."""
    REPAIR = 7
    """NaN and infinite scores become finite."""
    DECAY = 8
    """End tokens become likelier with the length."""
    SUPPRESS = 9
    """Ids that are never chosen, or not first. Then the caller's own `logits_processor` run."""
    FILTER = 10
    """Ids that sampling does not draw; these run only if `do_sample`."""
    FINAL = 11
    """After the filters, sampling or not."""


class _Marker:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


DEFAULT: Final = _Marker("DEFAULT")
NOT_GIVEN: Final = _Marker("NOT_GIVEN")


@dataclass(frozen=True)
class Facts:
    """Properties of the model that processors need."""

    vocab: int
    """Number of ids: the width of the scores."""
    device: torch.device | str = "cpu"
    """Where the scores are."""
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class ProcessorContext:
    """What a processor's factory is given besides its own value."""

    settings: Any
    """All settings, by attribute."""
    facts: Facts

    @property
    def vocab(self) -> int:
        return self.facts.vocab

    @property
    def device(self) -> torch.device | str:
        return self.facts.device

    @property
    def end_ids(self) -> list[int]:
        """Ids that end a row (`eos_token_id`)."""
        return id_list(self.settings.eos_token_id)

    @property
    def beams(self) -> int:
        return self.settings.num_beams or 1

    @property
    def keep(self) -> int:
        """How many of the best ids a filter must keep. With beams: the end tokens and one more, so that a beam can
        go on."""
        return max(len(self.end_ids), 1) + 1 if self.beams > 1 else 1


@dataclass(frozen=True)
class Need:
    """Something without which a setting has no effect."""

    what: str
    """Its name in the error: "… does nothing without {what}"."""
    met: Callable[[Mapping[str, Any]], bool]
    """Whether the values of all settings, by name, have it."""
    advice: str
    """What the error tells the caller to do."""


@dataclass(frozen=True)
class Setting:
    """The declaration of one parameter of `generate`; the top of this file has an example."""

    name: str
    kind: ValueKind
    """Type and bounds, and how a given value is normalised (kinds.py)."""
    default: Any
    meaning: str
    """One line for users."""
    group: str = ""
    """One of `GROUPS`; if empty, "sampling" for filters and "scores" otherwise."""
    off: Any = DEFAULT
    """The value that turns it off: what None stands for, and the value for which no processor is made. DEFAULT: its
    default. NOT_GIVEN: None is ignored, since the setting cannot be off."""
    aliases: tuple[str, ...] = ()
    """Other names for it."""
    instead_of: str | None = None
    """A setting that says the same in another way: callers give one of the two, and the other one wins in a file."""
    needs: Need | None = None
    """Without this, a caller's value is an error and a file's value is ignored."""
    needs_tokenizer: bool = False
    strategy: str | None = None
    """The search strategy that it selects unless it is off."""
    stage: Stage | None = None
    """When its processor runs; None if it has none."""
    processor: Callable[[Any, ProcessorContext], Processor | None] | None = None
    """Makes the processor from the value; called only if the setting is not off. None leaves it out."""

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", "sampling" if self.stage is Stage.FILTER else "scores")
        if self.off is DEFAULT:
            object.__setattr__(self, "off", self.default)

    @property
    def only_sampling(self) -> bool:
        """Whether it has no effect unless tokens are sampled."""
        return self.stage is Stage.FILTER

    def is_off(self, value: Any) -> bool:
        """Whether this value has no effect."""
        return value is None or same(value, self.off)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same type: 1 is not True.

    >>> same(1, 1), same(1, True), same(2.0, 3.0)
    (True, False, False)
    """
    return a is b or (type(a) is type(b) and bool(a == b))


def id_list(given: Any) -> list[int]:
    """One id, several or None, as a list."""
    return [] if given is None else [given] if isinstance(given, int) else [int(id) for id in given]


_settings: dict[str, Setting] = {}


def register(setting: Setting) -> None:
    """Adds a setting to those of `generate`. Outside this package, `lamina.register_setting` does it."""
    for name in (setting.name, *setting.aliases):
        if not name.isidentifier() or name.startswith("_"):
            raise InputError(f"a setting cannot be called {name!r}: it must be a Python name that begins with a letter")
        if name in by_name():
            raise InputError(f"there is a setting {name!r} already ({by_name()[name].name}): choose another name")
    if setting.group not in GROUPS:
        raise InputError(f"{setting.name} has group={setting.group!r}: it must be one of {', '.join(GROUPS)}")
    if (setting.stage is None) != (setting.processor is None):
        raise InputError(f"{setting.name} must have a stage and a processor, or neither")
    for what, value in (("default", setting.default), ("off", setting.off)):
        try:
            if value is not None and value is not NOT_GIVEN:
                setting.kind.read(value)
        except Wrong as wrong:
            raise InputError(f"{setting.name} has {what}={value!r}: it must be {wrong}") from None
    _settings[setting.name] = setting
    _clear()


def unregister(name: str) -> None:
    """Removes a setting; unknown names are ignored."""
    _settings.pop(name, None)
    _clear()


def _clear() -> None:
    for known in (registered, by_name, filters, registered_at):
        known.cache_clear()


@cache
def registered() -> tuple[Setting, ...]:
    """All settings, by group; in a group those without a processor first, then by stage."""
    return tuple(sorted(_settings.values(), key=lambda one: (GROUPS.index(one.group), one.stage or 0)))


@cache
def by_name() -> Mapping[str, Setting]:
    """Every setting by its name and by its aliases."""
    return {name: one for one in registered() for name in (one.name, *one.aliases)}


@cache
def filters() -> tuple[Setting, ...]:
    """The settings that have no effect unless tokens are sampled."""
    return tuple(one for one in registered() if one.only_sampling)


@cache
def registered_at(*stages: Stage) -> tuple[Setting, ...]:
    """The settings whose processors run at these stages, in the order in which those run."""
    return tuple(sorted((one for one in _settings.values() if one.stage in stages), key=lambda one: one.stage or 0))
