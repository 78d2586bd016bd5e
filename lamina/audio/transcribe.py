"""`transcribe`: from recordings to text, in windows of 30 seconds, as section 3.8 of the Whisper paper describes it.

waveform     file or array -> samples at 16 kHz                                  wave.py, resampler.py
features     samples -> log-mel spectrogram                                      spectrogram.py
window       the next 30 s of each recording -> encoder -> source               windows.py
decode       `model.generate` over the source, again where the result looks wrong
segments     timestamps mark segments, and say where the next window begins      timestamps.py

Recordings are rows of one batch; each moves on by itself, and none depends on the others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lamina.audio.spectrogram import check_preprocessor
from lamina.audio.speech_ids import SpeechIds
from lamina.audio.transcription import Transcription
from lamina.audio.wave import waveform
from lamina.audio.windows import Recording, Thresholds, Windows
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.models.whisper import Whisper

RESERVED = {
    "do_sample": "give temperature",
    "num_return_sequences": "each recording has one text",
    "stream": "texts are returned when they are whole",
    "use_cache": "windows are always decoded over a cache",
    **dict.fromkeys(
        ("prompts", "attention_mask", "inputs_embeds", "decoder_input_ids", "decoder_attention_mask", "cache", "whole",
         "prefixes", "row_ids"),
        "call model.encode and model.generate for that",
    ),
}  # fmt: skip
"""Parameters of `generate` that `transcribe` sets itself, and what to do instead."""


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
    for name in settings.keys() & RESERVED.keys():
        raise InputError(f"{name} is not a parameter of transcribe: {RESERVED[name]}")
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
