"""Notices to the user: each text is logged at most once per process, by the logger `lamina`.

Expected facts (plain passes, since the model is on a CPU) are logged at level INFO, which Python does not show by
default; `model.explain()` and `Result.how` tell them too. A fast path that should have worked and failed is a WARNING.
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
