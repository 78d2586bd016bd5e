"""The header of a GGUF file says what the package gguf reads in it, and a broken one is refused."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type
from hypothesis import given
from hypothesis import strategies as st

from lamina.checkpoint.gguf.header import GGUFHeader

VALUES = {
    "u8": (200, Type.UINT8), "i8": (-100, Type.INT8), "u16": (60000, Type.UINT16), "i16": (-30000, Type.INT16),
    "u32": (2**32 - 1, Type.UINT32), "i32": (-(2**31), Type.INT32), "f32": (0.1, Type.FLOAT32),
    "yes": (True, Type.BOOL), "no": (False, Type.BOOL), "text": ("größer", Type.STRING), "none": ("", Type.STRING),
    "u64": (2**63 + 1, Type.UINT64), "i64": (-(2**62), Type.INT64), "f64": (0.1, Type.FLOAT64),
    "texts": (["a", "", "\u4e16"], Type.ARRAY), "whole": ([3, -1, 2], Type.ARRAY), "parts": ([0.5, 0.25], Type.ARRAY),
    "both": ([True, False], Type.ARRAY),
}  # fmt: skip
ARRAYS = {
    "f32": np.arange(12, dtype=np.float32).reshape(3, 4), "f16": np.arange(6, dtype=np.float16),
    "i32": np.arange(4, dtype=np.int32).reshape(2, 1, 2), "i8": np.arange(3, dtype=np.int8),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, (value, kind) in VALUES.items():
        writer.add_key_value(name, value, kind)
    for name, array in ARRAYS.items():
        writer.add_tensor(name, array)
    blocks = gguf.quantize(np.linspace(-1, 1, 192, dtype=np.float32).reshape(2, 96), Kind.Q8_0)
    writer.add_tensor("q8", blocks, raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_what_gguf_reads(path: Path) -> None:
    theirs, ours = gguf.GGUFReader(path), GGUFHeader(path)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected and set(VALUES) < set(expected)
    assert [type(value) for value in ours.metadata.values()] == [type(value) for value in expected.values()]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        one = ours.tensors[tensor.name]
        assert (one.kind, one.shape) == (tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
        assert one.data.dtype == tensor.data.dtype and np.array_equal(one.data, tensor.data)


def test_a_file_that_ends_too_soon_is_refused_wherever_it_ends(path: Path, tmp_path: Path) -> None:
    whole, short = path.read_bytes(), tmp_path / "short.gguf"
    end = max(np.flatnonzero(np.frombuffer(whole, np.uint8)))  # behind it is padding
    for size in range(0, end, 7):
        short.write_bytes(whole[:size])
        with pytest.raises(ValueError):
            GGUFHeader(short)


@given(damage=st.lists(st.tuples(st.integers(4, 1000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_is_refused_or_read_but_nothing_else_happens(damage: list[tuple[int, int]], path: Path) -> None:
    altered = bytearray(path.read_bytes())
    for at, value in damage:
        altered[at] = value
    broken = path.with_name("broken.gguf")
    broken.write_bytes(altered)
    with suppress(ValueError):
        GGUFHeader(broken)


@pytest.mark.parametrize(
    ("altered", "match"),
    [
        (b"GGML", "begin with GGUF"),
        (b"GGUF\x01", "version 1"),
        (b"GGUF\x00\x00\x00\x03", "version 50331648"),  # of a machine that writes the highest byte first
    ],
)
def test_other_files_are_named(path: Path, tmp_path: Path, altered: bytes, match: str) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(altered + path.read_bytes()[len(altered) :])
    with pytest.raises(ValueError, match=match):
        GGUFHeader(other)
