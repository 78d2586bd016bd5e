"""`lamina chat PATH [QUESTION]`: a conversation in which nothing is read twice.

An answer that is interrupted (Ctrl-C) stays as far as it came, and the conversation goes on.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lamina.cli.common import (
    Device,
    DType,
    Path,
    Sample,
    Seed,
    Temperature,
    Tokens,
    TopK,
    TopP,
    choosing,
    errors_in_one_line,
    open_model,
)
from lamina.generation.chat import Chat
from lamina.generation.result import Result


def chat(
    path: Path,
    question: Annotated[str | None, typer.Argument(help="Ask this and leave; talk when not given.")] = None,
    max_new_tokens: Tokens = 256,
    sample: Sample = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    dtype: DType = None,
    device: Device = None,
) -> None:
    model = open_model(path, dtype, device)
    with errors_in_one_line():
        talk = Chat(model, max_new_tokens=max_new_tokens, **choosing(sample, temperature, top_k, top_p, seed))
        if question is not None:
            typer.echo(f"> {question}\n")
            result = answer(talk, question)
            if result is not None:
                typer.echo(f"\n\n{result.timing.tokens_per_second:.1f} tokens/s\n\n{talk.cache}")
            return
        while True:
            try:
                asked = input("\n> ")
            except (EOFError, KeyboardInterrupt):
                return
            answer(talk, asked)


def answer(talk: Chat, question: str) -> Result | None:
    """Prints the model's answer as it comes; None where it was interrupted."""
    stream = talk.stream(question)
    try:
        for event in stream:
            typer.echo(event.text, nl=False)
    except KeyboardInterrupt:
        stream.cancel()
        return None
    return stream.result
