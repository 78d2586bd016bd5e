"""The RoPE settings of a configuration: `rope_parameters`, or the older `rope_scaling` beside `rope_theta`.

Only the settings that a RoPE type uses count as read, so `config.unread` names the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.config import Config
from lamina.errors import InputError

ORIGINAL = "original_max_position_embeddings"
USED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", ORIGINAL),
    "yarn": (
        "factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
    "longrope": ("short_factor", "long_factor", ORIGINAL, "factor", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "proportional": ("factor",),
}  # fmt: skip
"""RoPE type -> the settings that it uses, beside the base and the rotated part of a head."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (ORIGINAL,),
    "longrope": ("short_factor", "long_factor", ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
}
"""RoPE type -> the settings that it requires."""

FIELDS = ("rope_scaling", "rope_parameters")
"""Names of the object with the settings. If a file has both, the first wins, as in transformers."""
OF_EVERY_TYPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
KNOWN = frozenset({*OF_EVERY_TYPE, *(name for names in USED.values() for name in names)})


def rope_parameters(
    config: Config,
    base: float = 10_000.0,
    *,
    partial: float | None = None,
    kind: str | None = None,
    more: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The RoPE settings. Inside the object they win over those beside it, except for the original context.

    base      default of `rope_theta`
    partial   default of `partial_rotary_factor`; None: the family rotates whole heads, and another value is refused
    kind      a layer type ("sliding_attention" …), if the configuration may have settings for each
    more      settings that the family itself reads
    """
    field = next((name for name in FIELDS if config.get(name)), FIELDS[-1])
    found, path = plain(config, field), f"{field}."
    by_kind = any(isinstance(value, Mapping) for value in found.values())
    if kind is not None and by_kind:
        found, path = dict(found.get(kind) or {}), f"{field}.{kind}."
    for name in ("rope_theta", "partial_rotary_factor"):
        if found.get(name) is None:
            found[name] = config.get(name)
        elif config.values.get(name) == found[name]:
            config.ignore(name)  # the same again
    found["rope_theta"] = base if found["rope_theta"] is None else found["rope_theta"]
    Config(found).get("rope_type"), Config(found).get("type")  # which checks them
    found["rope_type"] = rope_type(found)
    if found["rope_type"] in ("llama3", "yarn", "longrope"):
        beside = None if by_kind else config.get(ORIGINAL)
        given = found.get("factor") is not None  # otherwise it is the ratio of both lengths
        length = config.get("max_position_embeddings") if given else config.max_position_embeddings
        found[ORIGINAL] = beside or found.get(ORIGINAL) or length
    if found["rope_type"] == "dynamic":
        found[ORIGINAL] = dynamic_length(found, config)
    found["partial_rotary_factor"] = rotated_part(found, partial)
    used = [*OF_EVERY_TYPE, *USED.get(found["rope_type"], ()), *more]
    config.ignore(path[:-1], *(path + name for name in used))
    check(found, used)
    found["longest"] = config.get("context")
    return found


def plain(config: Config, field: str) -> dict[str, Any]:
    """A copy of the object in a field, none of which counts as read; empty if there is none."""
    config.get(field)  # which checks it
    return dict(config.values.get(field) or {})


def rope_type(settings: Mapping[str, Any]) -> str:
    """The type by its current name."""
    found = settings.get("rope_type") or settings.get("type") or "default"
    return "longrope" if found == "su" else found


def rotated_part(settings: Mapping[str, Any], default: float | None) -> float:
    given = settings["partial_rotary_factor"]
    if default is None and given not in (None, 1) and settings["rope_type"] != "proportional":
        raise InputError(
            f"partial_rotary_factor={given!r} in the configuration is not supported: this family rotates whole heads"
        )
    return given if given is not None else 1.0 if default is None else default


def dynamic_length(settings: Mapping[str, Any], config: Config) -> int:
    """The trained length of dynamic scaling. transformers ignores the original one; files that mean it are refused."""
    trained = config.max_position_embeddings
    if settings.get(ORIGINAL) not in (None, trained):
        raise InputError(
            f"{ORIGINAL}={settings[ORIGINAL]!r} in the configuration is not supported with rope_type='dynamic', whose "
            f"trained length is max_position_embeddings={trained}"
        )
    return trained


def check(settings: dict[str, Any], used: list[str]) -> None:
    """Checks the values that are used, so that an error names what is wrong."""
    read = Config({name: settings[name] for name in used if name in settings} | {"model_type": "rotary positions"})
    for name in used:
        read.get(name)
    if settings["rope_type"] not in USED:
        known = ", ".join(map(repr, USED))
        raise InputError(f"rope_type={settings['rope_type']!r} in the configuration is not supported; known: {known}")
    for name in NEEDED.get(settings["rope_type"], ()):
        getattr(read, name)


POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")


def positions_of(config: Config) -> int | None:
    """The context length of a checkpoint according to its configuration; None if that has none.

    Configurations with llama3 scaling give the scaled length. With linear and yarn scaling many give the length before
    scaling, so the result is the larger of the given length and `factor` times the original one. With longrope and
    dynamic scaling it is the length that the frequencies are for.

    >>> positions_of(Config({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}))
    16384
    """
    config.ignore(*POSITIONS)  # a file may have several of them, with the same value
    named = next((n for name in POSITIONS if isinstance(n := config.get(name), int) and n > 0), None)
    rope = next((found for name in FIELDS if (found := plain(config, name))), {})
    kind, trained = rope_type(rope), rope.get(ORIGINAL)
    if kind == "dynamic":
        return config.get("context") or named
    if kind == "longrope":  # see `Rotary`
        return config.get("context") or config.values.get(ORIGINAL) or trained or named
    if named is None or kind not in ("linear", "yarn"):
        return named
    return max(named, round((trained or named) * (rope.get("factor") or 1)))
