"""Resampling: another number of samples per second for the same waveform, by a windowed-sinc filter.

Output sample t is at the input time τ = t · rate / to. Its value is Σ x[n] · h(τ - n) over the input samples n near τ,
where h is a low-pass filter: a sinc with its zeros at multiples of 1 / cutoff, times a Kaiser window. The fraction of τ
repeats after `to / gcd` outputs, so there is one row of weights for each (polyphase).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from lamina.errors import InputError

ZEROS = 32  # zeros of the sinc on each side
ROLLOFF = 0.95  # cutoff as a share of the lower Nyquist frequency
BETA = 9.0  # of the Kaiser window: frequencies beyond the transition are damped by about 90 dB
AT_ONCE = 1 << 22  # products in memory at a time
HIGHEST_RATE = 1_000_000


def resample(samples: Tensor, rate: int, to: int) -> Tensor:
    """samples [N] at `rate` per second -> [ceil(N · to / rate)] at `to` per second, in float32.

    >>> resample(torch.ones(441), 44100, 16000).shape
    torch.Size([160])
    """
    for name, one in (("rate", rate), ("to", to)):
        if isinstance(one, bool) or not isinstance(one, int) or not 1 <= one <= HIGHEST_RATE:
            raise InputError(f"{name}={one!r}: it must be a whole number of samples per second, up to {HIGHEST_RATE:,}")
    if rate == to:
        return samples.float()
    common = math.gcd(rate, to)
    step, phases = rate // common, to // common
    weights = _weights(step, phases).to(samples.device)  # [phases, taps]
    taps = weights.shape[1]
    count = -(-len(samples) * phases // step)
    padded = torch.nn.functional.pad(samples.float(), (taps // 2 - 1, taps // 2 + step))
    windows = padded.unfold(0, taps, 1)  # [N + …, taps], a view; window n is centred between samples n and n + 1
    out = samples.new_empty(count, dtype=torch.float32)
    block = max(1, AT_ONCE // taps)
    for first in range(0, count, block):
        t = torch.arange(first, min(first + block, count), device=samples.device)
        out[first : first + block] = (windows[t * step // phases] * weights[t % phases]).sum(dim=1)
    return out


@lru_cache(maxsize=8)
def _weights(step: int, phases: int) -> Tensor:
    """The filter at each phase's distances to the samples around it. [phases, taps]"""
    cutoff = min(1.0, phases / step) * ROLLOFF  # as a share of the input's Nyquist frequency
    half = math.ceil(ZEROS / cutoff)
    fraction = (torch.arange(phases, dtype=torch.float64) * step % phases) / phases
    distance = fraction[:, None] - torch.arange(1 - half, half + 1, dtype=torch.float64)  # τ - n
    window = torch.special.i0(BETA * (1 - (distance / half).square()).clamp(min=0).sqrt())
    weights = torch.sinc(distance * cutoff) * torch.where(distance.abs() <= half, window, 0)
    return (weights / weights.sum(dim=1, keepdim=True)).float()  # a constant stays the same constant
