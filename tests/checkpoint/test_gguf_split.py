"""A GGUF model in several files is read as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lamina import CheckpointError
from lamina.checkpoint import open_source
from tests.checkpoint.test_gguf import llama_arrays, write


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three parts: the first has the embeddings, one block tensor is in the last."""
    arrays = llama_arrays()
    names = sorted(arrays, key=lambda name: name != "token_embd.weight")
    cuts = [names[:3], names[3:-1], names[-1:]]

    def marks(number: int):
        def add(writer) -> None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 3)
            writer.add_int32("split.tensors.count", len(arrays))

        return add

    return [
        write(tmp_path / f"m-{i + 1:05}-of-00003.gguf", {name: arrays[name] for name in cut}, extra=marks(i))
        for i, cut in enumerate(cuts)
    ]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "whole.gguf", llama_arrays())


def test_any_part_opens_all(parts, whole):
    single = open_source(whole)
    for part in parts:
        source = open_source(part)
        assert source.config == single.config
        assert set(source.names) == set(single.names)
        for name in source.names:
            assert source.shape(name) == single.shape(name)
            assert torch.equal(source.read(name), single.read(name))


def test_missing_parts_are_named(parts):
    parts[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of 3 parts: m-00002-of-00003\.gguf; copy or download them again$"
    ):
        open_source(parts[2])


def test_parts_that_are_not_of_one_model_are_refused(parts):
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf says it is part 2 \(from 0\) of 3, not 1 of 3"):
        open_source(parts[0])


def test_a_part_with_another_name_is_refused(parts, tmp_path):
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match=r"should end in -00001-of-00003\.gguf"):
        open_source(tmp_path / "first.gguf")


def test_tensors_that_no_part_has_are_counted(parts, tmp_path):
    def add(writer) -> None:
        writer.add_uint16("split.no", 2)
        writer.add_uint16("split.count", 3)

    write(parts[2], {"other.weight": np.ones(2, np.float32), "more.weight": np.ones(2, np.float32)}, extra=add)
    with pytest.raises(CheckpointError, match=r"parts of .* tensors, and should have \d+"):
        open_source(parts[0])


def test_a_file_is_read_by_its_first_bytes_where_its_name_says_nothing(whole, tmp_path):
    names = set(open_source(whole).names)
    assert set(open_source(whole.rename(tmp_path / "sha256-0123")).names) == names


def test_a_pointer_of_git_lfs_is_named_as_such(tmp_path):
    (tmp_path / "m.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match="is a pointer of Git LFS"):
        open_source(tmp_path / "m.gguf")
