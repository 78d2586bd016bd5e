"""Log-mel spectrograms against transformers' feature extractor."""

from __future__ import annotations

import pytest
import torch
from transformers import WhisperFeatureExtractor

from lamina.audio import log_mel
from lamina.audio.spectrogram import mel_filters
from lamina.errors import InputError

WINDOW = 480_000


def noise(samples: int, seed: int = 0) -> torch.Tensor:
    """Noise that swells, with a silent beginning."""
    loudness = torch.linspace(-1, 1, samples).clamp(min=0) ** 2
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * loudness


@pytest.mark.parametrize("mels", [80, 128])
def test_spectrograms_equal_those_of_transformers(mels: int) -> None:
    theirs = WhisperFeatureExtractor(feature_size=mels)
    assert torch.allclose(mel_filters(mels), torch.tensor(theirs.mel_filters.T).float(), atol=1e-7)
    for samples in (noise(30_000), torch.zeros(7), noise(30_000) * 1e-3):
        expected = theirs(samples.numpy(), sampling_rate=16000, return_tensors="pt").input_features[0]
        found = log_mel(samples, mels, WINDOW)
        assert found.shape == (mels, 3000)
        assert float((found - expected).abs().max()) < 1e-4


def test_long_audio_is_not_cut_unless_asked() -> None:
    theirs, samples = WhisperFeatureExtractor(chunk_length=1), noise(40_123)
    whole = theirs(samples.numpy(), sampling_rate=16000, return_tensors="pt", truncation=False, padding="longest")
    assert float((log_mel(samples) - whole.input_features[0]).abs().max()) < 1e-4
    cut = theirs(samples.numpy(), sampling_rate=16000, return_tensors="pt").input_features[0]
    assert float((log_mel(samples, length=16_000) - cut).abs().max()) < 1e-4


def test_too_short_or_misshapen_samples_are_refused() -> None:
    with pytest.raises(InputError, match="200 samples are too few"):
        log_mel(torch.zeros(200))
    with pytest.raises(InputError, match=r"not \[2, 900\]"):
        log_mel(torch.zeros(2, 900))
