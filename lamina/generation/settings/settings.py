"""`Settings`: every parameter of `generate` in one frozen object, under the names that transformers uses.

The caller's values beat the checkpoint's generation_config.json, which beats the defaults. Each parameter is declared
once, as a `Setting` (`lamina.sampling.setting`). validate.py checks each value by itself, conflicts.py all together.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from lamina.config import config_of
from lamina.errors import InputError
from lamina.generation.settings import conflicts, validate
from lamina.generation.settings.conflicts import Origins
from lamina.generation.settings.declared import SETTINGS as SETTINGS  # registers them
from lamina.generation.settings.options import CALL
from lamina.generation.settings.typed import SettingFields
from lamina.generation.settings.validate import Values
from lamina.sampling.forcing import NEW_TOKENS
from lamina.sampling.setting import Setting, by_name, register, registered, same, unregister

if TYPE_CHECKING:
    from lamina.model import Model

Strategy = Literal["plain", "beams", "assisted", "contrastive", "dola"]


@dataclass(frozen=True, repr=False)
class Settings(SettingFields):
    """The settings of one call, as `settings_of` makes them from what the caller passes.

    A field that does not apply has its default. The defaults are those of transformers, so sampling draws from the 50
    best tokens; `top_k=0` draws from all.

    >>> Settings(do_sample=True, top_p=0.9)
    Settings(do_sample=True, top_p=0.9)
    """

    added: Mapping[str, Any] = field(default_factory=dict)
    """Values of settings that `register_setting` added, by name; those with their defaults are left out."""

    if not TYPE_CHECKING:  # type checkers know the fields only

        def __getattr__(self, name: str) -> Any:
            """The value of an added setting."""
            values = {one.name: one.default for one in registered()} | vars(self).get("added", {})
            if name in values and not name.startswith("_"):
                return values[name]
            raise AttributeError(f"Settings has no attribute {name!r}")

    def describe(self) -> str:
        """The values that differ from the defaults, as a caller would pass them.

        >>> Settings(num_beams=4, eos_token_id=(2,)).describe()
        'num_beams=4, eos_token_id=(2,)'
        """
        values = [(one, getattr(self, one.name)) for one in registered()]
        return ", ".join(f"{one.name}={_shown(value)}" for one, value in values if not same(value, one.default))

    def __repr__(self) -> str:
        return f"Settings({self.describe()})"

    @property
    def strategy(self) -> Strategy:
        """The search strategy. All but contrastive search work with and without sampling."""
        found = [name for name, _ in conflicts.strategies(vars(self))]
        return found[0] if found else "plain"  # type: ignore[return-value]

    def most_new(self, prompt: int) -> int:
        """Maximum number of new tokens of a row whose prompt has `prompt` tokens.

        >>> Settings(max_length=10).most_new(7), Settings().most_new(7)
        (3, 20)
        """
        if self.max_length is None:
            return NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens
        if prompt >= self.max_length:
            raise InputError(
                f"max_length={self.max_length} leaves no room after a prompt of {prompt} tokens: "
                "give a larger one, or max_new_tokens"
            )
        return self.max_length - prompt

    def least_new(self, prompt: int) -> int:
        """Number of new tokens that a row gets before it may end by eos."""
        least = max(self.min_length - prompt, 0) if self.min_new_tokens is None else self.min_new_tokens
        if least > (most := self.most_new(prompt)):
            raise InputError(
                f"a prompt of {prompt} tokens must get {least} new ones (min_length={self.min_length}, "
                f"min_new_tokens={self.min_new_tokens}) and may get {most} (max_length={self.max_length}, "
                f"max_new_tokens={self.max_new_tokens}): lower the minimum or raise the maximum"
            )
        return least


FIELDS = frozenset(one.name for one in dataclasses.fields(SettingFields))
"""The names of the built-in settings."""


def register_setting(setting: Setting) -> None:
    """Adds a parameter to `generate`, `stream` and `Chat`; `lamina.sampling.setting` has an example.

    Call it once, before the first use. `unregister_setting(name)` removes it, for instance to register a new version.
    """
    taken = {*CALL, "prompts", "stream", "added", *dir(Settings)} - FIELDS
    if setting.name in taken:
        raise InputError(f"a setting cannot be called {setting.name!r}: that is another name of generate or Settings")
    if setting.strategy is not None:
        raise InputError(f"{setting.name} has strategy={setting.strategy!r}: search strategies cannot be added")
    register(setting)


def unregister_setting(name: str) -> None:
    """Removes a setting that `register_setting` added."""
    added = [one.name for one in registered() if one.name not in FIELDS]
    if name not in added:
        near = difflib.get_close_matches(name, added, n=1, cutoff=0.0)
        raise InputError(f"{name!r} is not an added setting" + (f"; the nearest one is {near[0]!r}" if near else ""))
    unregister(name)


def settings_of(model: Model, given: Mapping[str, Any], also: Iterable[str] = ()) -> Settings:
    """The settings of one call: defaults < `model.generation_defaults` < given; but use_cache is true unless given.

    None turns a setting off, whatever the file says.

    also   other parameters of the caller's function, for the error about an unknown name

    >>> settings_of(model, {"do_sample": True, "top_p": 0.9})       # doctest: +SKIP
    Settings(do_sample=True, top_p=0.9, eos_token_id=(2,))
    """
    known = by_name()
    own = {*model.own_defaults, "use_cache"}  # false in some files: how the model was trained, not how to run it
    stored = validate.from_file({name: value for name, value in model.generation_defaults.items() if name not in own})
    asked = validate.from_caller(given, also)
    chosen, origins = validate.defaults(), Origins({})
    for found, origin in ((stored, "file"), (asked, "caller")):
        for name, value in found.items():
            if origin == "file" and name in asked:
                continue  # the caller's value counts, so the file's may be anything
            chosen[name] = validate.read(known[name], value, from_file=origin == "file")
            origins[name] = origin
    validate.check_ids({name: chosen[name] for name in asked}, model.vocab)
    conflicts.settle(chosen, origins)
    _need_tokenizer(model, chosen)
    _fill_in_ids(model, chosen, origins)
    added = {name: chosen.pop(name) for name in [*chosen] if name not in FIELDS}
    return Settings(
        **chosen, added={name: value for name, value in added.items() if not same(value, known[name].default)}
    )


def _need_tokenizer(model: Model, chosen: Values) -> None:
    for setting in registered():
        if setting.needs_tokenizer and chosen[setting.name] and model.tokenizer is None:
            raise InputError(
                f"{setting.name} works on text, and this checkpoint has no tokenizer: leave it out, or end by ids"
            )


def _fill_in_ids(model: Model, chosen: Values, origins: Origins) -> None:
    """Takes special ids that neither the caller nor the file gives from the checkpoint's config and tokenizer."""
    tokenizer = model.tokenizer
    if "eos_token_id" not in origins:
        chosen["eos_token_id"] = model.eos_ids
    if "bos_token_id" not in origins:
        bos = config_of(model).get("bos_token_id")
        chosen["bos_token_id"] = tokenizer.bos_id if bos is None and tokenizer is not None else bos
    if "pad_token_id" not in origins:
        pad = config_of(model).get("pad_token_id")
        if pad is None and tokenizer is not None and "pad_token" in tokenizer.special_tokens:
            pad = tokenizer.backend.token_to_id(tokenizer.special_tokens["pad_token"])
        chosen["pad_token_id"] = next((one for one in (pad, *chosen["eos_token_id"]) if one is not None), 0)
    if model.start_ids:
        if chosen["decoder_start_token_id"] is None:
            chosen["decoder_start_token_id"] = model.start_ids[0]
    elif origins.get("decoder_start_token_id") == "caller" and chosen["decoder_start_token_id"] is not None:
        raise InputError(
            f"decoder_start_token_id={chosen['decoder_start_token_id']} is for models that read a source, and "
            f"{type(model).__name__} does not: begin the prompt with that id instead"
        )
    else:
        chosen["decoder_start_token_id"] = None


def _shown(value: Any) -> str:
    """The repr of a value; the class name of a model."""
    return type(value).__name__ if isinstance(value, nn.Module) else repr(value)
