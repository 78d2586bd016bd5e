"""Captured prompts against plain passes on a GPU: `python -m bench.prompt_checks [FAMILY ...] [--seconds 100]`

Prompts of different widths, ragged, one after the other, as ids and as embeddings, into plain caches, pages and codes:
the logits after each, the hidden states that scores are computed from, and what plain passes make of the caches
afterwards, with NaN in unused slots. `bench.device_check` runs it for every family; alone, it prints a line for each.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import lamina
from lamina.model import Model
from lamina.runtime.cuda_graph import capture_graphs
from lamina.runtime.feed import feed
from lamina.runtime.prompts.eligibility import why_no_prompts

if TYPE_CHECKING:
    from bench.device_models import Family

LENGTHS = (30, 5, 40, 9)  # tokens of one prompt after the other
FEW = 2  # of them in pages and in codes: kernels for codes are built for each width
ROWS = 3
CODEC = "int8"


@torch.no_grad()
def prompts_are_plain(family: Family) -> tuple[bool, str]:
    """Whether captured prompts give what plain passes give, over plain caches, in pages, and in codes."""
    from tests.families.harness import relative  # here and below: after `stand_in_for_missing_configs`

    model = family.model
    if reason := why_no_prompts(model, family.new_cache(ROWS)):
        return True, f"plain passes: {reason}"
    draw = random.Random(0)
    pieces = list(random_pieces(model, draw))
    exact: Tensor | None = None
    for name, keep in keepings(model):
        fast, slow = (family.new_cache(ROWS, **keep) for _ in range(2))
        errors = compare(model, fast, slow, pieces if name == "growing" else pieces[:FEW])
        worst = max(errors)
        after = slow.logits
        assert after is not None
        if name == "pages":
            exact = after  # of the pieces that are read in codes too
        allowed = 0.5 * relative(after, exact) if name == CODEC and exact is not None else 2e-4
        if not worst <= allowed:
            return False, f"no: {name}, {', '.join(f'{error:.1e}' for error in errors)}, allowed {allowed:.1e}"
        if fast.tokens != slow.tokens or fast.clock.high != slow.clock.high:
            return False, f"no: {name}, other tokens"
    return True, "yes"


def keepings(model: Model) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to keep a cache, as `new_cache` takes them."""
    yield "growing", {}
    yield "pages", {"pool": lamina.Pool(model, page=4)}
    if any(spec.takes_codec for entry in model.specs for spec in entry.values()):
        yield CODEC, {"codec": CODEC}


def random_pieces(model: Model, draw: random.Random) -> Iterator[tuple[Tensor, list[int]]]:
    """Ids [ROWS, T] and ragged counts, as many as the model has positions for."""
    left = model.max_positions or sum(LENGTHS) + 8
    for T in LENGTHS:
        T = min(T, left - 8)
        if T < 1:
            return
        left -= T
        ids = [[draw.randrange(model.vocab) for _ in range(T)] for _ in range(ROWS)]
        yield torch.tensor(ids), [T, draw.randint(0, T), draw.randint(1, T)]


def compare(
    model: Model, fast: lamina.Cache, slow: lamina.Cache, pieces: list[tuple[Tensor, list[int]]]
) -> list[float]:
    """Errors of the logits after each piece, and of plain passes over both caches at the end."""
    from tests.families.harness import relative

    errors, last, captured = [], len(model.blocks), set()
    with model.graphs.prompt_of(ROWS, fast) as one:
        for number, (ids, counts) in enumerate(pieces):
            embedded, states, there = number % 3 == 1, number % 3 == 2, ids.to(model.device)
            embeds = model.embed(there) if embedded else None
            left = one.feed(fast, None if embedded else ids, counts, embeds=embeds, states=states)
            hidden = (last,) if states else ()
            step = feed(model, slow, None if embedded else there, counts=counts, embeds=embeds, hidden=hidden)[1]
            captured.add((one.T, embedded, states))
            if left is not None:
                real = torch.arange(step.T) < torch.tensor(counts)[:, None]
                errors.append(relative(left[:, : step.T][real], step.hidden[last][real]))
            live = [row for row, count in enumerate(counts) if count]
            assert fast.logits is not None and slow.logits is not None
            errors.append(relative(fast.logits[live], slow.logits[live]))
            fast.poison()
        if one.captures != len(captured):
            errors.append(float("nan"))  # a graph was captured twice
    more = torch.arange(6).view(ROWS, 2) % model.vocab
    found, expected = (model(more, cache=cache) for cache in (fast, slow))
    assert found is not None and expected is not None
    return [*errors, relative(found, expected)]


@torch.no_grad()
def experts_replay() -> tuple[bool, str]:
    """Whether a mixture of experts that was captured with one choice of experts gives, replayed with another, what it
    gives uncaptured: bfloat16 has products of its own, grouped by expert, which float32 checks do not run."""
    from lamina.nn import Experts

    torch.manual_seed(0)
    experts = Experts(64, width=256, inner=128).to("cuda", torch.bfloat16)
    inputs = torch.randn(4, 1, 512, 256, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(4, 1, 512, 64, device="cuda").topk(6).indices
    chosen[1] = chosen[1] % 3  # all tokens to few experts
    weights = torch.full((1, 512, 6), 1 / 6, device="cuda", dtype=torch.bfloat16)
    x, which = inputs[0].clone(), chosen[0].clone()
    found: list[Tensor] = []

    def program() -> None:
        found.append(experts(x, which, weights))

    replay = capture_graphs(x.device, program)[0]
    worst = 0.0
    for one, choice in zip(inputs, chosen, strict=True):
        x.copy_(one)
        which.copy_(choice)
        replay()
        expected = experts(one, choice, weights)
        worst = max(worst, float((found[-1] - expected).float().abs().max() / expected.float().abs().max()))
    return worst < 1e-2, f"{worst:.1e}"


def main() -> None:
    from bench.device_check import NotInTransformers, model_types, stand_in_for_missing_configs

    stand_in_for_missing_configs()  # before test cases are imported
    torch.backends.cuda.matmul.allow_tf32 = False
    from bench.device_models import model_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--seconds", type=float, default=100.0)
    given = parser.parse_args()
    started = time.perf_counter()
    good, said = experts_replay()
    print(f"{'ok  ' if good else 'FAIL'} experts replayed with other choices, bfloat16: {said}", flush=True)
    for name in given.families or [name for name in model_types() if name != "own"]:
        if time.perf_counter() - started > given.seconds:
            print(f"no time left for {name} and those behind it")
            break
        begun = time.perf_counter()
        try:
            good, said = prompts_are_plain(model_of(name))
        except NotInTransformers as missing:
            good, said = True, f"transformers has no {missing}"
        except Exception as error:
            traceback.print_exc()
            good, said = False, f"{type(error).__name__}: {error}"[:600]
        print(f"{'ok  ' if good else 'FAIL'} {name}: {said} ({time.perf_counter() - begun:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
