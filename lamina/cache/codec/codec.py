"""Codecs: in which format a cache stores keys and values.

A codec quantizes one token at a time: what is stored of a token depends on that token alone. So lines, rings, rewind,
select, join and growth work on quantized tokens as on any others; there is no block of recent tokens that waits to be
quantized, and nothing is quantized twice. Attention sees a token as it is stored, from the pass that brings it, so
logits do not depend on how a sequence is cut into passes, drafted or rewound.

| field | format of | rotated | key mean subtracted |
|---|---|---|---|
| keys | keys | yes | yes (`key_mean.py`) |
| values | values | yes | no |
| latents (MLA), which serve as keys and values | keys | no | no |
| vectors of a `Tokens` spec, such as an indexer's keys | keys | yes | no |

Everything else (recurrent states, convolutions, layer kinds from outside the package) is stored as it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from lamina.cache.codec.formats import Field, FieldFormat, Fields
from lamina.cache.codec.registry import FormatName, check_format_name, format_names, make_format, nearest
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.spec import Keeping, LayerSpecs


@dataclass(frozen=True)
class Codec:
    """The formats of keys and values: 8, 6, 5 or 4 bits, "fp8", "plain", or a name given to `lamina.register_format`.

    >>> str(Codec(keys=8, values=4))
    'k8v4'
    """

    keys: FormatName = "plain"
    values: FormatName = "plain"

    def __post_init__(self) -> None:
        check_format_name(self.keys, "keys")
        check_format_name(self.values, "values")

    @classmethod
    def of(cls, codec: str | Codec) -> Codec:
        """The codec of that name: that of a format, `int8` for 8 bits, `k8v4` for keys of 8 bits and values of 4."""
        if isinstance(codec, Codec):
            return codec
        names = codec_names()
        if isinstance(codec, str) and codec in names:
            return names[codec]
        words = ", ".join(str(name) for name in format_names() if isinstance(name, str))
        raise InputError(
            f"there is no codec {codec!r}; the nearest is {nearest(codec, names)!r}. Codecs are {words}, int8, int6, "
            "int5, int4, k8v4 and any other two of these bits; Codec(keys=…, values=…) mixes other formats, and "
            "lamina.register_format(name, class) adds a format"
        )

    @property
    def plain(self) -> bool:
        return self.keys == self.values == "plain"

    def __str__(self) -> str:
        names = (name for name, codec in codec_names().items() if codec == self)
        return next(names, f"keys {self.keys}, values {self.values}")


def codec_names() -> Mapping[str, Codec]:
    """Every codec that has a name."""
    return _codec_names(format_names())


@lru_cache(maxsize=4)
def _codec_names(formats: tuple[FormatName, ...]) -> Mapping[str, Codec]:
    bits = [name for name in formats if isinstance(name, int)]
    return {
        **{name: Codec(name, name) for name in formats if isinstance(name, str)},
        **{f"int{n}": Codec(n, n) for n in bits},
        **{f"k{keys}v{values}": Codec(keys, values) for keys, values in product(bits, bits)},
    }


Codecs = str | Codec | Mapping[str | int, str | Codec]
"""One codec for all layers, or layer number -> codec, with "default" for the layers that are not named."""


def codecs_of(asked: Codecs | None, specs: Sequence[LayerSpecs]) -> list[Codec]:
    """The codec of each layer. A codec for a model or layer that stores nothing a codec applies to is refused.

    >>> [str(codec) for codec in codecs_of({"default": "int4", 0: "int8"}, model.specs)]    # doctest: +SKIP
    ['int8', 'int4', 'int4']
    """
    given = asked if isinstance(asked, Mapping) else {"default": asked or "plain"}
    default = Codec.of(given.get("default", "plain"))
    if not default.plain:
        _refuse_without_effect(default, "this model", specs)
    codecs = [default] * len(specs)
    for layer, codec in given.items():
        if layer == "default":
            continue
        if type(layer) is not int or not -len(specs) <= layer < len(specs):
            raise InputError(
                f"codec names layer {layer!r}: layers are 0 to {len(specs) - 1}, and 'default' is for all others"
            )
        codecs[layer] = Codec.of(codec)
        if not codecs[layer].plain:
            _refuse_without_effect(codecs[layer], f"layer {layer}", [specs[layer]])
    return codecs


def _refuse_without_effect(codec: Codec, what: str, specs: Sequence[LayerSpecs]) -> None:
    if not any(spec.takes_codec for entry in specs for spec in entry.values()):
        kinds = sorted({type(spec).__name__ for entry in specs for spec in entry.values()})
        raise InputError(
            f"codec {str(codec)!r} quantizes keys, values, latents and token vectors, and {what} has none: it "
            f"remembers {', '.join(kinds) or 'nothing'}, which no codec applies to. Leave it plain"
        )


# -- the fields of a layer -----------------------------------------------------------------------------------------


class Role(NamedTuple):
    """Which format of a codec a field has, and how it is prepared."""

    side: Literal["keys", "values"]
    rotated: bool
    subtracts_mean: bool


KEY, VALUE = Role("keys", True, True), Role("values", True, False)
LATENT, VECTOR = Role("keys", False, False), Role("keys", True, False)


class Coding:
    """How the fields of one layer are stored: a field with a format as its parts `name.part`, others as they are."""

    def __init__(self, codec: Codec | None = None, formats: Mapping[str, FieldFormat] | None = None) -> None:
        self.codec, self.formats = codec or codec_names()["plain"], dict(formats or {})

    @classmethod
    def of(cls, keeping: Keeping, roles: Mapping[str, Role], dims: Mapping[str, int]) -> Coding:
        """The formats of the fields that have a role; dims: field -> values of a vector."""
        if keeping.codec == codec_names()["plain"]:  # most caches: found out at once
            return cls()
        formats: dict[str, FieldFormat] = {}
        for name, role in roles.items():
            chosen = keeping.codec.keys if role.side == "keys" else keeping.codec.values
            mean = keeping.key_mean if role.subtracts_mean else None
            made = make_format(chosen, Field(dims[name], keeping.dtype, keeping.device, role.rotated, mean))
            if made is not None:
                formats[name] = made
        return cls(keeping.codec, formats) if formats else cls()

    def parts(self, name: str, dim: int, dtype: torch.dtype) -> dict[str, tuple[int, torch.dtype]]:
        """What is stored of a field of `dim` values of this dtype: name -> (width, dtype)."""
        if name not in self.formats:
            return {name: (dim, dtype)}
        return {f"{name}.{part}": what for part, what in self.formats[name].parts.items()}

    def encode(self, fields: Fields) -> Fields:
        """Fields as the model gives them -> stored parts."""
        if not self.formats:
            return fields
        parts: Fields = {}
        for name, x in fields.items():
            if name in self.formats:
                parts.update({f"{name}.{part}": y for part, y in self.formats[name].encode(x).items()})
            else:
                parts[name] = x
        return parts

    def decode(self, parts: Fields) -> Fields:
        """Stored parts -> fields as attention sees them."""
        if not self.formats:
            return parts
        fields = {name: x for name, x in parts.items() if "." not in name}
        for name, chosen in self.formats.items():
            fields[name] = chosen.decode({part: parts[f"{name}.{part}"] for part in chosen.parts})
        return fields
