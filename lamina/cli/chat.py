"""`lamina chat PATH [QUESTION]`: a conversation in which nothing is read twice.

The cache stays from turn to turn. A turn feeds only what the template adds to what the cache already holds.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lamina.cache.cache import Cache
from lamina.cli.common import Device, DType, Path, Tokens, open_model
from lamina.generation.result import Result
from lamina.model import Model


def chat(
    path: Path,
    question: Annotated[str | None, typer.Argument(help="Ask this and leave; talk when not given.")] = None,
    max_new_tokens: Tokens = 256,
    dtype: DType = None,
    device: Device = None,
) -> None:
    model = open_model(path, dtype, device)
    if model.tokenizer is None:
        typer.echo("lamina: this checkpoint has no tokenizer, so there is nothing to chat with", err=True)
        raise typer.Exit(2)
    messages: list[dict[str, str]] = []
    cache: Cache | None = None
    while True:
        if question is None:
            try:
                asked = input("\n> ")
            except (EOFError, KeyboardInterrupt):
                return
        else:
            typer.echo(f"> {question}\n")
            asked = question
        messages.append({"role": "user", "content": asked})
        result = answer(model, messages, cache, max_new_tokens)
        cache = result.cache
        messages.append({"role": "assistant", "content": result.text[0]})
        if question is not None:
            typer.echo(f"\n\n{result.timing.tokens_per_second:.1f} tokens/s\n\n{cache}")
            return


def answer(model: Model, messages: list[dict[str, str]], cache: Cache | None, max_new_tokens: int) -> Result:
    """Streams the model's next message, feeding only what the cache does not hold yet."""
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(model.tokenizer.chat(messages), special=False)
    held = cache.tokens[0] if cache is not None else []
    if cache is None or held != ids[: len(held)] or len(held) >= len(ids):
        cache, held = model.new_cache(), []
    return model.generate(
        [ids[len(held) :]], max_new_tokens, cache=cache, stream=lambda row, token, piece: typer.echo(piece, nl=False)
    )
