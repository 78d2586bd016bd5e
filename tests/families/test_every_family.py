"""Every family that is not in `CORE` gives transformers' logits and greedy tokens, however the rows are fed.

The truth is always transformers' uncached pass over one row (see harness.py). One test per case, so that each model is
made once.
"""

from __future__ import annotations

import random

import pytest
import torch

from lamina.generation.prompt import from_padded
from tests.families.cases import OTHER_FIRST, OTHERS
from tests.families.harness import (
    TOLERANCE,
    pair,
    random_cuts,
    random_ids,
    relative,
    run_in_pieces,
    run_ragged,
    truth,
    verified,
)  # fmt: skip

LENGTH = 40  # windows and chunks of the cases are at most 8 to 13: three times that and more


@pytest.mark.parametrize(("family", "name"), OTHERS, ids=[f"{f}-{n}" for f, n in OTHERS])
def test_logits_and_greedy_tokens_are_those_of_transformers(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    length = min(LENGTH, ours.context or LENGTH)
    rows = [random_ids(1, n, ours.vocab, seed=r)[0] for r, n in enumerate((length, length // 2, 1))]
    expected = [truth(theirs, row[None])[0] for row in rows]

    assert relative(ours(rows[0][None])[0], expected[0]) < TOLERANCE, "one pass"
    for seed in range(2):
        rng = random.Random(seed)
        cache = ours.new_cache(rows=1, capacity=[None, length][seed], slack=[0, 3][seed])
        logits = run_in_pieces(ours, rows[0][None], cache, random_cuts(length, rng))
        assert relative(logits[0], expected[0]) < TOLERANCE, f"in pieces, seed {seed}"
        cache = ours.new_cache(rows=3, capacity=[length, None][seed], slack=[0, 3][seed])
        for found, true in zip(run_ragged(ours, rows, cache, rng), expected, strict=True):
            assert relative(found, true) < TOLERANCE, f"ragged, seed {seed}"

    padded, mask = torch.zeros(3, length, dtype=torch.int64), torch.zeros(3, length, dtype=torch.int64)
    for r, row in enumerate(rows):
        padded[r, length - len(row) :], mask[r, length - len(row) :] = row, 1
    prompt = from_padded(padded, mask)
    last = ours(prompt.ids, cache=ours.new_cache(rows=3), counts=prompt.counts, logits="last")
    assert relative(last, torch.stack([true[-1] for true in expected])) < TOLERANCE, "left-padded"

    start = rows[0][: length - 8].tolist()
    tokens = ours.generate([start], 8, do_sample=False, eos_token_id=()).tokens[0]
    logits = truth(theirs, torch.tensor([start + tokens]))[0, len(start) - 1 : -1]
    best = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(best.max()) < TOLERANCE * float(logits.abs().max()), "greedy"


@pytest.mark.parametrize(("family", "name"), OTHER_FIRST, ids=[family for family, _ in OTHER_FIRST])
def test_verify_passes(family: str, name: str) -> None:
    report = verified(pair(family, name)[1])
    assert report.ok, str(report)
