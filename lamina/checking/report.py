"""What verify found, as a table of laws × kinds of layers, and the first place that differs."""

from __future__ import annotations

from dataclasses import dataclass, field

OUTSIDE = "outside blocks"


@dataclass(frozen=True)
class Difference:
    """One output that is further from the truth than rounding explains."""

    law: str
    way: str
    where: str  # "layer 3", or "model" when no block alone differs
    kinds: frozenset[str]
    row: int
    position: int
    error: float
    allowed: float
    said: str | None = None  # what is wrong, where it is not that error
    logits: float | None = None  # the largest error of the logits in these passes, where `error` is that of a layer
    raised: Exception | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        kinds = f" ({', '.join(sorted(self.kinds))})" if self.kinds else ""
        where = f"{self.where}{kinds}"
        if self.raised is None:
            where += f", row {self.row}, position {self.position}"
        said = self.said or f"error {self.error:.2g} of the largest output, allowed {self.allowed:.2g}"
        return f"{where}: {said} [law {self.law}, {self.way}]"


@dataclass(repr=False)
class Report:
    """`report.ok` says whether every law held; `print(report)` shows the table. A report is true when it is ok."""

    title: str
    laws: list[str]
    kinds: list[str]
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    """By law: the largest error of the logits, relative to the largest logit there."""
    cases: dict[str, int] = field(default_factory=dict)
    """By law: how many rows were run, each cut in its own way."""
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    """How many tokens' logits were compared."""
    checked: str = ""
    """The kinds of layers, codecs and layouts that the cases were of."""
    nearly: set[tuple[str, str]] = field(default_factory=set)
    """Laws and kinds that held to rounding only where they should bit for bit: on a GPU, see determinism."""

    @property
    def ok(self) -> bool:
        """True if every law was tried and none failed."""
        return not self.differences and all(self.cases.get(law) for law in self.laws) and bool(self.laws)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first(self) -> Difference | None:
        """The first layer, row and position that differs."""
        return self.differences[0] if self.differences else None

    @property
    def verdict(self) -> str:
        """The last line: one sentence."""
        cases = f"{sum(self.cases.values()):,} cases"
        if self.ok:
            return f"ok: the cache changes nothing, in {cases} of {len(self.laws)} laws"
        return f"FAILED, first at {self.first}" if self.first else f"FAILED: {cases} were checked, not every law"

    def __repr__(self) -> str:
        cases = f"{sum(self.cases.values())} cases"
        if self.first is None:
            return f"Report({'ok' if self.ok else 'FAILED'}, {cases})"
        return f"Report(FAILED at {self.first.where}, law {self.first.law}, {cases})"

    def __str__(self) -> str:
        outside = any(not found.kinds for found in self.differences)
        columns = [*self.kinds, *([OUTSIDE] if outside else [])]
        lines = [["law", *columns, "cases", "error", "seconds"]]
        for law in (law for law in self.laws if self.cases.get(law)):
            cells = [self._cell(law, kind) for kind in columns]
            numbers = [f"{self.cases[law]}", f"{self.worst.get(law, 0.0):.1e}", f"{self.seconds.get(law, 0.0):.1f}"]
            lines.append([law, *cells, *numbers])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        table.insert(1, "  ".join("-" * w for w in widths))
        tail = [f"note: {note}" for note in self.notes]
        tail += [f"checked: {self.checked}; {self.tokens:,} tokens compared"] if self.tokens else []
        if untried := [law for law in self.laws if not self.cases.get(law)]:
            tail.append(f"not tried: {', '.join(untried)}")
        return "\n".join([self.title, *table, *tail, self.verdict])

    def _cell(self, law: str, kind: str) -> str:
        found = [d for d in self.differences if d.law == law]
        if any(kind in d.kinds or (kind == OUTSIDE and not d.kinds) for d in found):
            return "FAILED"
        return "rounding" if (law, kind) in self.nearly else "ok"
