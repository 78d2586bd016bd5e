"""What verify found, as a table of laws × kinds of layers, and the first place that differs."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    def __str__(self) -> str:
        kinds = f" ({', '.join(sorted(self.kinds))})" if self.kinds else ""
        return (
            f"{self.where}{kinds}, row {self.row}, position {self.position}: error {self.error:.2g} of the largest "
            f"output, allowed {self.allowed:.2g} [law {self.law}, {self.way}]"
        )


@dataclass
class Report:
    """`report.ok` says whether every law held; `print(report)` shows the table. A report is true when it is ok."""

    title: str
    laws: list[str]
    kinds: list[str]
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    """By law: the largest error of the logits, relative to the largest logit."""

    @property
    def ok(self) -> bool:
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first(self) -> Difference | None:
        """The first layer, row and position that differs."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        outside = any(not found.kinds for found in self.differences)
        columns = [*self.kinds, *(["outside blocks"] if outside else [])]
        lines = [["law", *columns, "error"]]
        for law in self.laws:
            found = [d for d in self.differences if d.law == law]
            cells = [self._cell(kind, found) for kind in columns]
            lines.append([law, *cells, f"{self.worst.get(law, 0.0):.1e}"])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        table.insert(1, "  ".join("-" * w for w in widths))
        tail = [f"note: {note}" for note in self.notes]
        if self.differences:
            tail.append(f"FAILED, first at {self.first}")
        else:
            tail.append("ok: the cache changes nothing")
        return "\n".join([self.title, *table, *tail])

    @staticmethod
    def _cell(kind: str, found: list[Difference]) -> str:
        bad = any(kind in d.kinds or (kind == "outside blocks" and not d.kinds) for d in found)
        return "FAILED" if bad else "ok"
