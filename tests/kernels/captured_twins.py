"""Two caches of the same tokens, for tests: captured programs write one, plain passes the other."""

from __future__ import annotations

import random

import torch

import lamina
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.model import Model
from lamina.runtime import Graphs
from lamina.runtime.pointers import CacheFormat
from lamina.sampling.chooser import Chooser
from tests.kernels.passes import plainly, random_pass, same


class Twins:
    """Two caches of the same tokens: one that captured programs read and write, one for plain passes alone."""

    def __init__(self, model: Model, captured: lamina.Cache, plain: lamina.Cache) -> None:
        self.model, self.captured, self.plain = model, captured, plain
        self.graphs, self.rng = Graphs(model), random.Random(captured.slack)

    def compare(self) -> None:
        self.captured.poison()
        same(self.captured, self.plain)
        if not CacheFormat.of(self.captured).logs:
            return
        assert torch.equal(self.captured.clock.base, self.plain.clock.base)
        self.plain.poison()
        for one, other in zip(self.captured.every_layer(), self.plain.every_layer(), strict=True):
            if isinstance(one, RecurrentLayer):  # states, and logs with NaN where nothing is logged
                for name, kept in other.data.items():
                    torch.testing.assert_close(one.data[name], kept, rtol=1e-4, atol=1e-4, equal_nan=True)

    def step(self, steps: int, remaining: list[int]) -> None:
        """Captured steps, of which a row that has ended takes no part, and plain passes of the same tokens."""
        ids = torch.tensor([3, 4])
        with self.graphs.step(2, Chooser(), self.captured) as step:
            step.begin(self.captured, ids, remaining, ())
            for number in range(steps):
                fed, live = step.ids.clone(), [int(number < n) for n in remaining]
                step.run(1)
                plainly(self.model, self.plain, fed, live, live)
                self.compare()

    def read(self, T: int) -> None:
        """A captured pass of which each row accepts some tokens, and a plain one."""
        ids, counts, accepted = random_pass(self.rng, 2, T, 12)
        with self.graphs.pass_of(2, T, self.captured) as one:
            logits = one.read(self.captured, ids, counts)
            expected = plainly(self.model, self.plain, ids, counts, accepted)
            for row, count in enumerate(counts):
                torch.testing.assert_close(logits[row, :count], expected[row, :count], rtol=1e-4, atol=1e-4)
            one.commit(accepted)
        self.compare()

    def prompt(self, counts: list[int]) -> None:
        """A captured prompt, and a plain pass."""
        ids = torch.tensor([[self.rng.randrange(1, 12) for _ in range(max(counts))] for _ in counts])
        with self.graphs.prompt_of(2, self.captured) as one:
            one.feed(self.captured, ids, counts)
        self.model(ids.to(self.model.device), cache=self.plain, counts=counts, logits="last")
        self.compare()

    def rewind_and_go_on(self) -> None:
        """Takes both back, each row as far as it can or less, and continues with plain passes."""
        back = [self.rng.choice((0, most, most)) for most in self.plain.rewindable.tolist()]
        for cache in (self.captured, self.plain):
            cache.rewind(back)
        self.go_on()

    def go_on(self) -> None:
        """Plain passes over both."""
        more = torch.tensor([[1, 2], [3, 4]], device=self.model.device)
        found, expected = (self.model(more, cache=cache) for cache in (self.captured, self.plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        self.compare()
