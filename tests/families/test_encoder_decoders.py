"""Every encoder–decoder family gives transformers' logits and greedy tokens, however sources and targets are fed.

The truth is transformers' uncached pass over one row. One test per case, so that each model is made once.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.config import Config
from lamina.encoder import EncoderDecoder
from lamina.errors import InputError
from lamina.generation.prompt import from_padded, from_rows
from lamina.models import family_of
from tests.families.encoder_decoder_cases import FAMILIES, pair_of
from tests.families.harness import TOLERANCE, random_cuts, random_ids, relative, run_in_pieces, run_ragged, verified

ALL = [(family, name) for family, cases in FAMILIES.items() for name in cases]
FIRST = [(family, next(iter(cases))) for family, cases in FAMILIES.items()]
LENGTH = 30


@functools.cache
def pair(family: str, name: str) -> tuple[Any, EncoderDecoder]:
    return pair_of(FAMILIES[family][name]())


@torch.no_grad()
def truth(theirs: Any, source: Tensor, target: Tensor) -> Tensor:
    """One row in one uncached pass. source [S], target [T] -> [T, vocab]"""
    restore(theirs)
    return theirs(input_ids=source[None], decoder_input_ids=target[None], use_cache=False).logits[0]


def restore(theirs: Any) -> None:
    """A short source makes transformers attend fully ever after, in a model whose attention is block-sparse."""
    if hasattr(theirs.get_encoder(), "set_attention_type"):
        theirs.get_encoder().set_attention_type(theirs.config.attention_type)


def random_row(length: int, vocab: int, seed: int) -> Tensor:
    """Ids above the special ones: some families count no positions for padding."""
    return random_ids(1, length, vocab - 3, seed)[0] + 3


@pytest.mark.parametrize(("family", "name"), ALL, ids=[f"{f}-{n}" for f, n in ALL])
def test_logits_and_greedy_tokens_are_those_of_transformers(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    vocab = ours.source_vocab or ours.vocab
    sources = [random_row(n, vocab, seed=r) for r, n in enumerate((23, 9, 1))]
    targets = [random_row(n, ours.vocab, seed=5 + r) for r, n in enumerate((LENGTH, 12, 1))]
    expected = [truth(theirs, *row) for row in zip(sources, targets, strict=True)]

    prompt = from_rows([row.tolist() for row in sources])
    source = ours.encode(prompt.ids, prompt.counts)
    for row, states in zip(sources, source.states, strict=True):
        restore(theirs)
        true = theirs.get_encoder()(row[None]).last_hidden_state[0]
        assert relative(states[: len(row)], true) < TOLERANCE, "encoder"
    alone = ours.encode(sources[0][None])
    assert relative(ours(targets[0][None], source=alone)[0], expected[0]) < TOLERANCE, "one pass"
    for seed in range(2):
        rng = random.Random(seed)
        cache = ours.new_cache(rows=1, capacity=[None, LENGTH][seed], source=alone)
        logits = run_in_pieces(ours, targets[0][None], cache, random_cuts(LENGTH, rng))
        assert relative(logits[0], expected[0]) < TOLERANCE, f"in pieces, seed {seed}"
        cache = ours.new_cache(rows=3, capacity=[LENGTH, None][seed], slack=[0, 3][seed], source=source)
        for found, true in zip(run_ragged(ours, targets, cache, rng), expected, strict=True):
            assert relative(found, true) < TOLERANCE, f"ragged, seed {seed}"

    padded, mask = torch.zeros(3, 23, dtype=torch.int64), torch.zeros(3, 23, dtype=torch.int64)
    for r, row in enumerate(sources):
        padded[r, 23 - len(row) :], mask[r, 23 - len(row) :] = row, 1
    prompt = from_padded(padded, mask)
    cache = ours.new_cache(rows=3, source=ours.encode(prompt.ids, prompt.counts))
    rows = from_rows([row.tolist() for row in targets])
    last = ours(rows.ids, cache=cache, counts=rows.counts, logits="last")
    assert relative(last, torch.stack([true[-1] for true in expected])) < TOLERANCE, "left-padded sources"

    tokens = ours.generate([sources[0].tolist()], 8, do_sample=False, eos_token_id=(), suppress_tokens=[1]).tokens[0]
    start = list(ours.start_ids)
    logits = truth(theirs, sources[0], torch.tensor(start + tokens))[len(start) - 1 : -1]
    logits[:, 1] = -1e3  # padding, which some families count no position for
    best = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(best.max()) < TOLERANCE * float(logits[:, 2:].abs().max()), "greedy"


@pytest.mark.parametrize(("family", "name"), FIRST, ids=[family for family, _ in FIRST])
def test_verify_passes(family: str, name: str) -> None:
    report = verified(pair(family, name)[1])
    assert report.ok, str(report)


REFUSED = [
    ("mvp", "use_prompt", True),
    ("fsmt", "pad_token_id", 0),
    ("bigbird_pegasus", "attention_type", "sparse"),
    ("longt5", "encoder_attention_type", "global"),
]


@pytest.mark.parametrize(("family", "name", "value"), REFUSED)
def test_options_that_are_not_supported_are_named(family: str, name: str, value: Any) -> None:
    config = Config(next(iter(FAMILIES[family].values()))().to_dict() | {name: value})
    with pytest.raises(InputError, match=f"{name}={value!r}"), torch.device("meta"):
        family_of(config).build(config)
