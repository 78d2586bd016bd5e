"""Stores with ragged rows, their table as kernels read it, and the reference's view of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.attention import View, Window, reference_attention
from lamina.cache.codec.codec import Codec
from lamina.cache.codec.formats import Field, FieldFormat, fill_value
from lamina.cache.codec.registry import make_format
from lamina.cache.layers.layout import Layout
from lamina.cache.layers.token_store import layout_for
from lamina.cache.storage.device import write_slots
from lamina.kernels.columns import entry_row


@dataclass
class Held:
    """Rows of some lengths in stores [B, H, S, D]: every slot that no committed token is in holds NaN."""

    fields: list[Tensor]
    layout: Layout
    window: Window
    lengths: Tensor  # [B]
    counts: Tensor | None  # [B]

    @classmethod
    def random(
        cls,
        window: Window,
        lengths: list[int],
        heads: int,
        dims: tuple[int, ...],
        *,
        slots: int,
        counts: list[int] | None = None,
        slack: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        ring: bool = True,
    ) -> Held:
        layout = layout_for(window, slack) if ring else Layout()
        slots = slots if layout.most is None else layout.most
        at = torch.tensor(lengths, device=device)
        held = layout.positions(slots, at)  # [B, S]
        if window.span is not None:  # out of reach of every query: may hold anything
            keep = getattr(window, "keep", 0)
            held = torch.where((held <= (at - window.span)[:, None]) & (held >= keep), -1, held)
        fields = []
        for dim in dims:
            store = torch.randn(len(lengths), heads, slots, dim, device=device).to(dtype)
            fields.append(store.masked_fill_((held < 0)[:, None, :, None], float("nan")))
        return cls(fields, layout, window, at, None if counts is None else torch.tensor(counts, device=device))

    @property
    def slots(self) -> int:
        return self.fields[0].shape[2]

    def table(self) -> Tensor:
        return self.row(dict(zip("kv", self.fields, strict=False)))

    def row(self, parts: dict[str, Tensor], **others: int) -> Tensor:
        """The row of a table with these parts (names of columns -> stores), and with other columns as given."""
        values = {name: part.data_ptr() for name, part in parts.items()}
        values |= {"slots": self.slots, "ring": self.layout.ring or 0, "keep": self.layout.keep}
        values |= {"lengths": self.lengths.data_ptr(), "counts": 0 if self.counts is None else self.counts.data_ptr()}
        return torch.tensor(entry_row(values | others), device=self.lengths.device)

    def real(self, T: int) -> Tensor:
        """Which of the new tokens are no padding, [B, T]."""
        t = torch.arange(T, device=self.lengths.device).expand(len(self.lengths), T)
        return t < T if self.counts is None else t < self.counts[:, None]

    def view(self, T: int) -> View:
        """What the new tokens see of the store and, behind it, of themselves."""
        new = self.lengths[:, None] + torch.arange(T, device=self.lengths.device)
        held = self.layout.positions(self.slots, self.lengths)
        return View(new, torch.cat([held, torch.where(self.real(T), new, -1)], dim=1), self.window)

    def attend(self, q: Tensor, new: list[Tensor], dtype: torch.dtype = torch.float64, **how: object) -> Tensor:
        """The reference over the stored and the new tokens, q [B, Hq, T, D]."""
        # A slot out of reach keeps its position, so that the view hides it, but NaN times 0 is NaN.
        k, v = (torch.cat([a.nan_to_num(0), b], dim=2) for a, b in zip(self.fields, new, strict=True))
        return reference_attention(q, k, v, self.view(q.shape[2]), dtype=dtype, **how)  # type: ignore[arg-type]

    def after(self, new: list[Tensor]) -> list[Tensor]:
        """The stores once each real token of new [B, H, T, D] is in its slot."""
        fields = [field.clone() for field in self.fields]
        for row, t in self.real(new[0].shape[2]).nonzero().tolist():
            slot = self.layout.slots(self.lengths[row] + t).reshape(1, 1)
            for field, x in zip(fields, new, strict=True):
                write_slots(field, torch.tensor([row], device=field.device), slot, x[row : row + 1, :, t : t + 1])
        return fields


class Packed:
    """The fields of `held` as a codec stores them: parts, formats, and the same tokens as they are seen, rounded to the
    dtype of the fields, or exactly."""

    def __init__(self, held: Held, codec: str | Codec, *, rotated: bool = True, has_mean: bool = True) -> None:
        codec, first = Codec.of(codec), held.fields[0]
        names, how = ("k", "v")[: len(held.fields)], (codec.keys, codec.values)
        self.held, self.parts = held, dict[str, Tensor]()
        self.formats, self.exact_formats = dict[str, FieldFormat](), dict[str, FieldFormat]()
        fields, exact_fields = [], []
        for name, chosen, field in zip(names, how, held.fields, strict=False):
            exact = torch.promote_types(field.dtype, torch.float32)
            mean = torch.randn(field.shape[1], 1, field.shape[3], dtype=exact, device=field.device)
            key_mean = mean if has_mean and name == "k" else None
            if chosen == "plain":
                self.parts[name] = field
                fields.append(field)
                exact_fields.append(field.to(exact))
                continue
            for made, dtype in ((self.formats, field.dtype), (self.exact_formats, exact)):
                one = make_format(chosen, Field(field.shape[-1], dtype, field.device, rotated, key_mean))
                assert one is not None
                made[name] = one
            free = field.isnan().any(dim=-1, keepdim=True)
            parts = self.formats[name].encode(field.nan_to_num(0))
            fields.append(self.formats[name].decode(parts))
            exact_fields.append(self.exact_formats[name].decode(parts))
            for part, numbers in parts.items():
                column = name if part == "codes" else f"{name}.{part}"
                self.parts[column] = numbers.masked_fill(free, fill_value(numbers, float("nan"))).contiguous()
        assert first.dtype == held.fields[-1].dtype
        self.seen, self.exact = (
            Held(some, held.layout, held.window, held.lengths, held.counts) for some in (fields, exact_fields)
        )

    def table(self) -> Tensor:
        return self.held.row(self.parts)

    def through(self, name: str, x: Tensor, exact: bool = False) -> Tensor:
        """What is seen of x [B, H, T, D], which may have NaN where it is padding."""
        if name not in self.formats:
            return x.to(torch.promote_types(x.dtype, torch.float32)) if exact else x
        chosen = self.exact_formats[name] if exact else self.formats[name]
        return chosen.decode(chosen.encode(x.nan_to_num(0)))


class InPages:
    """The same slots in pages of a pool, which lie anyhow: each row has those for its tokens and T new ones. What is in
    no row's page, and page 0, holds NaN."""

    def __init__(self, held: Held, parts: dict[str, Tensor], page: int, T: int, seed: int = 0) -> None:
        self.held, self.page, self.slots = held, page, held.slots
        B, most, generator = len(held.lengths), -(-held.slots // page), torch.Generator().manual_seed(seed)
        wrapped = (
            held.lengths if held.layout.ring is None else held.lengths.where(held.lengths + T <= held.slots, 1 << 20)
        )
        needed = (wrapped + T + page - 1) // page  # pages of each row
        there = torch.arange(most) < needed[:, None]  # [B, most]
        count = B * most + 3
        order = 1 + torch.randperm(count, generator=generator)
        self.pages = torch.where(there, order[: B * most].reshape(B, most), 0).to(torch.int32).contiguous()
        self.stores = {}
        for name, part in parts.items():
            _, H, S, width = part.shape
            store = torch.empty(1 + count, H, page, width, dtype=part.dtype)
            store.fill_(fill_value(part, float("nan")))
            padded = torch.nn.functional.pad(part.view(torch.uint8), (0, 0, 0, most * page - S)).view(part.dtype)
            cut = padded.unflatten(2, (most, page)).transpose(1, 2)  # [B, most, H, page, width]
            store[self.pages[there].long()] = cut[there]
            self.stores[name] = store
        self.before = {name: store.clone() for name, store in self.stores.items()}

    def table(self) -> Tensor:
        pages = {"pages": self.pages.data_ptr(), "pages_per_row": self.pages.shape[1]}
        return self.held.row(self.stores, slots=self.page, **pages)

    def same(self, parts: dict[str, Tensor]) -> None:
        """Every row's pages hold what the stores do, and all others are as they were."""
        for name, part in parts.items():
            store, used = self.stores[name], self.pages.unique().long()
            found = store[self.pages.long()].transpose(1, 2).flatten(2, 3)[:, :, : self.slots]  # [B, H, S, width]
            there = (self.pages > 0).repeat_interleave(self.page, dim=1)[:, None, : self.slots, None].expand_as(part)
            torch.testing.assert_close(found[there], part[there], rtol=0, atol=0, equal_nan=True)
            others = torch.ones(len(store), dtype=torch.bool).index_fill(0, used[used > 0], False)
            torch.testing.assert_close(store[others], self.before[name][others], rtol=0, atol=0, equal_nan=True)


class Ring:
    """Inputs of rows of several lengths, and the ring that keeps the newest of them; unused slots are NaN."""

    def __init__(self, history: list[Tensor], slots: int, dtype: torch.dtype = torch.float32) -> None:
        channels = history[0].shape[1]
        self.history = history  # of each row [length, C]
        self.store = torch.full((len(history), slots, channels), torch.nan, dtype=dtype)
        for row, inputs in enumerate(history):
            for position, x in enumerate(inputs):
                self.store[row, position % slots] = x
        self.lengths = torch.tensor([len(inputs) for inputs in history])

    def table(self, counts: Tensor | None) -> Tensor:
        pointers = {"k": self.store.data_ptr(), "lengths": self.lengths.data_ptr()}
        pointers["counts"] = 0 if counts is None else counts.data_ptr()
        return torch.tensor(entry_row(pointers | {"slots": self.store.shape[1], "ring": self.store.shape[1]}))

    def past(self, row: int, taps: int) -> Tensor:
        inputs = self.history[row]
        return torch.cat([torch.zeros(taps - 1, inputs.shape[1]).to(inputs), inputs])[len(inputs) :][None]


def error(ours: Tensor, truth: Tensor, real: Tensor) -> float:
    """max |a - b| / max |b| over the real tokens of [B, H, T, D]; NaN counts as infinite."""
    a, b = (x.transpose(1, 2)[real].double() for x in (ours, truth))
    if a.numel() == 0:
        return 0.0
    difference = ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()
    return difference if difference == difference else float("inf")
