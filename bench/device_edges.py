"""Captured decoding where it ends, runs short or is left early: `python -m bench.device_edges`

On a small llama on a GPU: room that grows with the tokens, a row that every id is excluded for, draws alone and in a
batch, a pool whose pages a prefix store holds, an assistant with another tokenizer, and scripts that end while a stream
is open.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import lamina
from lamina.model import Model
from lamina.sampling.history import History

PROMPTS = [[5, 9, 12, 3, 44, 8, 21], [7, 2, 30]]
CAPTURED = "one captured graph a step"


def grows(model: Model) -> bool:
    """Whether memory follows the tokens that are made, not those that might be."""
    free = model.generate(PROMPTS[:1], 700, eos_token_id=None, beyond_context=True)
    many = model.generate(PROMPTS[:1], 2_000_000, beyond_context=True, eos_token_id=None, stop=after(650))
    return many.how == CAPTURED and many.tokens[0] == free.tokens[0][:650] and many.cache.nbytes < 3 * free.cache.nbytes


def after(count: int) -> Callable[[int, list[int], str], bool]:
    return lambda row, tokens, text: len(tokens) == count


@dataclass(frozen=True)
class NothingAfterTwo:
    """Excludes every id once a row has two new tokens."""

    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where((history.lengths - history.prompts >= 2)[:, None], -torch.inf, scores)


def excludes(model: Model) -> bool:
    """Whether a row that nothing may follow raises, with the cache before the excluded id, streamed or not."""
    for listener in (None, print_nothing):
        cache = model.new_cache(2)
        try:
            model.generate(
                PROMPTS, 9, cache=cache, eos_token_id=None, logits_processor=[NothingAfterTwo()], stream=listener
            )
        except lamina.InputError as error:
            if "nothing may follow" not in str(error) or [len(row) for row in cache.tokens] != [9, 5]:
                return False
        else:
            return False
    return True


def print_nothing(event: object) -> None:
    """A listener, so that every token is looked at."""


def draws(model: Model) -> bool:
    """Whether a prompt draws the same alone and in a batch, with the largest seed."""
    how: dict[str, Any] = dict(do_sample=True, seed=2**64 - 1, eos_token_id=None)
    together = model.generate([*PROMPTS, PROMPTS[0]], 16, **how)
    alone = [model.generate([prompt], 16, **how) for prompt in PROMPTS]
    captured = all(one.how == CAPTURED for one in (together, *alone))
    same = together.tokens[:2] == [one.tokens[0] for one in alone]
    return captured and same and len(set(map(tuple, together.tokens))) == 3


def reclaims(model: Model) -> bool:
    """Whether a captured run gets the pages of snapshots that a full pool holds."""
    pool = lamina.Pool(model, tokens=96, page=4)
    store = lamina.PrefixStore(model, bytes=2**24, pool=pool)
    for first in range(10, 14):
        model.generate([[first] * 12], 8, prefixes=store, eos_token_id=None)
    found = model.generate(PROMPTS[:1], 60, cache=model.new_cache(pool=pool), eos_token_id=None)
    plain = model.generate(PROMPTS[:1], 60, eos_token_id=None, output_logits=True)
    return found.how == CAPTURED and found.tokens == plain.tokens


def universal(model: Model) -> bool:
    """Whether an assistant with other ids for the same texts drafts by captured passes."""
    from tests.generation.vocabularies import llama, with_permuted_ids

    target = llama("bytes").to(model.device)
    found = target.generate(PROMPTS[:1], 16, eos_token_id=None, assistant_model=with_permuted_ids(target))
    plain = target.generate(PROMPTS[:1], 16, eos_token_id=None, output_logits=True)
    return found.how.startswith("captured") and "through text" in found.how and found.tokens == plain.tokens


SCRIPT = """
import torch
from tests.families.harness import pair
model = pair("llama", "grouped")[1].cuda()
stream = model.stream([[5, 6, 7]], 5000, eos_token_id=None, beyond_context=True)
next(stream)
"""


def ends(model: Model) -> bool:
    """Whether a script that ends while a stream is open ends well."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    return done.returncode == 0 and "terminate" not in done.stderr


CHECKS = [grows, excludes, draws, reclaims, universal, ends]


def main() -> None:
    from tests.families.harness import pair

    model, good = pair("llama", "grouped")[1].cuda(), True
    for check in CHECKS:
        ok = check(model)
        good &= ok
        print(f"{(check.__doc__ or '').splitlines()[0]} {'yes' if ok else 'NO'}", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
