"""Waveforms: from a WAV file or an array to one channel of float32 samples at the rate that a model reads.

The standard library's `wave` refuses float samples, so the file's chunks are read here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.audio.resampler import resample
from lamina.errors import InputError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
COMPRESSED = {2: "ADPCM", 6: "A-law", 7: "mu-law", 17: "IMA ADPCM", 85: "MP3"}
WAY_OUT = "convert it, for example with: ffmpeg -i RECORDING -ar 16000 -ac 1 recording.wav"
STREAMED = 0xFFFFFFFF  # size of a chunk whose writer could not seek back


def waveform(audio: Any, rate: int | None = None, to: int = 16000) -> Tensor:
    """One recording as samples [N] in float32 from -1 to 1, at the rate `to`; several channels are averaged.

    audio   the path of a WAV file; or an array or tensor [N], [channels, N] or [N, channels] (the longer axis is time)
            of floats from -1 to 1, or of whole numbers over the range of their dtype
    rate    samples per second of an array; a file says it itself

    >>> waveform(np.zeros(8000), rate=8000).shape
    torch.Size([16000])
    """
    if isinstance(audio, str | os.PathLike):
        samples, found = read_wave(audio)
        if rate not in (None, found):
            raise InputError(f"rate={rate} was given, and {os.fspath(audio)} has {found} samples per second")
        rate = found
    elif isinstance(audio, np.ndarray | Tensor):
        if rate is None:
            raise InputError("an array was given without its rate: give rate=, the samples per second")
        samples = _samples(torch.as_tensor(audio).detach().cpu())
    else:
        raise InputError(f"audio must be the path of a WAV file, an array or a tensor, not a {type(audio).__name__}")
    if samples.dim() not in (1, 2) or not samples.numel():
        raise InputError(f"a recording is [N], [channels, N] or [N, channels] samples, not {list(samples.shape)}")
    if samples.dim() == 2:
        from_file = isinstance(audio, str | os.PathLike)
        samples = samples.mean(dim=0 if from_file or samples.shape[0] <= samples.shape[1] else 1)
    if not bool(samples.isfinite().all()):
        raise InputError("the recording has samples that are not finite")
    return resample(samples, rate, to)


def _samples(audio: Tensor) -> Tensor:
    """Samples of any dtype as float32 from -1 to 1."""
    if audio.is_floating_point():
        return audio.float()
    if audio.is_complex() or audio.dtype == torch.bool:
        raise InputError(f"samples are floats or whole numbers, not {audio.dtype}")
    info = torch.iinfo(audio.dtype)
    middle = 0 if info.min < 0 else (info.max + 1) // 2
    half = (info.max + 1) if info.min < 0 else middle
    return ((audio.double() - middle) / half).float()


def read_wave(path: str | os.PathLike[str]) -> tuple[Tensor, int]:
    """The samples [channels, N] of a WAV file in float32 from -1 to 1, and its rate: PCM of 8, 16, 24 or 32 bits, or
    floats of 32 or 64.

    >>> samples, rate = read_wave("speech.wav")                # doctest: +SKIP
    """
    file = Path(path).expanduser()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise InputError(f"{file} is not a WAV file: {WAY_OUT}")
    chunks = _chunks(content)
    if len(chunks.get(b"fmt ", b"")) < 16 or b"data" not in chunks:
        raise InputError(f"{file} is cut short: it has no {'samples' if b'fmt ' in chunks else 'format'}")
    kind, channels, rate, _, block, bits = struct.unpack("<HHIIHH", chunks[b"fmt "][:16])
    if kind == EXTENSIBLE and len(chunks[b"fmt "]) >= 26:
        kind = struct.unpack("<H", chunks[b"fmt "][24:26])[0]  # the first field of the subformat
    read = READERS.get((kind, bits))
    if read is None:
        what = {PCM: f"PCM of {bits} bits", FLOAT: f"floats of {bits} bits"}.get(kind)
        raise InputError(f"{file} has {what or COMPRESSED.get(kind, f'format {kind}')}, which is not read: {WAY_OUT}")
    if not channels or not rate or block != channels * bits // 8:
        raise InputError(f"{file} is damaged: {channels} channels, {rate} samples per second, {block} bytes for each")
    data = chunks[b"data"]
    values = read(data[: len(data) - len(data) % block])
    return torch.from_numpy(values.reshape(-1, channels).T.copy()), rate


def _chunks(content: bytes) -> dict[bytes, bytes]:
    """The first chunk of each name; the last one ends with the file whatever its size says."""
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= len(content):
        name, size = struct.unpack("<4sI", content[at : at + 8])
        streamed = name == b"data" and size in (0, STREAMED)
        end = len(content) if streamed else min(at + 8 + size, len(content))
        found.setdefault(name, content[at + 8 : end])
        at = end + size % 2 * (not streamed)
    return found


def _read_24(data: bytes) -> np.ndarray:
    parts = np.frombuffer(data, np.uint8).reshape(-1, 3)
    wide = np.zeros((len(parts), 4), np.uint8)
    wide[:, 1:] = parts  # the upper three bytes of 32 bits, so the sign is in place
    return (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)


READERS: dict[tuple[int, int], Callable[[bytes], np.ndarray]] = {
    (PCM, 8): lambda data: (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128,
    (PCM, 16): lambda data: np.frombuffer(data, "<i2").astype(np.float32) / 2**15,
    (PCM, 24): _read_24,
    (PCM, 32): lambda data: (np.frombuffer(data, "<i4") / 2**31).astype(np.float32),
    (FLOAT, 32): lambda data: np.frombuffer(data, "<f4").astype(np.float32),
    (FLOAT, 64): lambda data: np.frombuffer(data, "<f8").astype(np.float32),
}
"""(format, bits) -> the samples of the data chunk"""
