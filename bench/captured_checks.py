"""Checks of one family on a GPU, run by `bench.device_check`.

Every check returns whether it holds, and what is written down: the laws in float32 and bfloat16, logits against
transformers' uncached pass, and captured decoding, greedy and drawn, against plain passes, with two caches in turn, one
of them growing, through one graph; captured passes of 1 to 16 tokens, ragged in what is read and accepted, and
speculation on them, against plain ones. Passes with counts that live on the device run without a single
synchronisation, and device counts out of range are clamped and told at the next read. All of that in pages of a pool
too, over caches of codes, and for many callers at once.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

import lamina
from bench.device_models import MENDED, PROMPTS, Family
from bench.many_callers import many_callers
from bench.prompt_checks import prompts_are_plain
from lamina.cache.layers.tokens import TokenLayer
from lamina.generation import Result
from lamina.model import Model
from lamina.rehearsal.explain import explain_decoding
from lamina.runtime import why_no_passes
from lamina.runtime.prompts.eligibility import why_not_prompted
from tests.families.harness import random_ids, relative
from tests.kernels.captured_twins import Twins

Found = tuple[bool, str]  # whether it is as it should be, and what is written down


@torch.no_grad()
def logits(one: Family) -> Found:
    found = one.logits()
    error, model_type = relative(found, one.truth()), one.model.config.model_type
    if error < 2e-4 or model_type not in MENDED:
        return error < 2e-4, f"{error:.1e}"
    fault, mended = MENDED[model_type]
    error = relative(found, mended(one))
    return error < 2e-4, f"{error:.1e}: transformers {version('transformers')} {fault}"


def laws(one: Family, **how: Any) -> Found:
    report = lamina.verify(one.model, tries=1, **how)
    if not report.ok:
        print(report, file=sys.stderr)
    return report.ok, "ok" if report.ok else f"FAILED: {report.verdict}"


@torch.no_grad()
def rounded(one: Family) -> Found:
    """The model is in bfloat16 from here on."""
    exact = one.logits()
    one.model = one.model.to(torch.bfloat16)
    if reason := why_plain(one.model):
        return True, reason
    said = same_but_for_ties(one, float((one.logits().float() - exact).abs().max()))
    return said == "yes", said


def why_plain(model: Model) -> str | None:
    """Why decode steps are not captured, which docs/families.md says too."""
    reason = explain_decoding(model).partition("since ")[2]
    return f"plain passes: {reason}" if reason else None


def greedy(one: Family) -> Found:
    """Whether captured greedy tokens are those of plain passes, in float32."""
    found, expected = one.generate(20), one.plain(20)
    good = found.tokens == expected.tokens and "captured" in found.how
    return good, "yes" if good else f"no: {found.how}"


def yes(check: Callable[[Family], str]) -> Callable[[Family], Found]:
    """A check that says "yes", that there is nothing to check, or what is wrong."""

    def asked(one: Family) -> Found:
        said = check(one)
        return said == "yes" or said == NO_CODES, said

    return asked


def if_captured(check: Callable[[Family], Found]) -> Callable[[Family], Found]:
    """The check, or the reason why steps are not captured."""

    def asked(one: Family) -> Found:
        reason = why_plain(one.model)
        return check(one) if reason is None else (True, reason)

    return asked


LOGITS, GREEDY = "logits against transformers, float32", "captured equals plain, greedy, float32"
ROUNDED = "captured equals plain but for near-ties, greedy, bfloat16"
PASSES = "passes of several tokens, and speculation on them, float32"
PROMPTED = "captured prompts are plain passes: behind rows of any length, ragged, in pages, in codes, float32"
LAWS, ROUNDED_LAWS = "laws, float32", "laws, bfloat16"


def columns() -> dict[str, Callable[[Family], Found]]:
    """Every check by its title, in order; the model is in bfloat16 after `ROUNDED`."""
    return {
        LOGITS: logits,
        GREEDY: if_captured(greedy),
        LAWS: laws,
        "laws on the host, float32": partial(laws, residence="host"),
        "no sync in a decode pass": yes(lambda one: without_syncs(one.model)),
        "captured equals plain, greedy and drawn, float32, captures for two caches": if_captured(captured_is_plain),
        PASSES: if_captured(yes(passes_are_plain)),
        PROMPTED: prompts_are_plain,
        "with slack: states that plain passes keep, rewound and continued, float32": if_captured(with_slack),
        "in pages the same tokens, captured as without, greedy, drawn, drafted, in forks and beams, and no sync": yes(
            lambda one: in_pages(one.model)
        ),
        f"captured passes over codes ({', '.join(CODECS)}) are plain ones, in pages too, float32": if_captured(
            yes(lambda one: in_codes(one.model))
        ),
        "threads, CUDA streams, tasks and interleaved streams get the tokens of a run alone": yes(
            lambda one: many_callers(one.model)
        ),
        ROUNDED: rounded,
        ROUNDED_LAWS: laws,
    }


SHORT = (LOGITS, GREEDY, PASSES, PROMPTED, ROUNDED)
"""What is checked of a family whose captured step launches the kernels of another."""
WITH_SOURCE = (LOGITS, GREEDY, LAWS, PASSES, PROMPTED, ROUNDED, ROUNDED_LAWS)
"""What is checked of a decoder that reads a source."""


def own_model() -> dict[str, Found]:
    """What a model of plain PyTorch layers gets without a line of its own for it."""
    from docs.own_model import Mine

    torch.manual_seed(0)
    model = Mine().eval().cuda()
    found: dict[str, Found] = {"how it decodes": ("captured" in explain_decoding(model), explain_decoding(model))}
    same = model.generate(PROMPTS, 30).tokens == plain(model, PROMPTS, 30).tokens
    found["captured steps are plain passes"] = same, "yes" if same else "no"
    said = passes_are_plain(Family(None, model, torch.zeros(0)))
    found["captured passes and speculation are plain ones"] = said == "yes", said
    long = [[1] * (model.max_positions - 3), [5, 6]]
    ends = model.generate(long, 12)
    right = [len(row) for row in ends.tokens] == [3, 12] and ends.tokens[1] == model.generate(long[1:], 12).tokens[0]
    found["rows end at the last learned position, others go on"] = right, f"{ends.reasons}"
    for dtype in (torch.float32, torch.bfloat16):
        started = time.perf_counter()
        report = lamina.verify(model.to(dtype))
        took = time.perf_counter() - started
        found[f"lamina.verify in {dtype}"] = report.ok and took < 20, f"{'ok' if report.ok else report}, {took:.1f} s"
    return found


@torch.no_grad()
def with_slack(one: Family) -> Found:
    """Whether captured programs keep what a cache with slack is rewound from as plain passes do. Raises where not."""
    model = one.model
    twins = Twins(model, *(model.new_cache(2, slack=3) for _ in range(2)))
    prompts = why_not_prompted(twins.captured) or model.graphs.why_counted()
    for _ in range(3):
        if prompts is None:
            twins.prompt([30, 9])
        twins.step(5, [5, 3])
        twins.read(4)
        twins.rewind_and_go_on()
    return True, "yes" if prompts is None else f"yes, but prompts: {prompts}"


NO_CODES = "nothing is written in codes"
CODECS = ("int8", "k5v4", "fp8")  # of which the first in pages too
DRAWN = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.2, "seed": 5}


def captured_is_plain(one: Family) -> Found:
    """Whether generation through one graph gives the tokens of plain passes, and how often a step was captured."""
    model = one.model
    if reason := explain_decoding(model).partition("since ")[2]:
        return False, reason
    model.graphs.clear()
    model.graphs.captures = 0
    short, long = (model.generate(PROMPTS, more, eos_token_id=None) for more in (20, 30))
    again = model.generate([[1, 2]] * 3, 40, eos_token_id=None, cache=short.cache)  # the same cache, grown in between
    model.generate([[1, 2]] * 3, 4, eos_token_id=None, cache=long.cache)
    captures = model.graphs.captures
    longer = [p + t + [1, 2] for p, t in zip(PROMPTS, short.tokens, strict=True)]
    expected = [plain(model, PROMPTS, 20), plain(model, PROMPTS, 30), plain(model, longer, 40)]
    same = all(a.tokens == b.tokens for a, b in zip((short, long, again), expected, strict=True))
    drawn = model.generate(PROMPTS, 20, eos_token_id=None, **DRAWN)
    same &= drawn.tokens == plain(model, PROMPTS, 20, **DRAWN).tokens
    captured = all("captured" in result.how for result in (short, long, again, drawn))
    good = same and captured and captures == 1
    return good, f"{'yes' if same and captured else 'no'}, {captures}"


def plain(model: Model, prompts: list[list[int]], more: int, **settings: Any) -> Result:
    """See `Family.plain`."""
    return model.generate(prompts, more, eos_token_id=None, output_logits=True, **settings)


def same_but_for_ties(one: Family, error: float) -> str:
    """Whether captured greedy tokens are those of plain passes up to the first near-tie: a step whose best two logits
    are less than four times the error apart."""
    found, expected = one.generate(30), one.plain(30)
    for row, (a, b) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        at = next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            best = expected.logits[row][: at + 1].float().topk(2, dim=-1).values
            if not bool(((best[:, 0] - best[:, 1]) < 4 * error).any()):
                return "no"
    return "yes"


@torch.no_grad()
def passes_are_plain(family: Family) -> str:
    """Whether captured passes of several tokens, and speculation on them, give what plain passes give."""
    model = family.model
    fast, slow = (family.new_cache(3) for _ in range(2))
    if reason := why_no_passes(model, fast):
        return reason
    draw = random.Random(0)
    for T in (3, 16, 1, 2, 8, 16):
        ids = torch.tensor([[draw.randrange(model.vocab) for _ in range(T)] for _ in range(3)], device="cuda")
        counts = [T, *(draw.randint(0, T) for _ in range(2))]
        accepted = [draw.randint(count // 2, count) for count in counts]
        step = slow.step(T, counts)
        with model.graphs.pass_of(3, T) as one:
            found, expected = one.read(fast, ids, counts), model.forward(ids, step)
            assert expected is not None
            for row, count in enumerate(counts):
                if count and relative(found[row, :count], expected[row, :count]) > 2e-4:
                    return f"no: logits of {T} tokens"
            one.commit(accepted)
        step.commit(accepted)
        fast.poison()
    fast.reserve(min(200, model.max_positions or 200))  # growing looks at the lengths
    with model.graphs.pass_of(3, T) as one:
        torch.cuda.set_sync_debug_mode("error")
        try:
            one.read(fast, ids, counts)
            one.commit(accepted)
        except RuntimeError as error:
            return f"no: {error}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    step = slow.step(T, counts)
    model.forward(ids, step)
    step.commit(accepted)
    if fast.tokens != slow.tokens:
        return "no: tokens"
    expected_tokens = family.plain(30).tokens
    for settings in family.drafts:
        result = family.generate(30, **settings)
        if result.tokens != expected_tokens or not result.how.startswith("captured"):
            return f"no: {next(iter(settings))}, {result.how}"
    return "yes"


def in_pages(model: Model) -> str:
    """Whether caches in pages give the tokens of plain passes, captured wherever others are, wait for nothing, and give
    all pages back."""
    quiet = without_syncs(model, lamina.Pool(model, tokens=512, page=4, slack=2))
    return quiet if quiet != "yes" else same_in_pages(model)


def same_in_pages(model: Model) -> str:
    pool = lamina.Pool(model, page=4)
    settings: dict[str, Any]
    for settings in ({}, DRAWN, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        cache = model.new_cache(3, pool=pool)
        found = model.generate(PROMPTS, 20, eos_token_id=None, cache=cache, **settings)
        dense = model.generate(PROMPTS, 20, eos_token_id=None, **settings)
        expected = plain(model, PROMPTS, 20, **({} if "prompt_lookup_num_tokens" in settings else settings))
        if not found.tokens == dense.tokens == expected.tokens or found.how != dense.how:
            return f"no, with {settings or 'greedy'}: {found.how}"
    if not model.start_ids and not forks_are_apart(model, cache):  # with a source, rows begin anew
        return "no, with forks"
    del cache, found
    gc.collect()
    return "yes" if pool.check().used == 0 else "pages are not given back"


@torch.no_grad()
def in_codes(model: Model) -> str:
    """Whether captured passes over codes give what plain passes over codes do, and the very same in pages. Another
    order of sums rounds a code to its neighbour now and then: they may be apart by a part of what the codec does."""
    if not any(
        isinstance(layer, TokenLayer) and layer.roles for entry in model.new_cache().layers for layer in entry.values()
    ):
        return NO_CODES
    ids = random_ids(3, 40, model.vocab).cuda()
    exact, worst = logits_by_pieces(model, model.new_cache(3), ids, plainly), 0.0
    for codec in CODECS:
        expected = logits_by_pieces(model, model.new_cache(3, codec=codec), ids, plainly)
        found = logits_by_pieces(model, model.new_cache(3, codec=codec), ids, captured)
        worst = max(worst, relative(found, expected) / max(relative(expected, exact), 1e-6))
        if codec == CODECS[0]:
            pool = lamina.Pool(model, page=4, codec=codec)
            apart = relative(logits_by_pieces(model, model.new_cache(3, pool=pool), ids, captured), found)
            if apart > 1e-5:
                return f"no: {codec} in pages is {apart:.1e} off"
    return "yes" if worst < 0.5 else f"no: up to {worst:.2f} of what the codec does"


def logits_by_pieces(model: Model, cache: lamina.Cache, ids: Tensor, read: Callable[..., Tensor]) -> Tensor:
    """The logits after each token behind a prompt of 16, in passes of one and of four."""
    model(ids[:, :16], cache=cache)
    found, at = [], 16
    for T in (1, 4, 1, 4, 1):
        found.append(read(model, cache, ids[:, at : at + T]).clone())
        at += T
    return torch.cat(found, dim=1)


def captured(model: Model, cache: lamina.Cache, ids: Tensor) -> Tensor:
    with model.graphs.pass_of(cache.rows, ids.shape[1], cache) as one:
        logits = one.read(cache, ids).clone()
        one.commit()
    return logits


def plainly(model: Model, cache: lamina.Cache, ids: Tensor) -> Tensor:
    logits = model(ids, cache=cache)
    assert logits is not None
    return logits


def forks_are_apart(model: Model, cache: lamina.Cache) -> bool:
    """Whether forks go on as if they were alone, and leave what they come from as it is."""
    tokens, forks = cache.tokens, [cache.fork() for _ in range(2)]
    for fork, ids in zip(forks, ([1, 2], [3, 4, 5]), strict=True):
        found = model.generate([ids] * cache.rows, 12, eos_token_id=None, cache=fork)
        if found.tokens != plain(model, [row + ids for row in tokens], 12).tokens or cache.tokens != tokens:
            return False
    return True


def without_syncs(model: Model, pool: lamina.Pool | None = None) -> str:
    """Decodes with device counts and device acceptance while PyTorch forbids synchronisation."""
    cache = model.new_cache(rows=3, capacity=64, slack=2, pool=pool)
    ids = random_ids(3, 24, model.vocab).cuda()
    model(ids[:, :5], cache=cache, counts=[5, 3, 1])
    counts = torch.tensor([1, 0, 1], device="cuda")
    several = torch.tensor([2, 4, 0], device="cuda")
    accepted = torch.tensor([1, 4, 0], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(5, 9):
            model(ids[:, t : t + 1], cache=cache, counts=counts)
            step = cache.step(4, several)
            model.forward(ids[:, t : t + 4], step)
            step.commit(accepted)
    except RuntimeError as error:
        return f"no: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if cache.clock.sync() != [5 + 8, 3 + 16, 1 + 4] or cache.lengths.tolist() != [13, 19, 5]:
        return f"wrong lengths {cache.lengths.tolist()}"
    model(ids[:, :1], cache=cache, counts=torch.tensor([7, 0, 0], device="cuda"))
    try:
        cache.clock.sync()
    except lamina.InputError:
        return "yes"
    return "device counts out of range were not told"
