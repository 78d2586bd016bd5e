"""Waveforms: every kind of WAV file and array becomes the same samples, and what cannot be read is said."""

from __future__ import annotations

import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamina.audio import read_wave, resample, waveform
from lamina.errors import InputError

RATE = 16000
TONE = np.sin(np.arange(1600) / 7) * 0.8


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for name, data in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def fmt(kind: int, channels: int, bits: int, rate: int = RATE, more: bytes = b"") -> tuple[bytes, bytes]:
    block = channels * bits // 8
    return b"fmt ", struct.pack("<HHIIHH", kind, channels, rate, rate * block, block, bits) + more


def written(samples: np.ndarray, kind: int, bits: int) -> bytes:
    """Samples from -1 to 1 in the format of a data chunk."""
    if kind == 3:
        return samples.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return (np.round(samples * 127) + 128).astype(np.uint8).tobytes()
    whole = np.round(samples * (2 ** (bits - 1) - 1)).astype("<i4")
    if bits == 24:
        return np.ascontiguousarray(whole.view(np.uint8).reshape(-1, 4)[:, :3]).tobytes()
    return whole.astype(f"<i{bits // 8}").tobytes()


@pytest.mark.parametrize(("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
@pytest.mark.parametrize("channels", [1, 2])
def test_every_format_gives_the_same_samples(tmp_path: Path, kind: int, bits: int, channels: int) -> None:
    both = np.stack([TONE, -0.5 * TONE])[:channels]
    file = tmp_path / "a.wav"
    file.write_bytes(riff((b"LIST", b"odd"), fmt(kind, channels, bits), (b"data", written(both.T.ravel(), kind, bits))))
    samples, rate = read_wave(file)
    assert rate == RATE and samples.shape == (channels, 1600) and samples.dtype == torch.float32
    assert np.abs(samples.numpy() - both).max() < (1e-6 if kind == 3 else 2.0 ** (2 - bits) + 1e-6)
    assert np.abs(waveform(str(file)).numpy() - both.mean(axis=0)).max() < 2.0 ** (2 - min(bits, 20))


def test_the_standard_library_writes_what_is_read_and_extensible_and_streamed_files_are_read_too(
    tmp_path: Path,
) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(written(TONE, 1, 16))
    expected, rate = read_wave(tmp_path / "a.wav")
    assert rate == 8000
    subformat = struct.pack("<HHIH", 22, 16, 0, 1) + b"\0" * 14
    data = written(TONE, 1, 16)
    (tmp_path / "b.wav").write_bytes(riff(fmt(0xFFFE, 1, 16, 8000, subformat), (b"data", data)))
    streamed = riff(fmt(1, 1, 16, 8000), (b"data", data)).replace(
        b"data" + struct.pack("<I", len(data)), b"data\xff\xff\xff\xff"
    )
    (tmp_path / "c.wav").write_bytes(streamed + b"\x01")  # half a sample, cut off
    for name in ("b.wav", "c.wav"):
        assert torch.equal(read_wave(tmp_path / name)[0], expected)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"fLaC" + b"\0" * 40, "is not a WAV file: convert it"),
        (riff(fmt(1, 1, 16)), "is cut short: it has no samples"),
        (riff((b"data", b"\0\0")), "is cut short: it has no format"),
        (riff(fmt(7, 1, 8), (b"data", b"\0")), "has mu-law, which is not read"),
        (riff(fmt(1, 1, 12), (b"data", b"\0\0")), "has PCM of 12 bits, which is not read"),
        (riff(fmt(99, 1, 16), (b"data", b"\0\0")), "has format 99"),
        (riff(fmt(1, 0, 16), (b"data", b"\0\0")), "is damaged: 0 channels"),
        (riff(fmt(1, 1, 16), (b"data", b"\0")), r"not \[1, 0\]"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "a.wav"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=said):
        waveform(file)


def test_arrays_of_any_dtype_and_channels_give_the_same_samples() -> None:
    expected = torch.tensor(TONE).float()
    for given in (TONE, TONE.astype(np.float32), torch.tensor(TONE), np.stack([TONE, TONE]), np.stack([TONE, TONE], 1)):
        assert torch.allclose(waveform(given, RATE), expected, atol=1e-6)
    for given, error in (((TONE * 32767).astype(np.int16), 1e-4), ((TONE * 127 + 128).astype(np.uint8), 2e-2)):
        assert torch.allclose(waveform(given, RATE), expected, atol=error)
        assert torch.allclose(waveform(torch.tensor(given), RATE), expected, atol=error)


@pytest.mark.parametrize(
    ("audio", "rate", "said"),
    [
        (TONE, None, "give rate="),
        (TONE, 0, "rate=0: it must be a whole number of samples per second"),
        (TONE, 44.1, "rate=44.1"),
        (np.zeros(0), RATE, r"not \[0\]"),
        (np.zeros((2, 2, 9)), RATE, r"not \[2, 2, 9\]"),
        (np.array([0.0, np.nan]), RATE, "not finite"),
        (np.zeros(9, dtype=bool), RATE, "floats or whole numbers, not torch.bool"),
        (b"RIFF", RATE, "not a bytes"),
    ],
)
def test_wrong_arrays_are_refused(audio: Any, rate: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        waveform(audio, rate)


def test_a_rate_that_contradicts_the_file_is_refused() -> None:
    with pytest.raises(InputError, match=r"rate=8000 was given, and .*clip.wav has 16000"):
        waveform(Path(__file__).parent / "clip.wav", 8000)


# -- resampling --------------------------------------------------------------------------------------------------------


def tone(hertz: float, rate: int, seconds: float = 0.5) -> torch.Tensor:
    return torch.sin(2 * torch.pi * hertz * torch.arange(int(rate * seconds), dtype=torch.float64) / rate).float()


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 24000, 32000, 44100, 48000, 96000, 16001])
def test_a_tone_keeps_its_frequency_phase_and_height(rate: int) -> None:
    found = resample(tone(1234.5, rate), rate, RATE)
    expected = tone(1234.5, RATE)
    assert len(found) == -(-int(rate * 0.5) * RATE // rate)
    inside = slice(200, min(len(found), len(expected)) - 200)
    assert float((found[inside] - expected[inside]).abs().max()) < 2e-4
    assert torch.allclose(resample(torch.ones(rate // 10), rate, RATE)[200:-200], torch.ones(1), atol=1e-5)


def test_frequencies_that_the_new_rate_cannot_hold_are_removed() -> None:
    assert float(resample(tone(9000, 44100), 44100, RATE)[200:-200].abs().max()) < 1e-3
    assert float(resample(tone(7000, 44100), 44100, RATE)[200:-200].abs().max()) > 0.99


def test_long_audio_is_resampled_in_blocks_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    whole = resample(samples, 44100, RATE)
    monkeypatch.setattr("lamina.audio.resampler.AT_ONCE", 10_000)
    assert torch.allclose(resample(samples, 44100, RATE), whole, atol=1e-6)
