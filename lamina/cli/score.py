"""`lamina score PATH --text TEXT …`: how likely a model finds given texts, on stdout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli.common import Device, DType, Path, Pickle, Revision

if TYPE_CHECKING:
    from lamina.generation.prefill.score import Score


def score(
    path: Path,
    text: Annotated[list[str] | None, typer.Option(help="A text to score; may be given several times.")] = None,
    file: Annotated[list[str] | None, typer.Option(help="A UTF-8 file to score as one text; may be repeated.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="A line for each token.")] = False,
    top: Annotated[int, typer.Option(help="With --tokens or --json: this many likeliest tokens beside each.")] = 0,
    prefill_chunk: Annotated[int | None, typer.Option(help="Tokens in one pass; what fits when not given.")] = None,
    dtype: DType = None,
    device: Device = None,
    revision: Revision = None,
    pickle: Pickle = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    from pathlib import Path as FilePath

    from lamina.errors import InputError
    from lamina.loading import load

    texts = [*(text or ()), *(FilePath(one).read_text(encoding="utf-8") for one in file or ())]
    if not texts:
        raise InputError("nothing to score: give --text or --file")
    model = load(path, dtype, device, revision=revision, pickle=pickle)
    found = model.score(texts, top=top, prefill_chunk=prefill_chunk)
    if as_json:
        typer.echo(json.dumps(as_dicts(texts, found), indent=2, ensure_ascii=False))
        return
    typer.echo(f"{'logprob':>12}  {'tokens':>7}  {'perplexity':>10}  text")
    for r, (one, total, wonder) in enumerate(zip(texts, found.sums, found.perplexities, strict=True)):
        if not found.tokens[r]:
            typer.echo(f"{'–':>12}  {0:>7}  {'–':>10}  {shown(one)}: the first token of a text has no score")
            continue
        typer.echo(f"{total:>12.4f}  {len(found.tokens[r]):>7}  {wonder:>10.4g}  {shown(one)}")
        if tokens:
            for line in token_lines(found, r):
                typer.echo(line)
    typer.echo(found.how, err=True)


def token_lines(found: Score, row: int) -> list[str]:
    """One line per token: log-probability, the token, and the likeliest tokens there."""
    assert found.tokenizer is not None
    decode, lines = found.tokenizer.decode, []
    for i, (token, own) in enumerate(zip(found.tokens[row], found.logprobs[row].tolist(), strict=True)):
        best = [f"{decode([other])!r} {share:.3f}" for other, share in (found.top[row][i] if found.top[row] else ())]
        lines.append(f"{own:>12.4f}  {decode([token])!r}" + (f"  likeliest {', '.join(best)}" if best else ""))
    return lines


def as_dicts(texts: list[str], found: Score) -> list[dict[str, object]]:
    return [
        {
            "text": text, "logprob": found.sums[r], "tokens": found.tokens[r],
            "perplexity": found.perplexities[r] if found.tokens[r] else None,  # of nothing: JSON has no nan
            "logprobs": found.logprobs[r].tolist(), "top": found.top[r],
        }
        for r, text in enumerate(texts)
    ]  # fmt: skip


def shown(text: str, most: int = 60) -> str:
    """The beginning of a text, on one line.

    >>> shown("The sky is blue.", 8)
    "'The sk…"
    """
    line = repr(text)
    return line if len(line) <= most else line[: most - 1] + "…"
