"""One verification: the basics, then law after law, and the report as it grows."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lamina.checking import tolerance
from lamina.checking.basics import BASICS, Found, recorded, repeated, repeated_over_caches
from lamina.checking.laws import LAWS, Way
from lamina.checking.probe import FLIPPED, EachBlock, Probe, WholeModel
from lamina.checking.reference import Reference
from lamina.checking.report import Difference, Report

UNCACHED = "without a cache"


class Verification:
    """`basics`, then `try_law` for each law and way, `once_more`, and `finished` gives the report."""

    def __init__(
        self, reference: Reference, ways: list[Way], laws: list[str], notes: list[str], tries: int, residence: str
    ) -> None:
        self.reference, self.model = reference, reference.model
        self.ways, self.tries, self.residence = ways, tries, residence
        self.dtype = tolerance.rounds_as(self.model.dtype, self.model.device)
        if self.dtype != self.model.dtype:
            notes.append("TF32 is on, so products round as in float16; verify without it for finer tolerances")
        cache = self.model.new_cache(residence=residence)
        memories = [[layer.kind for layer in entry.values()] or ["no memory"] for entry in cache.layers]
        kinds = list(dict.fromkeys(kind for entry in memories for kind in entry))
        self.kinds = [frozenset(entry) for entry in memories]
        self.report = Report(self._title(), [*BASICS, *laws], kinds, notes=notes, checked=self._checked(kinds))
        self._each: EachBlock | None = None
        self._named: set[str] = set()  # laws for which a block was named
        self._flips = 0

    @property
    def each(self) -> EachBlock:
        """Every block alone: made when a law fails."""
        if self._each is None:
            self._each = EachBlock(self.reference, self.residence)
            if self.reference.single is not None:
                self._each.rounding = [tolerance.unmeasured(self.dtype)] * len(self.kinds)
        return self._each

    def finished(self) -> Report:
        if self._flips:
            self.report.notes.append(
                f"{self._flips} tokens were left out: a near-tie of experts, or of tokens to read, was decided "
                "otherwise than without a cache, for them or for one before them"
            )
        order = {f"layer {i}": i for i in range(len(self.model.blocks))}
        self.report.differences.sort(key=lambda d: (order.get(d.where, len(order)), d.position, d.row))
        return self.report

    # -- what the laws stand on ------------------------------------------------------------------------------------

    def basics(self) -> bool:
        """Whether there is something to compare with."""
        report, rows = self.report, len(self.reference.rows)
        with self._case("determinism", rows):
            self._repeats(recorded(self.reference, UNCACHED))
        if not report.differences:
            with self._case("inputs", rows):
                self._inputs()
            with self._case("determinism", 0):
                self._repeats(repeated(self.reference, UNCACHED))
        if not report.differences:
            with self._case("determinism", 2 * rows):
                self._repeats(repeated_over_caches(self.reference, self.ways[:2], self.residence))
        if not report.differences:
            with self._case("precision", rows):
                self._precision()
        if report.differences:
            report.notes.append("no law was tried on a model whose passes cannot be compared")
            if any(module.training for module in self.model.modules()):
                report.notes.append("the model is in training mode, in which dropout is on: call model.eval()")
        return not report.differences

    def once_more(self) -> None:
        """The uncached passes again, after all others: nothing was left behind in the model."""
        with self._case("determinism", len(self.reference.rows)):
            self._repeats(repeated(self.reference, f"{UNCACHED}, after all laws"))

    def _repeats(self, found: Iterable[Found]) -> None:
        device, excused = self.model.device.type, self._excused()
        for one in found:
            self._error("determinism", one.error)
            where = "outside the blocks" if one.block is None else f"in layer {one.block}"
            if one.raised is not None:
                self.report.differences.append(self._raised("determinism", one.way, one.block, one.raised))
            elif one.error > excused or not excused:
                said = f"two equal passes differ by {one.error:.2g} of the largest output"
                self._differs("determinism", one.way, one.block, (one.row, one.position), one.error, excused, said=said)
            else:
                if not self.report.nearly:
                    self.report.notes.append(
                        f"on {device} two equal passes differ in the last bits (here by {one.error:.1e} of the largest "
                        f"output, {where}); where they do, the table says rounding"
                    )
                kinds = self.report.kinds if one.block is None else self.kinds[one.block]
                self.report.nearly |= {("determinism", kind) for kind in kinds}

    def _excused(self) -> float:
        """By how much two equal passes may differ."""
        return 0.0 if self.model.device.type == "cpu" else tolerance.least(self.dtype)

    def _inputs(self) -> None:
        for row, watch in enumerate(self.reference.watches):
            for i in watch.touched():
                said = "a block changes its input, what blocks share, or positions in place"
                self._differs("inputs", UNCACHED, i, (row, 0), 1.0, 0.0, said=said)

    def _precision(self) -> None:
        """The uncached pass beside double precision: what tolerances are made of."""
        reference, ceiling = self.reference, tolerance.ceiling(self.dtype)
        self.whole = WholeModel(reference, reference.exact(), self.residence)
        if reference.single is not None:
            self.report.notes.append(
                f"rounding was not measured: blocks do not run in double precision ({reference.single})"
            )
            self.whole.rounding = tolerance.unmeasured(self.dtype)
        self._error("precision", self.whole.rounding)
        if others := int(reference.elsewhere.sum()):
            self.report.notes.append(
                f"rounding was measured without {others} tokens: double precision decides a near-tie of experts, or of "
                "tokens to read, otherwise for them, or for one before them"
            )
        if self.whole.rounding <= ceiling:
            return
        # Past the ceiling no tolerance would tell a fault from rounding. Near-ties of experts are no rounding.
        blocks = [i for i, rounding in enumerate(self.each.rounding) if not rounding <= ceiling]
        for i in blocks:
            place = int(self.each.tables[i].rounding.argmax())
            self._differs("precision", UNCACHED, i, reference.where(place), self.each.rounding[i], ceiling)
        if not blocks and not any(table.ties for table in self.each.tables):
            where, rounding = reference.where(self.whole.roughest), self.whole.rounding
            said = (
                f"rounding alone is {rounding:.2g} of the largest logit, at most {ceiling:.2g} can be told from a fault"
            )
            self._differs("precision", UNCACHED, None, where, rounding, ceiling, said=said)

    # -- laws ------------------------------------------------------------------------------------------------------

    def try_law(self, law: str, way: Way, seed: int) -> None:
        """One law on one way of keeping; none once a block was named for it."""
        if law in self._named:
            return
        with self._case(law, self.tries * len(self.reference.rows)):
            worst, found, unsure = self._tried(self.whole, law, way, seed)
            self.report.tokens += self.whole.judged
            if found:
                alone, named, flips = self._tried(self.each, law, way, seed)
                self._flips += max(flips, unsure)
                if (flips or unsure) and not named:
                    worst, found = alone, []
                self.report.differences += named or found
                self._named |= {law} if named else set()
            self._error(law, worst)

    def _tried(self, subject: Probe, law: str, way: Way, seed: int) -> tuple[float, list[Difference], int]:
        """The largest error, each part's first token that is off by too much, and how many tokens are to be left out:
        of the whole model those that are off by too much, if a near-tie explains each of them."""
        try:
            LAWS[law](subject, way, random.Random(seed), self.tries)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's own, for all that is known
            subject.take()
            return torch.inf, [self._raised(law, str(way), subject.running, error)], 0
        places, errors = subject.take()
        differences = []
        for part, allowed in enumerate(self._allowed(subject)):
            flipped = errors[:, part] == FLIPPED
            wrong, said = errors[:, part] > allowed, None
            if 4 * int(flipped.sum()) > len(places):
                wrong, said = flipped, f"something else was chosen for {int(flipped.sum())} of {len(places)} tokens"
            over = wrong.nonzero()[:, 0].tolist()
            if over:
                n = min(over, key=lambda n: self.reference.where(places[n])[::-1])  # by position, then row
                where, block = self.reference.where(places[n]), None if subject is self.whole else part
                off = float(errors[n, part])
                differences.append(self._difference(law, str(way), block, where, off, allowed, said=said))
        if subject is not self.whole:
            return float(errors.max()), differences, int((errors == FLIPPED).sum())
        wrong = errors[:, 0] > self._allowed(subject)[0]
        near_ties = int(wrong.sum()) if bool(self.whole.unsure(places)[wrong].all()) else 0
        return float(errors.max()), differences, near_ties

    def _allowed(self, subject: Probe) -> list[float]:
        if subject is self.whole:
            return [tolerance.allowed(self.whole.rounding, self.dtype, 4.0)]
        return [tolerance.allowed(rounding, self.dtype, 2.0) for rounding in self.each.rounding]

    # -- the report ------------------------------------------------------------------------------------------------

    @contextmanager
    def _case(self, law: str, cases: int) -> Iterator[None]:
        """Counts and times what is inside."""
        started, report = time.perf_counter(), self.report
        yield
        report.cases[law] = report.cases.get(law, 0) + cases
        report.seconds[law] = report.seconds.get(law, 0.0) + time.perf_counter() - started
        self._error(law, 0.0)

    def _error(self, law: str, error: float) -> None:
        self.report.worst[law] = max(self.report.worst.get(law, 0.0), error)

    def _raised(self, law: str, way: str, block: int | None, error: Exception) -> Difference:
        said = f"raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return self._difference(law, way, block, (0, 0), torch.inf, 0.0, said=said, raised=error)

    def _differs(self, *where: Any, **more: Any) -> None:
        self.report.differences.append(self._difference(*where, **more))

    def _difference(
        self,
        law: str,
        way: str,
        block: int | None,
        where: tuple[int, int],  # row and position
        error: float,
        allowed: float,
        **more: Any,
    ) -> Difference:
        name, kinds = ("model", frozenset[str]()) if block is None else (f"layer {block}", self.kinds[block])
        return Difference(law, way, name, kinds, *where, error, allowed, **more)

    def _title(self) -> str:
        model, dtype = self.model, str(self.model.dtype).removeprefix("torch.")
        lengths = [len(row) for row in self.reference.rows]
        title = (
            f"{type(model).__name__}: {len(model.blocks)} layers, {dtype} on {model.device}; rows of {lengths} tokens"
        )
        return title + (", kept on the host" if self.residence == "host" else "")

    def _checked(self, kinds: list[str]) -> str:
        rooms = " and ".join(dict.fromkeys(way.room for way in self.ways))
        slacks = " and ".join(dict.fromkeys(str(way.slack) for way in self.ways))
        return f"layers: {' / '.join(kinds)}; codec: none; caches: {rooms}, slack {slacks}, on the {self.residence}"
