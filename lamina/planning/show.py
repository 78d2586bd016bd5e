"""A plan in words: one table, for `print` and for the terminal, and what follows from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.cache.summary import aligned, size

if TYPE_CHECKING:
    from rich.table import Table

    from lamina.planning.planner import Plan

HEAD = ("what", "layers", "slots", "dtype", "bytes", "")
LEFT = (0, 3)

NOT_COUNTED = (
    "what kernels take inside themselves, captured steps, choosing tokens,",
    "the allocator's rounding, the driver; rows are taken to be of one length",
)


def title(plan: Plan) -> str:
    use = plan.use
    rows = f"{use.rows:,} row{'s' * (use.rows != 1)} of {use.length:,} tokens"
    how = [f"capacity {use.capacity:,}"] if use.capacity is not None else []
    how += [f"in pages of {use.page}"] if use.page is not None else []
    how = how or ["reserved" if use.reserve else "grown"]
    how += [f"slack {use.slack}"] if use.slack else []
    how += ["on the host"] if use.residence == "host" else []
    how += [f"a source of {use.source:,} tokens"] if use.source is not None else []
    passes = "one pass" if use.chunk == use.read else f"chunks of {use.chunk:,}"
    how.append(f"prompt of {use.read:,} in {passes}")
    return f"{plan.name} in {plan.dtype}: {rows}, {', '.join(how)}"


def body(plan: Plan) -> list[tuple[str, ...]]:
    """One line for each part; the last is all of them."""
    found = [("weights", "", "", plan.dtype, f"{plan.weights:,}", size(plan.weights))]
    for line in plan.lines:
        layers, slots = ("" if n is None else f"{n:,}" for n in (line.layers, line.slots))
        kind = line.kind if line.residence == "device" else f"{line.kind}, on the host"
        found.append((kind, layers, slots, line.dtype, f"{line.nbytes:,}", size(line.nbytes)))
    most, what = max((plan.scratch or 0, "scratch of a pass"), (plan.growing, "copies while growing"))
    found.append((what, "", "", "", f"{most:,}", size(most)))
    if plan.host:
        found.append(("all, on the host", "", "", "", f"{plan.host:,}", size(plan.host)))
    everywhere = "all, on the device" if plan.host else "all"
    return [*found, (everywhere, "", "", "", f"{plan.total:,}", size(plan.total))]


def remarks(plan: Plan) -> list[str]:
    """What follows from the table, a line each."""
    use = plan.use
    rows = f"{use.rows:,} row{'s' * (use.rows != 1)}"
    found: list[tuple[str, str]] = []
    if plan.memory is not None:
        left = plan.memory - plan.total
        word = f"{size(left)} are left" if left >= 0 else f"it does not fit, {size(-left)} are lacking"
        found.append(("budget", f"{size(plan.memory)}: {word}"))
        chunk = plan.most_length_chunk or 0
        more = f", read in chunks of {chunk:,}" if 0 < chunk < (plan.most_length or 0) else ""
        found.append(("largest context", f"{plan.most_length:,} tokens for {rows}{more}"))
    if plan.most_rows is not None:
        found.append(("most rows", f"{plan.most_rows:,} of {use.length:,} tokens"))
    longest = max(use.length, plan.most_length or 0)
    if plan.positions is not None and longest > plan.positions:
        past = f"beyond the {plan.positions:,} positions that the model was made for"
        found.append(
            ("context", f"{longest:,} tokens are {past}: generate ends rows there, unless beyond_context=True")
        )
    for room in plan.rooms:
        more = f", and {size(room.growing)} besides while it grows" if room.growing else ""
        host = f"{size(room.host)} on the host, " if room.host else ""
        found.append((f"cache, {room.way}", f"{host}{size(room.nbytes)}{more}"))
    if (moved := plan.moved) is not None:
        parts = {"weights": moved.weights, "kept tokens": moved.tokens, "new tokens": moved.new, "states": moved.states}
        text = ", ".join(f"{what} {size(round(n))}" for what, n in parts.items() if n)
        found.append(("decode step", f"moves {size(round(moved.total))}: {text}"))
    if plan.fetched is not None:
        found.append(("", f"of it between host and device: {size(round(plan.fetched))}"))
    if plan.tokens_per_second is not None:
        rates = [rate(one) for one in (plan.bandwidth, plan.link if plan.fetched else None) if one is not None]
        found.append(("speed", f"at most {plan.tokens_per_second:,.1f} tokens/s at {' and '.join(rates)}"))
    if plan.scratch is not None and not plan.by_kernels:
        found.append(("scratch", "that of PyTorch's operations, without kernels"))
    if plan.scratch is None:
        found.append(("scratch", "not known: a pass of this model does not run on the meta device"))
    found += zip(("not counted", ""), NOT_COUNTED, strict=True)
    width = max(len(label) for label, _ in found)
    return [f"{label.ljust(width)}  {text}" for label, text in found]


def rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e12:.4g} TB/s" if bandwidth >= 1e12 else f"{bandwidth / 1e9:.4g} GB/s"


def text(plan: Plan) -> str:
    return "\n".join([title(plan), *aligned([HEAD, *body(plan)], LEFT), *remarks(plan)])


def rich_table(plan: Plan) -> Table:
    from rich.table import Table

    table = Table()
    for i, name in enumerate(HEAD):
        table.add_column(name, justify="left" if i in LEFT else "right")
    *parts, last = body(plan)
    for line in parts:
        table.add_row(*line)
    table.add_section()
    table.add_row(*last, style="bold")
    return table
