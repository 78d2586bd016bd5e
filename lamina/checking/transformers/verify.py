"""Verifies a transformers model: the basics, then path after path over each way of keeping, and the report."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lamina.checking import tolerance
from lamina.checking.report import Difference, Report
from lamina.checking.transformers.caches import KINDS, Kept, NotTried, own, told, ways
from lamina.checking.transformers.paths import ASKED, PATHS, SERVED, UNCACHED, WITHOUT
from lamina.checking.transformers.probe import Found, Probe
from lamina.checking.transformers.subject import Subject
from lamina.checking.transformers.truth import OUTSIDE, Truth
from lamina.checking.watch import equal
from lamina.checkpoint.progress import Bar
from lamina.errors import InputError

BASICS = ("determinism", "precision", "causality")
LONGEST = 96


def is_transformers_model(model: object) -> bool:
    """Whether it is a transformers `PreTrainedModel`, found without importing transformers."""
    return any(
        one.__name__ == "PreTrainedModel" and one.__module__.partition(".")[0] == "transformers"
        for one in type(model).__mro__
    )


@torch.no_grad()
def verify_transformers(
    model: nn.Module,
    *,
    laws: Sequence[str] | None = None,
    caches: Sequence[str] = KINDS,
    rows: int = 3,
    length: int | None = None,
    tries: int = 2,
    seed: int = 0,
    residence: str = "device",
    progress: bool = True,
) -> Report:
    """Compares the cached, padded and continued passes of a transformers model with its uncached pass over each row
    alone. `laws` are names of paths (paths.py), `caches` some of "own", "static" and "lamina"; the other arguments
    are those of `lamina.verify`."""
    chosen = [law for law in PATHS if law not in ASKED] if laws is None else list(dict.fromkeys(laws))
    for law in chosen:
        if law not in PATHS:
            raise InputError(f"there is no path {law!r} of a transformers model; known: {', '.join(PATHS)}")
    if not chosen:
        raise InputError(f"laws is empty, so nothing would be checked; known: {', '.join(PATHS)}")
    subject = Subject(model)
    notes: list[str] = []
    longest = _length(subject, notes) if length is None else length
    if subject.most is not None and longest + 16 > subject.most:
        longest = max(4, subject.most - 16)  # room for what generate adds
        notes.append(f"rows have {longest} tokens: the model has positions for {subject.most}")
    lengths = [longest, *(min(longest, max(6, longest * (rows - r) // (rows + 1))) for r in range(1, rows))]
    generator = torch.Generator().manual_seed(seed)
    drawable = subject.drawable
    ids = [drawable[torch.randint(0, len(drawable), (n,), generator=generator)] for n in lengths]
    truth = Truth(subject, ids, subject.sources(rows, seed))
    run = Check(truth, chosen, laws is not None, notes, tries)
    kept = ways(subject, caches, residence)
    if not kept:
        notes.append("its forward takes no cache")
    units = [(law, way) for law in chosen for way in ([Kept(UNCACHED, own, "none")] if law in WITHOUT else kept)]
    units = [(law, way) for law, way in units if way.kind in SERVED.get(law, {way.kind})]
    with Bar("verifying", len(units) + 1, "checks", progress) as bar:
        if run.basics():
            bar.advance(1)
            for number, (law, way) in enumerate(units):
                run.try_path(law, way, random.Random(seed * 1000 + number))
                bar.advance(1)
            run.once_more()
    return run.finished()


class Check:
    """`basics`, then `try_path` for each path and cache, `once_more`, and `finished` gives the report."""

    def __init__(self, truth: Truth, laws: list[str], asked: bool, notes: list[str], tries: int) -> None:
        self.truth, self.subject, self.asked, self.tries = truth, truth.subject, asked, tries
        self.dtype = tolerance.rounds_as(self.subject.dtype, self.subject.device)
        self.report = Report(self._title(), [*BASICS, *laws], [], notes=notes)
        self.kinds: list[frozenset[str]] = []
        self._tried: dict[str, None] = {}
        self._refused: dict[tuple[str, str], str] = {}

    def basics(self) -> bool:
        """The uncached pass twice, and its rounding: whether there is something to compare with."""
        report, rows = self.report, len(self.truth.rows)
        with self._case("determinism", rows):
            self.truth.record()
            calls = sum(column.name.startswith("layer") for column in self.truth.columns)
            self.kinds = self.subject.kinds(calls)
            report.kinds = list(dict.fromkeys(kind for one in self.kinds for kind in sorted(one)))
            self._repeat(UNCACHED)
        if not report.differences:
            with self._case("precision", 1):
                self.truth.measure(self.dtype)
            report.worst["precision"] = self.truth.rounding
            if self.truth.unmeasured:
                report.notes.append(
                    f"rounding was not measured: layers do not run in double precision ({self.truth.unmeasured})"
                )
            with self._case("causality", 1):
                self._causality()
        if not report.differences:
            return True
        report.notes.append("no path was tried on a model whose passes cannot be compared")
        if any(module.training for module in self.subject.model.modules()):
            report.notes.append("the model is in training mode, in which dropout is on: call model.eval()")
        return False

    def _causality(self) -> None:
        """The first half of a row alone: later tokens must not change it, or a cache could not be right."""
        row = self.truth.rows[0][: len(self.truth.rows[0]) // 2]
        with self.truth.recorder.on():
            logits = self.subject.uncached(self.truth.ids[0][None, : len(row)], self.truth.source(0))
        (one,) = self.truth.recorder.take()
        found = Found(self.truth)
        found.add(one, logits.flatten(0, 1), [*range(len(row))], [*row])
        self._judge("causality", UNCACHED, found, "the first half of a row differs if the rest follows: ")

    def once_more(self) -> None:
        """The uncached passes again, after all others: nothing was left behind in the model."""
        with self._case("determinism", len(self.truth.rows)):
            self._repeat(f"{UNCACHED}, after all paths")

    def _repeat(self, way: str) -> None:
        then = [(column.name, column.values, column.scale, column.allowed) for column in self.truth.columns]
        kept = self.truth.columns
        now = self.truth.record()
        self.truth.columns = kept
        excused = 0.0 if self.subject.device.type == "cpu" else tolerance.least(self.dtype)
        for (name, values, scale, _), column in zip(then, now, strict=True):
            same = equal(values, column.values).flatten(1).all(dim=1)
            if bool(same.all()):
                continue
            errors = tolerance.errors(column.values, values, scale)
            self.report.worst["determinism"] = max(self.report.worst.get("determinism", 0.0), float(errors.max()))
            if excused and float(errors.max()) <= excused:
                continue
            place = min((~same).nonzero()[:, 0].tolist(), key=lambda place: self.truth.where(place)[::-1])
            said = f"two equal passes differ by {float(errors[place]):.2g} of the largest output"
            self._differs("determinism", way, name, place, float(errors[place]), excused, said=said)
            return

    def try_path(self, law: str, kept: Kept, rng: random.Random) -> None:
        """One path over one way of keeping."""
        probe = Probe(self.truth, kept, self.tries)
        self.truth.recorder.take()
        started = time.perf_counter()
        try:
            PATHS[law](probe, rng)
        except torch.OutOfMemoryError:
            raise
        except NotTried as error:
            self._refused[law, str(kept)] = str(error)
            return
        except Exception as error:  # the model's own, for all that is known
            running = self.truth.recorder.running
            name = OUTSIDE if running is None else f"layer {running}"
            said = f"raised {told(error)}"
            self.report.differences.append(
                Difference(law, str(kept), name, self._kinds(name), 0, 0, torch.inf, 0.0, said=said, raised=error)
            )
            self.report.worst[law] = torch.inf
        finally:
            self.report.seconds[law] = self.report.seconds.get(law, 0.0) + time.perf_counter() - started
        self._tried[str(kept)] = None
        self.report.cases[law] = self.report.cases.get(law, 0) + max(1, probe.cases)
        for found in probe.found:
            self._judge(law, str(kept), found)

    def _judge(self, law: str, way: str, found: Found, said: str = "") -> None:
        report, worst = self.report, found.worst()
        report.tokens += len(found.places)
        report.worst[law] = max(report.worst.get(law, 0.0), worst)
        known = {(one.law, one.way) for one in report.differences}
        if (first := found.first()) is None or (law, way) in known:
            return
        column, place, error = first
        row, position = found.truth.where(place)
        said += f"error {error:.2g} of the largest output, allowed {column.allowed:.2g}"
        said += f"; logits off by up to {worst:.2g}" if column.name != OUTSIDE else ""
        report.differences.append(
            Difference(
                law, way, column.name, self._kinds(column.name), row, position, error, column.allowed, said=said,
                logits=worst,
            )
        )  # fmt: skip

    def finished(self) -> Report:
        report = self.report
        reasons: dict[tuple[str, str], list[str]] = {}
        for (law, kept), why in self._refused.items():
            reasons.setdefault((law, why), []).append(kept)
        for (law, why), caches in reasons.items():
            over = f" over {', '.join(caches)}" if report.cases.get(law) else ""
            report.notes.append(f"{law} was not tried{over}: {why}")
        if not self.asked:
            refused = {law for law, _ in self._refused}
            report.laws = [law for law in report.laws if report.cases.get(law) or law not in refused]
            if self.subject.cache_name is None:
                report.laws = [law for law in report.laws if report.cases.get(law)]
        report.checked = f"layers: {' / '.join(report.kinds)}; caches: {', '.join(self._tried)}"
        order = {law: i for i, law in enumerate(report.laws)}
        report.differences.sort(key=lambda one: (order[one.law], one.way != "its cache"))
        return report

    # -- the report ------------------------------------------------------------------------------------------------

    @contextmanager
    def _case(self, law: str, cases: int) -> Iterator[None]:
        started, report = time.perf_counter(), self.report
        yield
        report.cases[law] = report.cases.get(law, 0) + cases
        report.seconds[law] = report.seconds.get(law, 0.0) + time.perf_counter() - started

    def _kinds(self, name: str) -> frozenset[str]:
        number = name.removeprefix("layer ")
        return self.kinds[int(number)] if number.isdigit() and int(number) < len(self.kinds) else frozenset()

    def _differs(self, law: str, way: str, name: str, place: int, error: float, allowed: float, **more: Any) -> None:
        row, position = self.truth.where(place)
        self.report.differences.append(
            Difference(law, way, name, self._kinds(name), row, position, error, allowed, **more)
        )

    def _title(self) -> str:
        # a transformers model is there, so the package is
        from transformers import __version__ as version

        subject = self.subject
        name, dtype = type(subject.model).__name__, str(subject.dtype).removeprefix("torch.")
        attention = getattr(subject.config, "_attn_implementation", None)
        lengths = [len(row) for row in self.truth.rows]
        return (
            f"{name} of transformers {version}: {len(subject.layers)} layers, {dtype} on {subject.device}, "
            f"{attention} attention; rows of {lengths} tokens"
        )


def _length(subject: Subject, notes: list[str]) -> int:
    wanted = max([24, *(3 * span + 8 for span in subject.spans)])
    beyond = [span for span in subject.spans if span >= LONGEST]
    if beyond:
        notes.append(f"windows of {beyond} tokens were not reached with {LONGEST}; give length= to go past them")
    return min(wanted, LONGEST)
