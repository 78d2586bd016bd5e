"""What the commands share: arguments, `--version`, and errors told in one line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from lamina.errors import CapacityError, LaminaError

if TYPE_CHECKING:
    from lamina.generation.stream import Stream

Path = Annotated[
    str,
    typer.Argument(help="A checkpoint folder, a .gguf file, a Hub id, or a known name: smollm2, whisper-tiny.en."),
]
DType = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own when not given.")]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the first GPU when not given, else the CPU.")]
Revision = Annotated[str | None, typer.Option(help="A branch, tag or commit, of a Hub id; main when not given.")]
Pickle = Annotated[bool, typer.Option("--pickle", help="Read pytorch_model.bin where there are no safetensors.")]
Weights = Annotated[
    str | None,
    typer.Option(help="How matrices are stored: packed (as in the checkpoint, the default), plain, int8, int4 or fp8."),
]
Activations = Annotated[
    str | None,
    typer.Option(help="Of native CPU products with packed integer weights: int8 (the default) or float32."),
]
Tokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="How many tokens to make at most.")]


Sample = Annotated[
    bool | None,
    typer.Option("--sample/--greedy", help="Draw tokens or take the best; the checkpoint's way by default."),
]
Temperature = Annotated[float | None, typer.Option(help="For draws: below 1 sharper, above 1 flatter, 0 greedy.")]
TopK = Annotated[int | None, typer.Option(help="Draw among this many best tokens.")]
TopP = Annotated[float | None, typer.Option(help="Draw among the best tokens that together have this probability.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")]


def choosing(
    sample: bool | None, temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> dict[str, Any]:
    """The settings that were given; a limit on draws asks for draws, a temperature of 0 for the best token.

    >>> choosing(None, 0.7, None, None, 1)
    {'do_sample': True, 'temperature': 0.7, 'seed': 1}
    >>> choosing(None, 0.0, 50, None, None)
    {'do_sample': False}
    """
    if temperature == 0:  # the limit of ever colder draws, among however many tokens
        sample, temperature, top_k, top_p = False, None, None, None
    if sample is None and (temperature, top_k, top_p) != (None, None, None):
        sample = True
    given = dict(do_sample=sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return {name: value for name, value in given.items() if value is not None}


def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """What `lamina` itself takes, without a command."""
    if version:
        import lamina

        typer.echo(f"lamina {lamina.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


class OneLineErrors(TyperGroup):
    """Errors that are raised on purpose are one line on stderr. The exit code is 2 for what was asked for (options,
    paths, settings) and 1 for what came up on the way; 130 after Ctrl-C. Other errors keep their traceback."""

    def main(self, args: Any = None, *, standalone_mode: bool = True, **more: Any) -> Any:  # type: ignore[override]
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **more)
        try:
            code = super().main(args, standalone_mode=False, **more)
        except typer.Abort:
            code = 1
        except Exception as error:
            found = one_line(error)
            if found is None:
                raise
            text, code = found
            typer.echo(f"lamina: {text}", err=True)
        sys.exit(code)


def one_line(error: Exception) -> tuple[str, int] | None:
    """How an error is told, and the exit code; None for one that nobody raised on purpose."""
    if callable(message := getattr(error, "format_message", None)):  # Typer's own; where it comes from has moved
        context = getattr(error, "ctx", None)
        return f"{flat(message()).rstrip('.')}; see {context.command_path if context else 'lamina'} --help", 2
    if isinstance(error, LaminaError | OSError):
        return flat(str(error)), 1 if isinstance(error, CapacityError) else 2
    return None


def flat(text: str) -> str:
    return " ".join(text.split())


def print_answer(stream: Stream[Any], before: str = "") -> bool:
    """Prints the text of a stream to stdout as it comes; False where Ctrl-C ended it.

    before   goes to stderr when the first token is there, so that an error in what was asked for is told alone
    """
    try:
        for event in stream:
            typer.echo(before, nl=False, err=True)
            before = ""
            typer.echo(event.text, nl=False)
    except KeyboardInterrupt:
        stream.cancel()
        typer.echo()
        return False
    typer.echo()
    return True
