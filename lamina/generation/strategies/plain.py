"""The plain strategy: greedy or sampled decoding, one forward pass per token over the rows that still go on.

It works for every model, device and setting, and is the reference for the captured strategy (captured.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.generation.run import Run, StrategyOutput
from lamina.notices import notice


@torch.no_grad()
def decode_plain(
    run: Run, reason: str | None = None, *, unexpected: bool = False, first: Tensor | None = None
) -> StrategyOutput:
    """Continues every row until it ends.

    reason       why no captured step is used: logged as a notice, and part of `how`
    unexpected   True if a captured step should have worked: the notice is then a warning
    first        [B] the first new tokens, if they were chosen and passed to `stopping` and `on_token` already
    """
    if reason is not None:
        notice(f"decoding by plain passes, since {reason}", unexpected)
    tokens: list[list[int]] = [[] for _ in range(run.rows)]
    reasons = [""] * run.rows
    live, logits = list(range(run.rows)), run.logits
    row_ids = torch.tensor(run.row_ids, device=logits.device)
    if first is not None:
        tokens = [[token] for token in first.tolist()]
        reasons = [ended or "" for ended in run.stopping.reasons]
        live = [row for row, ended in enumerate(reasons) if not ended]
        logits = run.feed(first, range(run.rows))[live]
    while live:
        history = run.history(live)
        guided = logits if run.guide is None else run.guide.apply(logits, live)
        scores = run.chooser.scores(guided, history)
        chosen = run.chooser.choose(scores, row_ids[live], history.lengths)
        going = run.add_tokens(live, run.to_host(chosen, scores, live), tokens, reasons)
        if run.recorder is not None:
            run.recorder.add(live, logits, scores, chosen)
        logits = run.feed(chosen, live)[going]
        live = [live[at] for at in going]
        if run.guide is not None and live:
            run.guide.feed(chosen[going], live)
    return StrategyOutput(
        tokens, reasons, run.cache, "plain passes" if reason is None else f"plain passes, since {reason}"
    )
