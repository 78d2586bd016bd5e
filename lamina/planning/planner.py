"""`lamina.plan`: what a model and its cache take in memory, and what fits, without a weight being read.

weights    every parameter and buffer, in the dtype it is loaded in            subject.py
cache      the table that `print(cache)` will show, to the byte                use.py
scratch    the most that a pass holds besides                                  lamina/rehearsal
moved      what a decode step reads and writes                                 lamina/planning/bytes.py

All of it together is the most that is held at once: a cache that grows does so before a pass, not in one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codecs
from lamina.cache.summary import Line, size
from lamina.errors import InputError
from lamina.generation.prefill.chunks import FEW, LEAST, SHARE, smaller
from lamina.model import Model
from lamina.planning.bytes import decode_bytes, fetched_bytes
from lamina.planning.meta_model import MetaModel, What, subject_of
from lamina.planning.search import largest
from lamina.planning.show import text
from lamina.planning.sizes import parse_rate, parse_size
from lamina.planning.use import Use, lay_out, lines_of, scratch_of
from lamina.rehearsal.rehearsal import Rehearsal

if TYPE_CHECKING:
    from lamina.planning.bytes import Moved

LENGTH = 4096  # tokens of a row where neither they nor a budget are given


@dataclass(frozen=True)
class Room:
    """What one way of making room costs: bytes of the cache on the device and on the host, and what is held besides,
    on the device, while it grows."""

    way: str
    """reserved (as `generate` does), fixed (a capacity), or grown (token by token)"""
    nbytes: int
    growing: int
    host: int = 0


@dataclass(frozen=True, repr=False)
class Plan:
    """Bytes, and what fits; printed as a table. Made by `lamina.plan`."""

    name: str
    dtype: str
    use: Use
    weights: int
    lines: tuple[Line, ...]
    """The cache: kinds of layers, and what it holds besides them."""
    growing: int
    """The most bytes that are held besides the cache while it grows."""
    scratch: int | None
    """The most bytes that a pass holds besides weights and cache; None where a pass cannot be rehearsed."""
    rooms: tuple[Room, ...]
    """The same tokens in a cache that is reserved, fixed, or grown."""
    moved: Moved | None
    """What a decode step at this length reads and writes; None where it is not known for a kind of layer."""
    positions: int | None
    """How many positions the checkpoint was made for (`model.context`)."""
    memory: int | None = None
    """The budget."""
    most_length: int | None = None
    """The largest length of `rows` rows within the budget."""
    most_length_chunk: int | None = None
    """Tokens of that prompt in one pass."""
    most_rows: int | None = None
    """How many rows of this length are within it; None where the length is itself what fits."""
    bandwidth: float | None = None
    """Bytes a second."""
    fetched: float | None = None
    """What of `moved` comes from the host or goes there."""
    link: float | None = None
    """Bytes a second between host and device."""
    by_kernels: bool = True
    """Whether scratch is that of a GPU, which runs prompts by kernels; else that of PyTorch's operations."""

    @property
    def cache(self) -> int:
        """Bytes of every tensor of the cache on the device."""
        return bytes_on("device", self.lines)

    @property
    def host(self) -> int:
        """Bytes of every tensor of the cache on the host."""
        return bytes_on("host", self.lines)

    @property
    def total(self) -> int:
        """The most bytes that are held at once on the device."""
        return self.weights + self.cache + max(self.growing, self.scratch or 0)

    @property
    def chunk(self) -> int:
        """Tokens of the prompt of a row in one pass."""
        return self.use.chunk

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None else self.total <= self.memory

    @property
    def tokens_per_second(self) -> float | None:
        """Of all rows, if a decode step took only the time of moving its bytes: the slower of memory and link."""
        if self.moved is None:
            return None
        takes = [self.moved.total / self.bandwidth] if self.bandwidth is not None else []
        if self.link is not None and self.fetched:
            takes.append(self.fetched / self.link)
        return self.use.rows / max(takes) if takes else None

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        derived = ("cache", "host", "total", "fits", "tokens_per_second", "chunk")
        found = asdict(self) | {name: getattr(self, name) for name in derived}
        return found | {"moved": None if self.moved is None else asdict(self.moved) | {"total": self.moved.total}}

    def __repr__(self) -> str:
        return text(self)


def plan(
    what: What,
    *,
    rows: int = 1,
    length: int | None = None,
    capacity: int | None = None,
    reserve: bool = True,
    slack: int = 0,
    prompt: int | None = None,
    prefill_chunk: int | None = None,
    source: int | None = None,
    codec: Codecs | None = None,
    residence: str = "device",
    page: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    memory: int | str | None = None,
    bandwidth: float | str | None = None,
    link: float | str | None = None,
    revision: str | None = None,
    weights: str | None = None,
) -> Plan:
    """What a model with a cache of `rows` rows of `length` tokens takes, and what fits into `memory`.

    what       a model, a configuration, or where that is: a folder with config.json, a config.json, a .gguf file, a
               name that `load` knows (smollm2), a Hub id, or the name of a benchmark shape
    length     tokens that each row holds in the end. None: the capacity, else as many as fit into `memory`, else 4096
    capacity, slack           of the cache, as in `model.new_cache`
    reserve                   room for the prompt and 512 new tokens is made at first, and more as they come, up to
                              `length`: as `generate` does. False: grows from the first token on
    prompt                    tokens read before one is made; None: all
    prefill_chunk             how many of them in a pass. None: all, or if that does not fit into `memory`, the largest
                              power of two that does, as `generate` chooses it
    source     tokens of each row's source, for models that read one
    codec      how keys and values are written, as in `model.new_cache`
    residence  where bytes live, as in `model.new_cache`
    page       tokens of a page, for a cache in a `lamina.Pool` that holds it and no more; None: without one
    dtype      of weights and cache, such as "bfloat16"; the checkpoint's own when None
    device     "cuda" or "cpu": how passes run. None: as on the device of a model, as on a GPU otherwise
    memory     the budget on the device, such as "24GiB" or a number of bytes
    bandwidth  such as "4.3TB/s" or bytes a second: tells the tokens a second that no decode step can exceed
    link       the same of the way between host and device, such as "50GB/s"
    revision   a branch, tag or commit, of a Hub id
    weights    how matrices are stored, as in `lamina.load`: None as in the checkpoint, "plain", "int8", "int4" or "fp8"

    >>> found = plan("llama-3.1-8b", rows=8, length=16384)
    >>> found.weights, found.lines[0].nbytes
    (16060522752, 17179869184)
    """
    if device is None:
        device = what.device.type if isinstance(what, Model) and what.device.type != "meta" else "cuda"
    if device not in ("cuda", "cpu"):
        raise InputError(f'device={device!r}: it must be "cuda" or "cpu"')
    planner = _Planner(subject_of(what, dtype, revision, weights), device == "cuda")
    budget = None if memory is None else parse_size(memory)
    rate = None if bandwidth is None else parse_rate(bandwidth)
    way = None if link is None else parse_rate(link, "link")
    known = length if length is not None else capacity
    if known is None and budget is None:
        known = max(min(LENGTH, planner.model.context or LENGTH), prompt or 1)
    least = known if known is not None else prompt or 1
    use = Use(rows, least, capacity, reserve, slack, prompt, prefill_chunk, source, codec, residence, page)
    use.check(planner.model)
    if budget is None:
        return replace(planner.plan(use), bandwidth=rate, link=way)
    one = planner.total(replace(use, length=1, capacity=capacity and 1, prompt=None))
    if (one if known is None else planner.weights) > budget:
        raise InputError(
            f"the weights of {planner.subject.name} take {size(planner.weights)} in {planner.subject.dtype}, with one "
            f"token in each of {rows} row{'s' * (rows != 1)} it is {size(one)}, and the budget is {size(budget)}: give "
            "more, or ask for a smaller dtype or fewer rows"
        )
    longest = planner.most_length(use, budget)
    if known is None:
        use = replace(use, length=longest, prompt=None if prompt is None else min(prompt, longest))
    found = planner.plan(planner.in_chunks(use, budget))
    longest_use = replace(use, length=longest, prompt=None if prompt is None else min(prompt, longest))
    most_rows = None if known is None else planner.most_rows(use, budget)
    return replace(
        found,
        memory=budget,
        most_length=longest,
        most_length_chunk=planner.in_chunks(longest_use, budget).chunk if longest else None,
        most_rows=most_rows,
        bandwidth=rate,
        link=way,
    )


def bytes_on(residence: str, found: Iterable[Line]) -> int:
    """Of all lines that live there."""
    return sum(line.nbytes for line in found if line.residence == residence)


class _Planner:
    """The parts of plans for one model."""

    def __init__(self, subject: MetaModel, gpu: bool) -> None:
        self.subject, self.model = subject, subject.model
        self.weights, self.rehearsal = subject.weights, Rehearsal(subject.model, gpu)

    def scratch(self, use: Use, cache: Cache) -> int | None:
        try:
            return scratch_of(self.model, self.rehearsal, use, cache)
        except RuntimeError:  # a block of one's own that wants numbers, or an operation without a form for meta
            return None

    def total(self, use: Use, budget: int | None = None) -> int:
        """The most that is held at once; a part of it that is more than the budget will do."""
        cache, growing = lay_out(self.model, use)
        kept = self.weights + bytes_on("device", lines_of(cache))
        if budget is not None and kept + growing > budget:
            return kept + growing
        return kept + max(growing, self.scratch(use, cache) or 0)

    def plan(self, use: Use) -> Plan:
        cache, growing = lay_out(self.model, use)
        moved = decode_bytes(self.model, use.rows, use.length, source=use.source, codec=use.codec)
        fetched = None
        if use.residence == "host":
            fetched = fetched_bytes(self.model, use.rows, use.length, source=use.source, codec=use.codec)
        return Plan(
            self.subject.name, self.subject.dtype, use, self.weights, tuple(lines_of(cache)), growing,
            self.scratch(use, cache), self._rooms(use), moved, self.model.context, fetched=fetched,
            by_kernels=self.rehearsal.gpu,
        )  # fmt: skip

    def in_chunks(self, use: Use, budget: int) -> Use:
        """The same with the chunk that `generate` chooses: all, or the largest that fits, or else the smallest there
        is. As there, a pass may take the share `SHARE` of what weights and cache leave."""
        if use.prefill_chunk is not None:
            return use
        while (less := smaller(use.chunk, use.rows)) is not None:
            cache, _ = lay_out(self.model, use)
            left = budget - self.weights - bytes_on("device", lines_of(cache))
            if (self.scratch(use, cache) or 0) <= SHARE * left:
                break
            use = replace(use, prefill_chunk=less)
        return use

    @staticmethod
    def _in_least_chunks(use: Use) -> Use:
        least = 1 << (max(LEAST, FEW // use.rows) - 1).bit_length()
        return use if use.prefill_chunk is not None else replace(use, prefill_chunk=least)

    def _rooms(self, use: Use) -> tuple[Room, ...]:
        ways = {
            "reserved": replace(use, page=None, capacity=None, reserve=True),
            "fixed": replace(use, page=None, capacity=use.length, reserve=True),
            "grown": replace(use, page=None, capacity=None, reserve=False, prompt=1),
        }
        found = {way: lay_out(self.model, one) for way, one in ways.items()}
        return tuple(
            Room(way, bytes_on("device", lines_of(cache)), more, bytes_on("host", lines_of(cache)))
            for way, (cache, more) in found.items()
        )

    def most_rows(self, use: Use, budget: int) -> int:
        return largest(lambda n: self.total(self._in_least_chunks(replace(use, rows=n)), budget), budget)

    def most_length(self, use: Use, budget: int) -> int:
        def total(length: int) -> int:
            prompt = None if use.prompt is None else min(use.prompt, length)
            one = replace(use, length=length, prompt=prompt, capacity=use.capacity and length)
            return self.total(self._in_least_chunks(one), budget)

        return largest(total, budget, self.model.max_positions)
