"""Running out of memory during a call of `generate`: a pool has no free page, or a fixed capacity is reached.

`generate` raises an error that says how far it got. `error.result` is a Result with the tokens that the cache holds; it
can be continued. A token that was chosen (and perhaps streamed) but could not be fed is not part of it.

    try:
        result = model.generate(prompts, 500, cache=cache)
    except lamina.PagesError as error:
        other.release()
        rest = model.generate(None, 500, cache=error.result.cache)
"""

from __future__ import annotations

from collections.abc import Sequence

from lamina.errors import CapacityError, PagesError
from lamina.generation.run import Run, StrategyOutput
from lamina.generation.stopping import Reason


def reason_of(error: CapacityError) -> Reason:
    """The reason of rows that end by this error."""
    return "pages" if isinstance(error, PagesError) else "capacity"


def output_so_far(run: Run, error: CapacityError) -> StrategyOutput:
    """The new tokens that the run's cache holds after a strategy raised. Rows that had ended keep their reasons."""
    run.cache._abort_open_pass()
    tokens = [row[start:] for row, start in zip(run.cache.tokens, run.prompt_lengths, strict=True)]
    for row, (new, state) in enumerate(zip(tokens, run.stopping.rows, strict=True)):
        for token in new[len(state.tokens) :]:  # captured steps fed them, and the host has not read them yet
            run.stopping.put(row, token)
        if len(new) < len(state.tokens):
            state.shorten(len(new))
    if run.recorder is not None:
        run.recorder.shorten([len(new) for new in tokens])
    reasons = [state.reason or reason_of(error) for state in run.stopping.rows]
    return StrategyOutput(tokens, list(reasons), run.cache, "stopped in the middle: there was no room")


def explain_error(error: CapacityError, new: int | None, lengths: Sequence[int]) -> CapacityError:
    """The error for the caller of `generate`: of the same class, and its text says how far the call got.

    new       new tokens of all rows; None if prefill did not finish
    lengths   tokens that the rows hold now
    """
    lack = str(error).replace("Nothing was changed: ", "To go on: ")  # true of the pass that failed, not of the call
    when = "for the prompts" if new is None else f"after {new} new token{'s' * (new != 1)}"
    has = "" if new is None else "error.result has the new ones, and "
    return type(error)(
        f"There was no room {when}: {lack} The rows hold {list(lengths)} tokens now: {has}error.result.cache can be "
        "continued."
    )
