"""`Manifest`: manifest.json of an exported program: sizes, shapes, dtypes, where each weight is, and checksums.

A host in any language needs only this file to feed the programs: which tensors to allocate for the cache, which inputs
a program takes, how long rows may get.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from lamina.errors import ProgramError

FORMAT, VERSION = "lamina program", 2
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Manifest:
    """Plain values only.

    target        what runs the programs: "pt2", "aotinductor", "onnx" or "executorch"
    rows          sequences that the programs run at once
    capacity      slots of full attention; `limit` is the most tokens a row may hold, None if there is no limit
    slack         tokens that windows and states can be rewound by
    chunk         most tokens a row in one call of `prefill`
    cache         the tensors that the host allocates, filled with zeros: name -> {shape, dtype}
    weights       the tensors of weights.bin: name -> {shape, dtype, offset}, or {same: name} for one that is stored
                  under another name; none for "executorch", whose program holds them
    programs      name -> {inputs: name -> {shape, dtype}, outputs: …}; a size that varies is [least, most]
    rings         [slots, kept first tokens] of each kind of ring: they limit how far a row can be rewound; [0, 0] for
                  kinds from outside the package that go back by the slack alone
    states        True if there are recurrent states, which limit it too
    source        encoder–decoder models: {kind: "ids" or "features", capacity: positions, most: longest input, shape:
                  of one feature, vocab: number of source ids, 0 for features}
    start_ids     ids that every row of a decoder with a source starts with
    files         name -> {bytes, crc32} of every other file of the archive
    """

    target: str
    family: str
    fingerprint: dict[str, Any]
    rows: int
    capacity: int
    limit: int | None
    slack: int
    chunk: int
    vocab: int
    dtype: str
    device: str
    codec: str
    cache: dict[str, dict[str, Any]]
    weights: dict[str, dict[str, Any]]
    programs: dict[str, dict[str, Any]]
    rings: list[list[int]]
    states: bool
    source: dict[str, Any] | None
    start_ids: list[int]
    eos_ids: list[int]
    tokenizer: dict[str, Any] | None
    versions: dict[str, str]
    files: dict[str, dict[str, int]] = field(default_factory=dict)

    def as_json(self) -> str:
        values = {"format": FORMAT, "version": VERSION} | asdict(self)
        return json.dumps(values | {"checksum": _checksum(values)}, indent=1)

    @classmethod
    def read(cls, text: str | bytes, name: str) -> Manifest:
        """Reads and checks manifest.json; `name` names the archive in errors."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ProgramError(f"the manifest of {name} is not JSON: {error}. Export the model again") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ProgramError(f"{name} is not an exported program: lamina export PATH --to FILE makes one")
        if values.get("version") != VERSION:
            raise ProgramError(
                f"{name} has version {values.get('version')!r} of the format, and this Lamina reads {VERSION}: export "
                "the model again, or use the Lamina that wrote it"
            )
        own = values.pop("checksum", None)
        if own != _checksum(values):
            raise ProgramError(f"the manifest of {name} was altered: its checksum is not {own}. Export the model again")
        wanted = {one.name for one in fields(cls)}
        given = set(values) - {"format", "version"}
        if given != wanted:
            raise ProgramError(
                f"the manifest of {name} lacks {sorted(wanted - given)} and has {sorted(given - wanted)} besides: "
                "export the model again"
            )
        for tensor, entry in (values["cache"] | values["weights"]).items():
            if "same" not in entry and entry.get("dtype") not in DTYPES:
                raise ProgramError(
                    f"the manifest of {name} gives {tensor} the dtype {entry.get('dtype')!r}, which this Lamina does "
                    "not know: export the model again"
                )
        return cls(**{key: values[key] for key in wanted})


def shape_and_dtype(tensor: torch.Tensor) -> dict[str, Any]:
    """As the manifest describes a tensor."""
    return {"shape": list(tensor.shape), "dtype": NAMES[tensor.dtype]}


def as_words(entry: Mapping[str, Any]) -> str:
    """The dtype and shape of a tensor of the manifest.

    >>> as_words({"dtype": "float32", "shape": [2, 8]})
    'float32 2 8'
    """
    return " ".join([entry["dtype"], *map(str, entry["shape"])])


def _checksum(values: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in values.items() if key != "checksum"}, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"
