"""What is measured. A subject holds a model; it is opened for some rows at some context, run, and closed again."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lamina.bench.decode import run_steps
from lamina.bench.measure import random_ids
from lamina.bench.prefill import Prompts
from lamina.cache.cache import Cache
from lamina.cache.pool.pool import Pool
from lamina.generation import generate
from lamina.generation.feed import prefill
from lamina.generation.prompt import Prompt
from lamina.model import Model
from lamina.nn import Experts
from lamina.planning.context import attach_random, fill_context, set_clock
from lamina.runtime.compile import CompiledBlocks
from lamina.weights.inventory import weight_bytes


class Contestant(Protocol):
    name: str

    @property
    def weights(self) -> int:
        """Bytes of all weights."""

    def needs(self, rows: int, tokens: int) -> int:
        """Bytes that a cache of that size takes."""

    def open(self, rows: int, context: int, room: int) -> None:
        """Makes a cache whose rows hold `context` random tokens, with room for `room` more."""

    def restart(self) -> None:
        """Takes the rows back to the context they were opened with."""

    def run(self, steps: int) -> None:
        """Decodes that many tokens for every row."""

    def prefill(self, ids: Tensor, prompts: Prompts) -> None:
        """Reads ids [R, T] into empty rows as the prompts say, for the logits after each row's last token."""

    def stream(self, ids: Tensor, new: int) -> list[float]:
        """Continues ids [1, T] by `new` tokens; -> when each was known, as `time.time()` says."""

    def close(self) -> None:
        """Lets the cache go."""


class Lamina:
    """This library, as `generate` runs it, with caches of a codec, or in pages of `page` tokens."""

    name = "lamina"

    def __init__(
        self, model: Model, codec: str | None = None, page: int | None = None, source: int | None = None
    ) -> None:
        """source: positions of the encoder's output, for models that read one"""
        self.model, self.codec, self.page, self.source = model, codec, page, source
        if codec is not None:
            self.name = f"lamina, {codec}"
        if page is not None:
            self.name += f", pages of {page}"
        self.cache: Cache | None = None
        self.context = 0

    @property
    def weights(self) -> int:
        return weight_bytes(self.model)

    def needs(self, rows: int, tokens: int) -> int:
        like, codec = self.model, self.codec
        cache = Cache(like.specs, rows=rows, capacity=tokens, dtype=like.dtype, device="meta", codec=codec)
        return (cache if self.source is None else attach_random(cache, self.source)).nbytes

    def open(self, rows: int, context: int, room: int) -> None:
        pool = None
        if self.page is not None:
            most = (context + room) // self.page * self.page + self.page
            pool = Pool(self.model, rows * most, rows, self.page, codec=self.codec)
        cache = self.model.new_cache(rows, codec=self.codec, pool=pool)
        self.cache, self.context = cache.reserve(context + room), context
        if self.source is not None:
            attach_random(self.cache, self.source)
        fill_context(self.cache, context)
        self.ids = random_ids((rows,), self.model.vocab, self.model.device)

    def restart(self) -> None:
        assert self.cache is not None
        set_clock(self.cache, self.context)

    def run(self, steps: int) -> None:
        assert self.cache is not None
        run_steps(self.model, self.cache, self.ids, steps)

    def experts_visited(self) -> float | None:
        """How many experts of a layer the rows visit in a step, on average; None where there are none."""
        found: list[int] = []
        hooks = [
            module.register_forward_pre_hook(
                lambda experts, given: found.append(int((given[1].unique() < len(experts.down)).sum()))
            )
            for module in self.model.modules()
            if isinstance(module, Experts)
        ]
        assert self.cache is not None
        with torch.no_grad():
            if hooks:
                self.model(self.ids[:, None], cache=self.cache, logits="last")
        for hook in hooks:
            hook.remove()
        return sum(found) / len(found) if found else None

    @torch.no_grad()
    def prefill(self, ids: Tensor, prompts: Prompts) -> None:
        """As `generate` does it."""
        cache = self.model.new_cache(ids.shape[0], codec=self.codec).reserve(ids.shape[1])
        prefill(self.model, Prompt(ids, list(prompts.counts)), cache, prompts.chunk)

    def stream(self, ids: Tensor, new: int) -> list[float]:
        import time

        known: list[float] = []
        generate(self.model, ids, new, eos_token_id=(), stream=lambda event: known.append(time.time()))
        return known

    def close(self) -> None:
        self.cache = None


class CompiledLamina(Lamina):
    """The same after `model.compile()`."""

    name = "lamina, compiled"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.blocks = CompiledBlocks(model.blocks)

    def run(self, steps: int) -> None:
        self.model.compiled = self.blocks
        try:
            super().run(steps)
        finally:
            self.model.compiled = None
