"""The command line: chat, generate, score, transcribe, verify, inspect, plan, bench, quantize, export, run, build. Each
is a file of this package.

Answers go to stdout, all else to stderr. Nothing here imports PyTorch before a command needs it, so that `--help` and a
mistyped option are answered at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer


def main() -> None:
    """Entry point of `lamina`."""
    commands()(prog_name="lamina")


def commands() -> Typer:
    import typer

    from lamina.cli import bench, build, chat, export, generate, inspect, plan, quantize, run, score, transcribe, verify
    from lamina.cli.common import OneLineErrors, options

    app = typer.Typer(cls=OneLineErrors, add_completion=False, help="Run language models that remember.")
    app.callback(invoke_without_command=True)(options)
    app.command("chat", help="Talk to a model; its memory stays from turn to turn.")(chat.chat)
    app.command("generate", help="Continue a text.")(generate.generate)
    app.command("score", help="How likely a model finds given texts: log-probabilities and perplexity.")(score.score)
    app.command("transcribe", help="Write down what is said in recordings.")(transcribe.transcribe)
    app.command("verify", help="Prove that the cache changes nothing on this model.")(verify.verify)
    app.command("inspect", help="What a checkpoint is: family, layer kinds, sizes, and what of it is not used.")(
        inspect.inspect
    )
    app.command("plan", help="What a model and its cache take in memory, and what fits; needs no weights.")(plan.plan)
    app.command("bench", help="How near decoding comes to the limit of memory, beside its peers.")(bench.bench)
    app.command("quantize", help="Write a checkpoint with weights in fewer bits, and say what that changes.")(
        quantize.quantize
    )
    app.command("export", help="Write a model as a program that runs without its model code.")(export.export)
    app.command("run", help="Continue a text with an exported program.")(run.run)
    app.command("build", help="Compile the native CPU kernels now, not at the first use.")(build.build)
    return app
