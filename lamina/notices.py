"""Things a user may want to know once: each sentence is logged at most once in a process, by the logger `lamina`.

What is expected (plain passes, since the model is on a CPU) is logged at level INFO, which Python does not show unless
asked to; `model.explain()` and `Result.how` say it too. A fast path that should have worked and did not is a WARNING.
"""

from __future__ import annotations

import logging
from functools import cache

log = logging.getLogger("lamina")


@cache
def notice(text: str, unexpected: bool = False) -> None:
    """
    >>> notice("decoding by plain passes, since its capture failed", unexpected=True)      # doctest: +SKIP
    lamina: decoding by plain passes, since its capture failed
    """
    log.log(logging.WARNING if unexpected else logging.INFO, "lamina: %s", text)
