"""Log-mel spectrograms as Whisper reads them: power spectra of 25 ms every 10 ms, summed over mel bands, in log10."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lamina.errors import InputError

RATE, FFT, HOP = 16000, 400, 160
"""Samples per second, per spectrum, and from one spectrum to the next."""
EXPECTED = {
    "sampling_rate": RATE, "n_fft": FFT, "hop_length": HOP, "dither": 0.0, "padding_value": 0.0, "do_normalize": False,
}  # fmt: skip
"""Fields of a preprocessor_config.json, and the values for which `log_mel` is what they ask for."""
LOUDEST = 8.0  # exponents of 10 below the loudest value of a recording that are kept apart


def log_mel(samples: Tensor, mels: int = 80, length: int | None = None) -> Tensor:
    """samples [N] at 16,000 per second -> [mels, frames], a frame for each 160 samples.

    length   pad with silence, or cut, to this many samples; Whisper's windows have 480,000, which is 30 s

    >>> log_mel(torch.zeros(16000), 80).shape, log_mel(torch.zeros(16000), 128, length=480_000).shape
    (torch.Size([80, 100]), torch.Size([128, 3000]))
    """
    if samples.dim() != 1:
        raise InputError(f"samples must be [N], one channel, not {list(samples.shape)}")
    samples = samples.float()
    if length is not None:
        samples = torch.nn.functional.pad(samples[:length], (0, max(length - len(samples), 0)))
    if len(samples) <= FFT // 2:
        raise InputError(f"{len(samples)} samples are too few for a spectrum: give length=, which pads with silence")
    window = torch.hann_window(FFT, device=samples.device)
    spectra = torch.stft(samples, FFT, HOP, window=window, return_complex=True)[:, :-1]  # [FFT / 2 + 1, frames]
    power = mel_filters(mels).to(samples.device) @ spectra.abs().square()
    log = power.clamp(min=1e-10).log10()
    return (log.clamp(min=log.max() - LOUDEST) + 4) / 4


def check_preprocessor(config: Mapping[str, Any], mels: int) -> None:
    """Raises InputError if a checkpoint's preprocessor_config.json asks for another spectrogram than `log_mel`."""
    for name, value in {**EXPECTED, "feature_size": mels}.items():
        if (said := config.get(name, value)) not in (None, value):
            raise InputError(f"{name}={said!r} in preprocessor_config.json is not supported; known: {value!r}")


@lru_cache(maxsize=4)
def mel_filters(mels: int) -> Tensor:
    """Triangles over the frequencies of a spectrum, [mels, FFT / 2 + 1]: equally spaced on Slaney's mel scale from 0 to
    8 kHz, each of area 1."""
    corners = _hertz(torch.linspace(0, _mel(RATE / 2), mels + 2, dtype=torch.float64))
    frequencies = torch.linspace(0, RATE / 2, FFT // 2 + 1, dtype=torch.float64)
    low, middle, high = (corners[i : mels + i, None] for i in range(3))
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (high - low)).float()


def _mel(hertz: float) -> float:
    """Slaney's scale: linear up to 1 kHz, logarithmic above."""
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def _hertz(mel: Tensor) -> Tensor:
    return torch.where(mel < 15, mel * 200 / 3, 1000 * torch.exp((mel - 15) * math.log(6.4) / 27))
