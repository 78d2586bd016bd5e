"""Audio: reading and resampling waveforms, log-mel spectrograms, and transcription in windows with timestamps."""

from lamina.audio.resampler import resample
from lamina.audio.spectrogram import log_mel
from lamina.audio.transcription import Segment, Transcription
from lamina.audio.wave import read_wave, waveform

__all__ = ["Segment", "Transcription", "log_mel", "read_wave", "resample", "waveform"]
