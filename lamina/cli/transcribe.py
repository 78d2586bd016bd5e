"""`lamina transcribe PATH AUDIO…`: the text of recordings on stdout, a line each"""

from __future__ import annotations

from typing import Annotated

import typer

from lamina.cli.common import Device, DType, Path


def transcribe(
    path: Path,
    audio: Annotated[list[str], typer.Argument(help="WAV files.")],
    language: Annotated[str | None, typer.Option(help="Such as en or english; detected when not given.")] = None,
    task: Annotated[str | None, typer.Option(help="transcribe, or translate into English.")] = None,
    timestamps: Annotated[bool, typer.Option(help="A line for each segment, with its times.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Text that comes before: names, spelling, style.")] = None,
    dtype: DType = None,
    device: Device = None,
) -> None:
    from lamina.errors import InputError
    from lamina.loading import load
    from lamina.models.whisper import Whisper

    model = load(path, dtype, device)
    if not isinstance(model, Whisper):
        raise InputError(f"{path} is a {type(model).__name__}, which reads text: transcribe needs a Whisper model")
    made = model.transcribe(audio, language=language, task=task, timestamps=timestamps, prompt=prompt)
    assert isinstance(made, list)
    for file, one in zip(audio, made, strict=True):
        name = f"{file}: " if len(audio) > 1 else ""
        if not timestamps:
            typer.echo(f"{name}{one.text}")
        for segment in one.segments if timestamps else ():
            typer.echo(f"{name}{segment.start:8.2f} {segment.end:8.2f}  {segment.text}")
