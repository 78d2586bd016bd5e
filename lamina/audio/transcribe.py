"""`transcribe`: from recordings to text, in windows of 30 seconds, as section 3.8 of the Whisper paper describes it.

waveform     file or array -> samples at 16 kHz                                  wave.py, resampler.py
features     samples -> log-mel spectrogram                                      spectrogram.py
window       the next 30 s of each recording -> encoder -> source
decode       `model.generate` over the source, again at a higher temperature where the result looks wrong
segments     timestamps mark segments, and say where the next window begins      timestamps.py

Recordings are rows of one batch; each moves on by itself, and none depends on the others.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lamina.audio.spectrogram import HOP, RATE, check_preprocessor, log_mel
from lamina.audio.speech_ids import SpeechIds
from lamina.audio.timestamps import Span, TimestampRules, spans_of
from lamina.audio.transcription import Segment, Transcription
from lamina.audio.wave import waveform
from lamina.cache.layers.cross import Source
from lamina.errors import InputError
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
    _features: Tensor | None = None

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
        if self._features is None:
            length = self.window * HOP if self.fits else None
            self._features = log_mel(self.samples.to(device), self.mels, length)
        part = self._features[:, self.seek : self.seek + self.window]
        return torch.nn.functional.pad(part, (0, self.window - part.shape[1]))


@torch.no_grad()
def transcribe(
    model: Whisper,
    audio: Any,
    rate: int | Sequence[int] | None = None,
    *,
    language: str | Sequence[str] | None = None,
    task: str | None = None,
    timestamps: bool | str = False,
    prompt: str | Sequence[int] | None = None,
    condition_on_prev_tokens: bool | None = None,
    temperature: float | Sequence[float] = 0.0,
    compression_ratio_threshold: float | None = None,
    logprob_threshold: float | None = None,
    no_speech_threshold: float | None = None,
    rows: int = 16,
    **settings: Any,
) -> Transcription | list[Transcription]:
    """The text of a recording; of each, if a list is given.

    audio        a path of a WAV file, or an array or tensor with its `rate` (`lamina.audio.waveform`); or a list
    rate         samples per second of arrays: one for all, or one for each
    language     "en", "english" … for all recordings, or a list; None: detected from the first window of each. For
                 multilingual models
    task         "transcribe", or "translate" into English
    timestamps   True or "segment": segments with times. Recordings that are longer than a window always have them
    prompt       text (or ids) that comes before: names, spelling, style
    condition_on_prev_tokens  the text so far is each window's prompt; without it, `prompt` is
    temperature  0 takes the best token. Several, such as (0, 0.2, 0.4, 0.6, 0.8, 1): a window is decoded again with the
                 next one if a threshold says so; sampled above 0
    compression_ratio_threshold  decode again if the ids compress better than this (1.35): a loop
    logprob_threshold            decode again if the mean log-probability is below this (-1)
    no_speech_threshold          skip a window if <|nospeech|> is likelier than this (0.6) and the mean log-probability
                                 is below logprob_threshold
    rows         recordings that are decoded together
    settings     of `generate`: num_beams, max_new_tokens, seed …

    As in transformers, thresholds and conditioning are off unless given here or in generation_config.json.

    >>> print(model.transcribe("speech.wav").text)                               # doctest: +SKIP
    >>> model.transcribe([a, b], rate=44100, language="fr", timestamps=True)     # doctest: +SKIP
    """
    check_preprocessor(model.preprocessor_config, model.mels)
    recordings = [Recording(samples, 2 * model.max_source_positions, model.mels) for samples in _waveforms(audio, rate)]
    if timestamps not in (False, True, "segment"):
        raise InputError(f'timestamps={timestamps!r}: it must be False, True or "segment"')
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise InputError(f"rows={rows!r}: it must be a whole number, at least 1")
    says, ids = model.generation_defaults, SpeechIds.of(model)
    ids.check_task(task)
    for recording, code in zip(recordings, _codes(ids, language, len(recordings)), strict=True):
        recording.code = code
    limits = Thresholds(
        *(
            says.get(name) if given is None else given
            for name, given in (
                ("compression_ratio_threshold", compression_ratio_threshold),
                ("logprob_threshold", logprob_threshold),
                ("no_speech_threshold", no_speech_threshold),
            )
        )
    )
    if limits.no_speech is not None and limits.logprob is None:
        raise InputError("no_speech_threshold skips windows of low probability: give logprob_threshold too, such as -1")
    if not says:  # as transformers: older checkpoints have these in config.json
        old = {name: model.config.get(name) for name in ("suppress_tokens", "begin_suppress_tokens")}
        settings = {name: value for name, value in old.items() if value} | settings
    condition = says.get("condition_on_prev_tokens") if condition_on_prev_tokens is None else condition_on_prev_tokens
    windows = Windows(
        model, ids, task, bool(timestamps), _prompt_ids(model, ids, prompt), bool(condition),
        _temperatures(temperature), limits, settings,
    )  # fmt: skip
    for recording in recordings:
        recording.before, recording.conditioned = list(windows.prompt), bool(condition)
    while waiting := [one for one in recordings if one.left > 0]:
        windows.next(waiting[:rows])
    found = [windows.result(one) for one in recordings]
    return found if isinstance(audio, list | tuple) else found[0]


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
        if attempt.no_speech is None or attempt.logprob is None:
            return False
        return attempt.logprob < self.limits.logprob and attempt.no_speech > self.limits.no_speech  # type: ignore[operator]

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


def _waveforms(audio: Any, rate: Any) -> list[Tensor]:
    if not isinstance(audio, list | tuple):
        return [waveform(audio, rate)]
    if not audio:
        raise InputError("there are no recordings: give at least one")
    if isinstance(audio[0], float | int | np.number):
        raise InputError("a list is several recordings: give the samples of one as an array or a tensor")
    rates = list(rate) if isinstance(rate, list | tuple) else [rate] * len(audio)
    if len(rates) != len(audio):
        raise InputError(f"{len(rates)} rates were given for {len(audio)} recordings: give one, or one for each")
    return [
        waveform(one, None if isinstance(one, str | os.PathLike) else own)
        for one, own in zip(audio, rates, strict=True)
    ]


def _codes(ids: SpeechIds, language: Any, count: int) -> list[str | None]:
    """The code of each recording's language; None if it is to be detected."""
    if language is None:
        return [ids.code(ids.language) if ids.language is not None and ids.languages else None] * count
    several = list(language) if isinstance(language, list | tuple) else [language] * count
    if len(several) != count:
        raise InputError(f"{len(several)} languages were given for {count} recordings: give one, or one for each")
    return [ids.code(one) for one in several]


def _prompt_ids(model: Whisper, ids: SpeechIds, prompt: str | Sequence[int] | None) -> list[int]:
    if prompt is None:
        return []
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer: give the prompt as ids")
        found = model.tokenizer.encode(" " + prompt.strip(), special=False)
    else:
        found = [int(id) for id in prompt]
    return found[1:] if found[:1] == [ids.previous] else found


def _temperatures(given: Any) -> tuple[float, ...]:
    several = tuple(given) if isinstance(given, list | tuple) else (0.0 if given is None else given,)
    for one in several:
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one < math.inf:
            raise InputError(f"temperature={given!r}: it must be a number, at least 0, or several")
    if not several:
        raise InputError("temperature is empty: give at least one")
    return tuple(map(float, several))


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
