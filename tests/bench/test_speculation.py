from __future__ import annotations

import pytest

from bench.speculation import main


def test_without_a_gpu_a_small_model_is_measured_by_plain_passes(capsys: pytest.CaptureFixture[str]) -> None:
    main([], context=20, new=4)
    text = capsys.readouterr().out
    assert "## tiny, one row, context 20" in text and "Passes are plain, since the model is on cpu" in text
    assert "| 16 | – | – |" in text and "| prompt lookup of 15 |" in text
