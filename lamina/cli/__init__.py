"""The command line: chat, generate, verify, inspect, plan, bench. Each command is a file of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer


def main() -> None:
    """Entry point of `lamina`."""
    commands()()


def commands() -> Typer:
    import typer

    from lamina.cli import bench, chat, generate, inspect, plan, verify

    app = typer.Typer(add_completion=False, no_args_is_help=True, help="Run language models that remember.")
    app.command("chat", help="Talk to a model; its memory stays from turn to turn.")(chat.chat)
    app.command("generate", help="Continue a text.")(generate.generate)
    app.command("verify", help="Prove that the cache changes nothing on this model.")(verify.verify)
    app.command("inspect", help="Show what each layer of a model remembers.")(inspect.inspect)
    app.command("plan", help="What a model and its cache take in memory, and what fits; needs no weights.")(plan.plan)
    app.command("bench", help="How near decoding comes to the limit of memory, beside its peers.")(bench.bench)
    return app
