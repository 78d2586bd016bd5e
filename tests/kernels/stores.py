"""Stores with ragged rows, their table as kernels read it, and the reference's view of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.attention import View, Window, reference_attention
from lamina.cache.layout import Layout
from lamina.cache.place import write_slots
from lamina.cache.store import layout_for


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
        value = self.fields[1].data_ptr() if len(self.fields) > 1 else 0
        counts = 0 if self.counts is None else self.counts.data_ptr()
        numbers = [
            self.fields[0].data_ptr(), value, self.slots, self.layout.ring or 0, self.layout.keep,
            self.lengths.data_ptr(), counts, 0,
        ]  # fmt: skip
        return torch.tensor(numbers, device=self.lengths.device)

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
        pointers = self.lengths.data_ptr(), 0 if counts is None else counts.data_ptr()
        slots = self.store.shape[1]
        return torch.tensor([self.store.data_ptr(), 0, slots, slots, 0, *pointers, 0])

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
