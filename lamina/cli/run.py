"""`lamina run FILE TEXT`: continues a text with an exported program, without Lamina's model code."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from lamina.cli.common import Seed, Tokens


def run(
    file: Annotated[str, typer.Argument(help="What `lamina export` wrote.")],
    text: Annotated[str, typer.Argument(help="The text to continue, or what the user says with --chat.")],
    max_new_tokens: Tokens = 100,
    chat: Annotated[bool, typer.Option("--chat", help="Put the text into the model's chat template.")] = False,
    temperature: Annotated[float, typer.Option(help="0: the most likely token; above, draws.")] = 0.0,
    seed: Seed = None,
) -> None:
    from lamina.errors import InputError
    from lamina.exporting.program import Program

    program = Program.load(file)
    if program.tokenizer is None:
        raise InputError(f"{file} has no tokenizer: use lamina.Program.load in Python, with ids")
    tokenizer = program.tokenizer
    prompt = tokenizer.chat_ids([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    stream, times = tokenizer.stream(), [time.perf_counter()]

    def show(row: int, token: int) -> None:
        if len(times) == 1 and not chat:
            typer.echo(text, nl=False, err=True)
        times.append(time.perf_counter())
        if token not in program.manifest.eos_ids:
            typer.echo(stream.put(token), nl=False)

    program.generate([prompt], max_new_tokens, temperature=temperature, seed=seed or 0, on_token=show)
    typer.echo(stream.end())
    if len(times) > 2:
        typer.echo(f"{(len(times) - 2) / (times[-1] - times[1]):.1f} tokens/s", err=True)
