"""`lamina export` and `lamina run`, and what the archive holds beside the programs."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lamina import Program
from lamina.cli import commands
from tests.exporting.kinds import FAST
from tests.exporting.text_model import check_commands
from tests.generation.text import CHATML, tokenizer


def test_a_text_is_continued_from_the_command_line_and_the_archive_has_all_that_takes(tmp_path: Path) -> None:
    file = check_commands("pt2", tmp_path)
    with zipfile.ZipFile(file) as archive:
        assert set(archive.namelist()) == {
            "weights.bin", "programs/prefill.pt2", "programs/decode.pt2", "tokenizer.json", "chat_template.jinja",
            "generation_config.json", "manifest.json",
        }  # fmt: skip
        assert archive.read("chat_template.jinja").decode() == CHATML
        assert json.loads(archive.read("generation_config.json")) == {"do_sample": True, "temperature": 0.9}
        assert json.loads(archive.read("tokenizer.json")) == json.loads(tokenizer().backend.to_str())
    program = Program.load(file)
    assert program.manifest.programs["prefill"]["inputs"]["ids"] == {"shape": [1, [2, 8]], "dtype": "int64"}
    assert program.manifest.cache["cache_0_attention_k"]["shape"][2] == 65  # one slot is for padding
    assert program.generate("the theory", 4).text == program.generate(["the theory"], 4).text
    assert program.generate(["the theory"], 4).text == [program.generate([[*program.ids_of("the theory")]], 4).text[0]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_text_is_continued_by_compiled_programs(tmp_path: Path) -> None:
    with torch._inductor.config.patch(FAST):
        check_commands("aotinductor", tmp_path)
    refused = CliRunner().invoke(commands(), ["run", str(tmp_path / "model"), ""])
    assert refused.exit_code == 2 and "prompt 0 is empty: give at least one token" in refused.stderr
