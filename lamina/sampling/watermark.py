"""Green-list watermark: at every token a part of the vocabulary, the green list, gets a bonus.

The green list is a hash of the tokens before and a key. A detector that knows the key counts green tokens: unmarked
text has them at the rate of chance, marked text more often. The z-score is the excess in standard deviations. The lists
equal those of transformers for the same configuration, so each library detects the other's watermark. They come from
PyTorch's CPU generator, so they do not depend on the device.

    lefthash   the last token is the seed of the list
    selfhash   the candidate itself and the tokens before it are; only the 40 best candidates are examined
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling.history import History
from lamina.sampling.kinds import Custom
from lamina.sampling.setting import Setting, Stage

SCHEMES = ("lefthash", "selfhash")
TABLE = 1_000_003  # size of selfhash's lookup table
CANDIDATES = 40  # best ids that selfhash examines
MOST_BIAS = 1e9


@dataclass(frozen=True)
class Watermark:
    """Adds `bias` to the scores of green ids; the detector reads the same configuration. Reads the last tokens on the
    host, so the device waits for it at every token. Rows of fewer than `context_width` tokens are unchanged."""

    vocab: int
    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1
    needs_tokens: ClassVar[bool] = True
    excludes: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        if self.seeding_scheme not in SCHEMES:
            raise InputError(f"seeding_scheme must be one of {', '.join(SCHEMES)}, not {self.seeding_scheme!r}")
        _check("greenlist_ratio", self.greenlist_ratio, Real, 0, 1)
        _check("bias", self.bias, Real, -MOST_BIAS, MOST_BIAS)
        _check("hashing_key", self.hashing_key, Integral, 0, 2**63 - 1)
        _check("context_width", self.context_width, Integral, 1, 2**31 - 1)
        if self.greenlist_ratio in (0, 1):
            raise InputError(f"greenlist_ratio must be between 0 and 1, not {self.greenlist_ratio}")

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        if history.ids.shape[1] < self.context_width:
            return scores
        contexts = history.tail(self.context_width).tolist()
        best = scores.topk(min(CANDIDATES, scores.shape[-1])).indices.tolist() if self._own else [()] * len(scores)
        green = torch.zeros(scores.shape, dtype=torch.bool)
        for row, (context, candidates) in enumerate(zip(contexts, best, strict=True)):
            if min(context) < 0:
                continue
            if self._own:
                green[row, [id for id in candidates if self.is_green(context, id)]] = True
            else:
                green[row] = self.green(context)
        return torch.where(green.to(scores.device), scores + self.bias, scores)

    @property
    def _own(self) -> bool:
        """Whether the list depends on the candidate itself."""
        return self.seeding_scheme == "selfhash"

    def is_green(self, context: Sequence[int], id: int) -> bool:
        """Whether this id is green after a context."""
        return bool(self.green([*context, id] if self._own else context)[id])

    def green(self, context: Sequence[int]) -> Tensor:
        """The green list after these tokens; with selfhash the last of them is the candidate. [V] bool"""
        if self._own:
            numbers = _table(self.hashing_key)
            last, *before = (int(numbers[id % TABLE]) + 1 for id in reversed(context[-self.context_width :]))
            # the least of the products, as signed 64-bit integers that wrap around
            seed = min(_wrapped(self.hashing_key * number * last) for number in (last, *before))
        else:
            seed = self.hashing_key * context[-1]
        return _permuted(seed % (2**64 - 1), self.vocab, int(self.vocab * self.greenlist_ratio))


@dataclass(frozen=True)
class Detection:
    """The count of green tokens in one row."""

    scored: int
    """Tokens that were examined."""
    green: int
    """How many of them are green."""
    z: float
    """Standard deviations above the count expected by chance."""
    p: float
    """Probability of at least this z in unmarked text."""

    def found(self, least: float = 3.0) -> bool:
        """Whether the z-score exceeds `least`."""
        return self.z > least


def detect(rows: Sequence[Sequence[int]], watermark: Watermark, once: bool = False) -> list[Detection]:
    """Looks for a watermark in rows of new tokens, without prompt and bos.

    watermark  the configuration that `generate` was given: `watermark_of(config, vocab)`
    once       count equal tokens with equal context once, since repetitions are not independent samples

    >>> [round(found.z, 2) for found in detect([[1, 2, 3, 4, 5, 6]], Watermark(vocab=50))]
    [0.77]
    """
    n = watermark.context_width + (watermark.seeding_scheme == "lefthash")
    found = []
    for r, row in enumerate(rows):
        if not all(isinstance(id, Integral) and 0 <= int(id) < watermark.vocab for id in row):
            raise InputError(f"row {r} must be a list of ids from 0 to {watermark.vocab - 1}, not {row!r}")
        if len(row) <= watermark.context_width:
            raise InputError(f"row {r} has {len(row)} tokens; the watermark needs more than {watermark.context_width}")
        grams = Counter(tuple(row[at : at + n]) for at in range(len(row) - n + 1))
        if once:
            grams = Counter(dict.fromkeys(grams, 1))
        scored = grams.total()
        green = sum(times for gram, times in grams.items() if watermark.is_green(gram[:-1], gram[-1]))
        ratio = watermark.greenlist_ratio
        z = (green - ratio * scored) / math.sqrt(scored * ratio * (1 - ratio))
        found.append(Detection(scored, green, z, math.erfc(z / math.sqrt(2)) / 2))
    return found


def watermark_of(config: Any, vocab: int) -> Watermark:
    """The processor for a mapping, or an object with `to_dict` such as transformers' WatermarkingConfig."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise InputError(f"watermarking_config must be a mapping, as {{'bias': 2.0}}, not {config!r}")
    given = dict(config if isinstance(config, Mapping) else config.to_dict())
    known = [field.name for field in fields(Watermark)][1:]
    for name in given:
        if name not in known:
            raise InputError(f"watermarking_config has {name!r}; a green-list watermark has {', '.join(known)}")
    return Watermark(vocab, **given)


def _check(name: str, value: Any, kind: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        whole = "whole " if kind is Integral else ""
        raise InputError(f"watermarking_config: {name} must be a {whole}number from {low:g} to {high:g}, not {value!r}")


@lru_cache(maxsize=256)
def _permuted(seed: int, vocab: int, size: int) -> Tensor:
    """`size` random ids as a mask. [V] bool"""
    chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:size]
    return torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)


@lru_cache(maxsize=4)
def _table(key: int) -> Tensor:
    return torch.randperm(TABLE, generator=torch.Generator().manual_seed(key))


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


SETTINGS = (
    Setting(
        "watermarking_config", Custom(), default=None, stage=Stage.FINAL,
        meaning="Green-list watermark: a mapping of greenlist_ratio, bias, hashing_key, seeding_scheme, context_width.",
        processor=lambda config, context: watermark_of(config, context.vocab),
    ),
)  # fmt: skip
