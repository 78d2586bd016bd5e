"""Codecs: how a token's numbers are written, plain or in few bits.

A codec works on one token at a time: what is kept of a token depends on that token alone. So lines, rings, rewinding,
selecting, joining and growing need not know about it; there is no window that is not written yet, and nothing is
written twice. A token is seen as it is kept from the pass on that brings it, so how a sequence is cut, drafted or taken
back changes nothing either.

From keys a constant of the model is taken before they are written (`codec/key_mean.py`). Latents serve as keys and
values: they have the format of keys, and are neither centred nor turned. Vectors that an indexer recalls have the
format of keys and are not centred. All else (recurrent states, convolutions, kinds from outside) is kept as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from lamina.cache.codec.bitpack import WIDTHS
from lamina.cache.codec.formats import Fields, Float8, Form, Grouped, hadamard
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.spec import Keeping, LayerSpecs

Format = int | Literal["fp8", "plain"]


@dataclass(frozen=True)
class Codec:
    """How keys and values are written: in 8, 6, 5 or 4 bits, as "fp8", or "plain".

    >>> str(Codec(keys=8, values=4))
    'k8v4'
    """

    keys: Format = "plain"
    values: Format = "plain"

    def __post_init__(self) -> None:
        for side, form in (("keys", self.keys), ("values", self.values)):
            if type(form) not in (int, str) or form not in (*WIDTHS, "fp8", "plain"):
                raise InputError(f"{side}={form!r}: a codec writes 8, 6, 5 or 4 bits, 'fp8' or 'plain'")

    @classmethod
    def of(cls, codec: str | Codec) -> Codec:
        """The codec of that name."""
        if isinstance(codec, Codec):
            return codec
        if isinstance(codec, str) and codec in NAMES:
            return NAMES[codec]
        near = difflib.get_close_matches(str(codec), NAMES, n=1, cutoff=0.0)
        raise InputError(
            f"there is no codec {codec!r}; the nearest is {near[0]!r}. There are plain, fp8, int8, int6, int5, int4, "
            "k8v4 and any other two of these bits; anything else is a Codec(keys=…, values=…)"
        )

    @property
    def plain(self) -> bool:
        return self.keys == self.values == "plain"

    def __str__(self) -> str:
        names = (name for name, codec in NAMES.items() if codec == self)
        return next(names, f"keys {self.keys}, values {self.values}")


NAMES: dict[str, Codec] = {
    "plain": Codec(),
    "fp8": Codec("fp8", "fp8"),
    **{f"int{bits}": Codec(bits, bits) for bits in WIDTHS},
    **{f"k{keys}v{values}": Codec(keys, values) for keys, values in product(WIDTHS, WIDTHS)},
}

Codecs = str | Codec | Mapping[str | int, str | Codec]
"""One codec for all layers, or number of a layer -> codec, with "default" for those that are not named."""


def codecs_of(asked: Codecs | None, specs: Sequence[LayerSpecs]) -> list[Codec]:
    """The codec of each layer. One that would write nothing, of the model or of a layer that is named, is refused.

    >>> [str(codec) for codec in codecs_of({"default": "int4", 0: "int8"}, model.specs)]    # doctest: +SKIP
    ['int8', 'int4', 'int4']
    """
    given = asked if isinstance(asked, Mapping) else {"default": asked or "plain"}
    default = Codec.of(given.get("default", "plain"))
    if not default.plain:
        _refuse_nothing(default, "this model", specs)
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
            _refuse_nothing(codecs[layer], f"layer {layer}", [specs[layer]])
    return codecs


def _refuse_nothing(codec: Codec, what: str, specs: Sequence[LayerSpecs]) -> None:
    if not any(spec.takes_codec for entry in specs for spec in entry.values()):
        kinds = sorted({type(spec).__name__ for entry in specs for spec in entry.values()})
        raise InputError(
            f"codec {str(codec)!r} writes keys, values, latents and vectors, and {what} has none: it remembers "
            f"{', '.join(kinds) or 'nothing'}, which no codec writes. Leave it plain"
        )


# -- the fields of a layer -----------------------------------------------------------------------------------------


class Role(NamedTuple):
    """What a field is to a codec."""

    side: Literal["keys", "values"]
    turned: bool
    centred: bool


KEY, VALUE = Role("keys", True, True), Role("values", True, False)
LATENT, VECTOR = Role("keys", False, False), Role("keys", True, False)


class Coding:
    """How the fields of one layer are written: each as it is, or by a form as `name.part` for each of its parts."""

    def __init__(self, codec: Codec = NAMES["plain"], forms: Mapping[str, Form] | None = None) -> None:
        self.codec, self.forms = codec, dict(forms or {})

    @classmethod
    def of(cls, keeping: Keeping, roles: Mapping[str, Role], dims: Mapping[str, int]) -> Coding:
        """For fields of these roles; one without a role is kept as it is."""
        forms: dict[str, Form] = {}
        exact = torch.promote_types(keeping.dtype, torch.float32)
        for name, role in roles.items():
            how = keeping.codec.keys if role.side == "keys" else keeping.codec.values
            centre = keeping.centre if role.centred else None
            if how == "fp8":
                forms[name] = Float8(dims[name], keeping.dtype, centre)
            elif how != "plain":
                turn = hadamard(exact, keeping.device) if role.turned else None
                forms[name] = Grouped(dims[name], how, keeping.dtype, turn, centre)
        return cls(keeping.codec, forms) if forms else cls()

    def parts(self, name: str, dim: int, dtype: torch.dtype) -> dict[str, tuple[int, torch.dtype]]:
        """What is kept of a field of `dim` numbers of this dtype: name -> (width, dtype)."""
        if name not in self.forms:
            return {name: (dim, dtype)}
        return {f"{name}.{part}": what for part, what in self.forms[name].parts.items()}

    def encode(self, fields: Fields) -> Fields:
        """Fields as the model gives them -> the parts that are kept."""
        if not self.forms:
            return fields
        parts: Fields = {}
        for name, x in fields.items():
            if name in self.forms:
                parts.update({f"{name}.{part}": y for part, y in self.forms[name].encode(x).items()})
            else:
                parts[name] = x
        return parts

    def decode(self, parts: Fields) -> Fields:
        """Parts as they are kept -> the fields as they are seen."""
        if not self.forms:
            return parts
        fields = {name: x for name, x in parts.items() if "." not in name}
        for name, form in self.forms.items():
            fields[name] = form.decode({part: parts[f"{name}.{part}"] for part in form.parts})
        return fields


def unused(part: Tensor, value: float) -> float:
    """What fills a slot of this part that holds no token, where `value` is asked for: bytes know no NaN."""
    return value if part.is_floating_point() else 255
