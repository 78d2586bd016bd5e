"""The paths through `model.generate`: what it made is fed to an uncached pass, row by row, and compared with that.

Every forward of the loop is recorded. Its tokens are in the slots of the padded batch in order, and the last token that
was chosen is not fed, so the tokens of all forwards end one slot before the end.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lamina.checking.transformers.caches import NotTried, dynamic
from lamina.checking.transformers.probe import Found, Probe
from lamina.checking.transformers.recorder import Pass
from lamina.checking.transformers.subject import Subject
from lamina.checking.transformers.truth import Truth

NEW = 5
"""Tokens that `generate` makes at a time."""


def generate(probe: Probe, rng: random.Random) -> None:
    """One call on a padded batch."""
    _can_generate(probe)
    ids, mask = _prompts(probe)
    if probe.kept.kind == "lamina":
        cache = probe.kept.make(probe.subject, ids.shape[1] + NEW, _sources(probe))
        _call(probe, ids, mask, {_cache_name(probe): cache})
    elif probe.kept.kind == "static":
        probe.kept.make(probe.subject, ids.shape[1] + NEW, _sources(probe))  # raises where there is none
        _call(probe, ids, mask, {}, "static")
    else:
        _call(probe, ids, mask, {}, "dynamic")


def generate_continued(probe: Probe, rng: random.Random) -> None:
    """A second call with all tokens so far, some new ones, and the cache of the first call."""
    _can_generate(probe)
    ids, mask = _prompts(probe)
    make = dynamic if probe.kept.kind == "own" else probe.kept.make
    cache = make(probe.subject, ids.shape[1] + 3 * NEW, _sources(probe))
    made = _call(probe, ids, mask, {_cache_name(probe): cache})
    more = torch.stack([_ids(probe, row[-3:]) for row in probe.rows]).to(made.device)
    ids = torch.cat([made, more], dim=1)
    _call(probe, ids, _grown(mask, ids.shape[1]), {_cache_name(probe): cache})


def _can_generate(probe: Probe) -> None:
    from transformers import GenerationMixin

    model = type(probe.subject.model)
    if getattr(model, "generate", None) is not GenerationMixin.generate:
        raise NotTried("it has no generate of the usual kind")


def _cache_name(probe: Probe) -> str:
    name = probe.subject.cache_name
    assert name is not None
    return name


def _sources(probe: Probe) -> Any:
    return probe.sources(range(len(probe.rows)))


def _ids(probe: Probe, places: range) -> Tensor:
    return torch.tensor([probe.truth.flat_ids[place] for place in places])


def _prompts(probe: Probe) -> tuple[Tensor, Tensor]:
    """The first two thirds of each row, padded on the left; of equal lengths where rows have sources. [B, T] each"""
    cuts = [max(1, 2 * len(row) // 3) for row in probe.rows]
    if probe.subject.encoder_decoder:
        cuts = [min(cuts)] * len(cuts)
    elif probe.subject.mask_name is None:
        raise NotTried("its forward takes no attention_mask")
    ids = torch.full((len(cuts), max(cuts)), probe.subject.pad)
    mask = torch.zeros_like(ids)
    for r, (row, cut) in enumerate(zip(probe.rows, cuts, strict=True)):
        ids[r, max(cuts) - cut :] = _ids(probe, row[:cut])
        mask[r, max(cuts) - cut :] = 1
    return ids, mask


def _grown(mask: Tensor, slots: int) -> Tensor:
    """A mask [B, T] with ones for what came after; a decoder start token in front counts as one of those."""
    return torch.cat([mask, mask.new_ones(len(mask), slots - mask.shape[1])], dim=1)


def _call(probe: Probe, ids: Tensor, mask: Tensor, given: dict[str, Any], implementation: str | None = None) -> Tensor:
    """One call, judged; -> all ids [B, T + NEW]"""
    subject, recorder = probe.subject, probe.truth.recorder
    if (sources := _sources(probe)) is not None:
        given = given | sources.arguments(subject.parameters) | {"decoder_input_ids": ids.to(subject.device)}
        if subject.mask_name is not None:  # by its length a second call knows that it is given all ids
            given[subject.mask_name] = mask.to(subject.device)
    else:
        given = given | {"input_ids": ids.to(subject.device), "attention_mask": mask.to(subject.device)}
    with _settings(subject, implementation), recorder.on():
        out = subject.model.generate(**given)
    probe.cases += len(ids)
    _judge(probe, out.sequences.cpu(), mask, out.logits, recorder.take())
    return out.sequences.cpu()


@contextmanager
def _settings(subject: Subject, implementation: str | None) -> Iterator[None]:
    """Greedy, NEW tokens without special ones, uncompiled, in place of what the model's own settings are."""
    model = subject.model
    held, longest = model.generation_config, getattr(model, "_previous_max_cache_length", None)
    model.generation_config = copy.deepcopy(held)
    model.generation_config.update(
        do_sample=False, num_beams=1, max_new_tokens=NEW, min_new_tokens=None, max_length=None, min_length=None,
        return_dict_in_generate=True, output_logits=True, disable_compile=True, use_cache=True,
        pad_token_id=subject.pad, suppress_tokens=sorted(subject.special) or None, begin_suppress_tokens=None,
        forced_bos_token_id=None, forced_eos_token_id=None, cache_implementation=implementation,
    )  # fmt: skip
    try:
        yield
    finally:
        model.generation_config = held
        if longest is None:
            model.__dict__.pop("_previous_max_cache_length", None)


def _judge(probe: Probe, ids: Tensor, mask: Tensor, logits: tuple[Tensor, ...], passes: list[Pass]) -> None:
    """ids [B, S] with everything made, mask [B, S - NEW] of the prompt, logits NEW × [B, vocab]."""
    rows, slots = ids.shape
    mask = _grown(mask, slots)
    truth = Truth(probe.subject, [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)], _sources(probe))
    truth.record()
    truth.take_allowed(probe.truth)
    found = Found(truth)
    positions = mask.cumsum(1) - 1
    end = slots - 1 - sum(one.tokens for one in passes)
    for one in passes:
        start, end = end, end + one.tokens
        fed = range(max(start, 0), end)
        real = [(r, slot) for r in range(rows) for slot in fed if mask[r, slot]]
        tokens = [r * one.tokens + slot - start for r, slot in real]
        places = [truth.rows[r].start + int(positions[r, slot]) for r, slot in real]
        chosen = end - 1 - (slots - 1 - NEW)  # of a pass in which a token was chosen, the last token has logits
        known = 0 <= chosen < NEW
        whole = torch.zeros(rows, one.tokens, logits[0].shape[-1], device=logits[0].device)
        if known:
            whole[:, -1] = logits[chosen]
        unknown = [n for n, (_, slot) in enumerate(real) if not known or slot < end - 1]
        found.add(one, whole.flatten(0, 1), tokens, places, unknown)
    probe.found.append(found)
