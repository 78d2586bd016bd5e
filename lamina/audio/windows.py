"""`Windows`: transcribes recordings, one window of each at a time.

A window is encoded and decoded, again at a higher temperature where the result looks wrong; then its timestamps say
where the recording's next window begins.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.audio.spectrogram import HOP, RATE, log_mel
from lamina.audio.speech_ids import SpeechIds
from lamina.audio.timestamps import Span, TimestampRules, spans_of
from lamina.audio.transcription import Segment, Transcription
from lamina.cache.layers.cross import Source
from lamina.generation.prompt import from_rows

if TYPE_CHECKING:
    from lamina.models.whisper import Whisper

COLD = 0.5  # text that was drawn at this temperature or above is no prompt for the next window


@dataclass(frozen=True)
class Thresholds:
    """When a window is decoded again at the next temperature, or skipped. None: never."""

    compression_ratio: float | None = None
    logprob: float | None = None
    no_speech: float | None = None


@dataclass(frozen=True)
class Attempt:
    """One decoding of one window."""

    tokens: list[int]
    """New ids, the end token included."""
    temperature: float
    logprob: float | None
    no_speech: float | None


@dataclass
class Recording:
    """One recording on its way: `seek` frames of `frames` are done."""

    samples: Tensor
    window: int
    """Frames of a window."""
    mels: int
    code: str | None = None
    begin: list[int] = field(default_factory=list)
    seek: int = 0
    segments: list[Segment] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """Text so far, as the next window's prompt."""
    conditioned: bool = False
    spectrogram: Tensor | None = None
    """[mels, frames], while there are windows left."""

    @property
    def frames(self) -> int:
        whole, rest = divmod(len(self.samples), HOP)
        return whole + (rest > 0 and self.fits)

    @property
    def fits(self) -> bool:
        """Whether one window holds all of it."""
        return len(self.samples) <= self.window * HOP

    @property
    def left(self) -> int:
        return min(self.frames - self.seek, self.window)

    def features(self, device: torch.device) -> Tensor:
        """The next window, [mels, window]. A recording that fits a window is padded with silence, as in training; the
        last window of a longer one with zeros."""
        if self.spectrogram is None:
            length = self.window * HOP if self.fits else None
            self.spectrogram = log_mel(self.samples.to(device), self.mels, length)
        part = self.spectrogram[:, self.seek : self.seek + self.window]
        return torch.nn.functional.pad(part, (0, self.window - part.shape[1]))


@dataclass(frozen=True)
class Windows:
    """Transcribes recordings, one window of each at a time."""

    model: Whisper
    ids: SpeechIds
    task: str | None
    timestamps: bool
    prompt: list[int]
    condition: bool
    temperatures: tuple[float, ...]
    limits: Thresholds
    settings: Mapping[str, Any]

    def next(self, recordings: list[Recording]) -> None:
        """Transcribes the next window of each."""
        for timed in (False, True):  # recordings with and without timestamps follow different rules
            some = [one for one in recordings if (self.timestamps or not one.fits) == timed]
            if some:
                self._next(some, timed)

    def _next(self, recordings: list[Recording], timed: bool) -> None:
        model = self.model
        source = model.encode(features=torch.stack([one.features(model.device) for one in recordings]))
        self._detect([(i, one) for i, one in enumerate(recordings) if self.ids.languages and one.code is None], source)
        for one in recordings:
            one.begin = self.ids.begin(one.code, self.task, timed)
        for one, attempt in zip(recordings, self._attempts(recordings, source, timed), strict=True):
            self._take(one, attempt, timed)
            if one.left <= 0:
                one.spectrogram = None

    def _detect(self, unknown: list[tuple[int, Recording]], source: Source) -> None:
        """Sets the language of recordings: the likeliest one after the start token."""
        if not unknown:
            return
        rows, codes = [i for i, _ in unknown], list(self.ids.languages)
        start = torch.full((len(rows), 1), self.ids.start)
        logits = self.model(start, source=source.select(rows), logits="last")
        assert logits is not None
        best = logits[:, list(self.ids.languages.values())].argmax(dim=-1).tolist()
        for (_, recording), index in zip(unknown, best, strict=True):
            recording.code = codes[index]

    def _attempts(self, recordings: list[Recording], source: Source, timed: bool) -> list[Attempt]:
        """Decodes each window, at rising temperatures until a result passes the thresholds."""
        found: dict[int, Attempt] = {}
        rows = list(range(len(recordings)))
        for temperature in self.temperatures:
            begun = [self._row(recordings[row]) for row in rows]
            found |= zip(rows, self._decode(begun, source.select(rows), temperature, timed), strict=True)
            rows = [row for row in rows if self._repeats(found[row])]
            if not rows:
                break
        return [found[row] for row in range(len(recordings))]

    def _row(self, recording: Recording) -> tuple[list[int], list[int]]:
        """What a decoder's row begins with: earlier text, and the ids from the start token on."""
        most = self.model.max_positions // 2 - 1
        text = recording.before[-most:] if recording.conditioned else self.prompt
        return [self.ids.known("previous", "<|startofprev|>"), *text] if text else [], recording.begin

    def _decode(
        self, begun: Sequence[tuple[list[int], list[int]]], source: Source, temperature: float, timed: bool
    ) -> list[Attempt]:
        model, settings = self.model, dict(self.settings)
        cache = model.new_cache(len(begun), source=source)
        prompts, silent = [[*before, *start] for before, start in begun], None
        if self.limits.no_speech is not None:  # its probability is read after the start token
            until = from_rows([[*before, start[0]] for before, start in begun])
            logits = model(until.ids, cache=cache, counts=until.counts, logits="last")
            assert logits is not None
            silent = logits.float().softmax(dim=-1)[:, self.ids.no_speech].tolist()
            prompts = [start[1:] for _, start in begun]
        room = model.max_positions - min(len(before) + len(start) for before, start in begun)
        if not {"max_new_tokens", "max_length"} & settings.keys():
            settings["max_new_tokens"] = min(room, model.generation_defaults.get("max_length") or room)
        if timed:
            rules = TimestampRules(self.ids.first_timestamp, self.ids.end, self.ids.latest_first)
            settings["logits_processor"] = [rules, *_listed(settings.get("logits_processor"))]
        if temperature > 0:
            settings |= {"do_sample": True, "temperature": temperature, "num_beams": 1}
        else:
            settings |= {"do_sample": False}
        scored = self.limits.logprob is not None
        by_beams = settings.get("num_beams", 1) > 1
        if scored and not by_beams:
            settings["output_scores"] = True
        result = model.generate(cache=cache, decoder_input_ids=prompts, **settings)
        logprobs: list[float | None] = [None] * len(begun)
        if scored and by_beams:
            logprobs = list(result.sequences_scores)
        elif scored:
            logprobs = [_mean(*one, temperature or 1.0) for one in zip(result.scores, result.tokens, strict=True)]
        return [
            Attempt(tokens, temperature, logprobs[row], None if silent is None else silent[row])
            for row, tokens in enumerate(result.tokens)
        ]

    def _silent(self, attempt: Attempt) -> bool:
        likely, silence = self.limits.logprob, self.limits.no_speech
        if attempt.no_speech is None or attempt.logprob is None or likely is None or silence is None:
            return False
        return attempt.logprob < likely and attempt.no_speech > silence

    def _repeats(self, attempt: Attempt) -> bool:
        """Whether a window is decoded again: its ids repeat themselves, or are unlikely."""
        if self._silent(attempt):
            return False
        limits, ratio = self.limits, compression_ratio(attempt.tokens, self.model.vocab)
        loops = limits.compression_ratio is not None and ratio > limits.compression_ratio
        return loops or (limits.logprob is not None and (attempt.logprob or 0.0) < limits.logprob)

    def _take(self, one: Recording, attempt: Attempt, timed: bool) -> None:
        """Adds the segments of a window, and moves on to where the next one begins."""
        one.conditioned = self.condition and attempt.temperature < COLD
        if self._silent(attempt):
            one.seek += one.left
            return
        tokens = attempt.tokens[:-1] if attempt.tokens[-1:] == [self.ids.end] else attempt.tokens
        offset = one.seek * HOP / RATE
        if timed:
            first = self.ids.first_timestamp
            spans, frames = spans_of(tokens, one.left, first)
        else:
            first = self.model.vocab if self.ids.no_timestamps is None else self.ids.first_timestamp
            spans, frames = [Span(0.0, len(one.samples) / RATE, tokens)], one.left
        for start, end, own in spans:
            text = self._text(own, first)
            one.segments.append(
                Segment(
                    offset + start, offset + end, text, own, attempt.temperature, attempt.logprob, attempt.no_speech
                )
            )
            pair = len(own) > 2 and own[-2] >= first  # the second of a pair begins the next segment
            one.before += own[:-1] if pair else own
        one.seek += frames or one.left

    def _text(self, tokens: Sequence[int], first: int) -> str:
        tokenizer = self.model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(id for id in tokens if id < first).strip()

    def result(self, one: Recording) -> Transcription:
        first = self.model.vocab if self.ids.no_timestamps is None else self.ids.first_timestamp
        text = self._text([id for segment in one.segments for id in segment.tokens], first)
        return Transcription(text, one.segments, one.code, len(one.samples) / RATE)


def compression_ratio(tokens: Sequence[int], vocab: int) -> float:
    """Bytes of the ids ÷ bytes of their zlib compression: high if they repeat themselves."""
    size = int(math.log2(vocab) / 8) + 1
    raw = b"".join(id.to_bytes(size, "little") for id in tokens)
    return len(raw) / len(zlib.compress(raw))


def _mean(scores: Tensor, tokens: Sequence[int], temperature: float) -> float:
    """The mean log-probability of tokens [n] by the scores [n, V], which were divided by the temperature."""
    logprobs = (scores.float() * temperature).log_softmax(dim=-1)
    return float(logprobs.gather(1, torch.tensor(tokens, device=scores.device)[:, None]).mean())


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
