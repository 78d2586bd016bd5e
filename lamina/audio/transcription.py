"""`Transcription`: what `transcribe` returns for one recording."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """A part of a recording that was transcribed together, from `start` to `end` seconds."""

    start: float
    end: float
    text: str
    tokens: list[int] = field(default_factory=list, repr=False)
    """Its ids, timestamps included."""
    temperature: float = field(default=0.0, repr=False)
    """At which its window was decoded; above 0 after a fallback."""
    logprob: float | None = field(default=None, repr=False)
    """Mean log-probability of the tokens of its window; with logprob_threshold."""
    no_speech: float | None = field(default=None, repr=False)
    """Probability that its window has no speech; with no_speech_threshold."""


@dataclass(frozen=True)
class Transcription:
    """The text of one recording.

    >>> Transcription("Hello.", [Segment(0.0, 1.2, "Hello.")], "en", 1.2)
    Transcription(text='Hello.', segments=[Segment(start=0.0, end=1.2, text='Hello.')], language='en', duration=1.2)
    """

    text: str
    """Empty if the checkpoint has no tokenizer; `tokens` are there."""
    segments: list[Segment]
    language: str | None
    """The code of the language, given or detected; None for a model of one language that does not name it."""
    duration: float
    """Seconds of the recording."""

    @property
    def tokens(self) -> list[int]:
        """The ids of all segments."""
        return [id for segment in self.segments for id in segment.tokens]
