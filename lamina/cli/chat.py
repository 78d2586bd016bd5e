"""`lamina chat PATH [QUESTION]`: a conversation in which nothing is read twice.

An answer that is interrupted (Ctrl-C) stays as far as it came, and the conversation goes on.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lamina.cli.common import (
    Activations,
    Device,
    DType,
    Path,
    Pickle,
    Revision,
    Sample,
    Seed,
    Temperature,
    Tokens,
    TopK,
    TopP,
    Weights,
    choosing,
    print_answer,
)


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
    revision: Revision = None,
    pickle: Pickle = False,
    weights: Weights = None,
    activations: Activations = None,
) -> None:
    from lamina.generation import Chat
    from lamina.loading import load

    model = load(path, dtype, device, revision=revision, pickle=pickle, weights=weights, activations=activations)
    talk = Chat(model, max_new_tokens=max_new_tokens, **choosing(sample, temperature, top_k, top_p, seed))
    if question is not None:
        stream = talk.stream(question)
        if not print_answer(stream, before=f"> {question}\n\n"):
            raise typer.Exit(130)
        typer.echo(f"\n{stream.result.timing.tokens_per_second:.1f} tokens/s\n\n{talk.cache}", err=True)
        return
    while (asked := ask()) is not None:
        if asked.strip():
            print_answer(talk.stream(asked))


def ask() -> str | None:
    """A line that the user types; None when there are no more."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input("\n> ")  # with the prompt, so that line editing keeps clear of it
        typer.echo("\n> ", nl=False, err=True)
        return input()
    except (EOFError, KeyboardInterrupt):
        return None
