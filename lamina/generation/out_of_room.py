"""Running out of room in the middle of a call: no page of a pool is free, or a fixed capacity is reached.

The error that leaves `generate` says how far it got and carries a Result (`error.result`) with the tokens that the
cache holds, which can be continued. A token that was chosen, and perhaps streamed, but could not be fed is not there.

    try:
        result = model.generate(prompts, 500, cache=cache)
    except lamina.PagesError as error:
        other.release()
        rest = model.generate(None, 500, cache=error.result.cache)
"""

from __future__ import annotations

from collections.abc import Sequence

from lamina.errors import CapacityError, PagesError
from lamina.generation.run import Made, Run
from lamina.generation.stopping import Reason


def reason_of(error: CapacityError) -> Reason:
    """Why rows end that this error cuts."""
    return "pages" if isinstance(error, PagesError) else "capacity"


def cut_short(run: Run, error: CapacityError) -> Made:
    """What the run's cache holds of new tokens, after a strategy raised. Rows that had ended keep their reasons."""
    run.cache._abort_open_pass()
    tokens = [row[start:] for row, start in zip(run.cache.tokens, run.prompts, strict=True)]
    for row, (new, state) in enumerate(zip(tokens, run.stopping.rows, strict=True)):
        for token in new[len(state.tokens) :]:  # by captured steps, which the host had not looked at yet
            run.stopping.put(row, token)
        if len(new) < len(state.tokens):
            state.shorten(len(new))
    if run.kept is not None:
        run.kept.shorten([len(new) for new in tokens])
    reasons = [state.reason or reason_of(error) for state in run.stopping.rows]
    return Made(tokens, list(reasons), run.cache, "stopped in the middle: there was no room")


def explained(error: CapacityError, made: int | None, lengths: Sequence[int]) -> CapacityError:
    """The error that the caller gets: of the same kind, with what happened.

    made      how many new tokens there are; None where prompts were not read to their end
    lengths   what the rows hold now
    """
    lack = str(error).replace("Nothing was changed: ", "To go on: ")  # true of the pass that failed, not of the call
    when = "for the prompts" if made is None else f"after {made} new token{'s' * (made != 1)}"
    has = "" if made is None else "error.result has the new ones, and "
    return type(error)(
        f"There was no room {when}: {lack} The rows hold {list(lengths)} tokens now: {has}error.result.cache can be "
        "continued."
    )
