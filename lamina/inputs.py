"""Checks the inputs of a pass before anything runs: ids, embeddings, and one value per token (spans, segments)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.counts import Counts, CountsLike
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.model import Model


def checked_ids(
    model: Model,
    ids: Tensor | Sequence[Sequence[int]] | None,
    embeds: Tensor | None,
    counts: CountsLike | None,
    vocab: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Checks ids [B, T] or embeds [B, T, width], of which one must be given, and moves it to the model's device.

    vocab   the size of the vocabulary; None: the model's
    """
    if (ids is None) == (embeds is None):
        raise InputError("give either ids or embeds")
    if embeds is not None:
        if embeds.dim() != 3 or embeds.shape[1] == 0:
            raise InputError(f"embeds must be [B, T, width] with at least one token, not {list(embeds.shape)}")
        return None, embeds.to(model.device, model.dtype)
    ids = torch.as_tensor(ids)
    if ids.dim() != 2 or 0 in ids.shape:
        raise InputError(f"ids must be [B, T] with at least one token, not {list(ids.shape)}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(f"ids must be whole numbers, not {ids.dtype}")
    if ids.device.type == "cpu" and not (isinstance(counts, Tensor) and counts.device.type != "cpu"):
        check_ids(ids, model.vocab if vocab is None else vocab, counts)
    return ids.to(model.device, torch.int64), None


def checked_marks(model: Model, name: str, marks: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """Checks one value per token, [B, T], and moves the tensor to the model's device."""
    if marks is None:
        return None
    if marks.shape != torch.Size(shape):
        raise InputError(f"{name} must be one number per token, {list(shape)}, not {list(marks.shape)}")
    return marks.to(model.device)


def check_ids(ids: Tensor, vocab: int, counts: CountsLike | None = None) -> None:
    """Raises InputError for ids outside the vocabulary, among the first `counts` of each row."""
    real = None if counts is None else Counts.of(counts, ids.shape[0], ids.shape[1], ids.device, "counts")
    if ids.device.type == "cpu" and all_known(ids, vocab):
        return
    bad = (ids < 0) | (ids >= vocab)
    if real is not None:
        bad = bad & (torch.arange(ids.shape[1], device=ids.device) < real.tensor[:, None])
    if bool(bad.any()):
        row, at = (int(i) for i in bad.nonzero()[0])
        raise InputError(
            f"id {int(ids[row, at])} at row {row}, token {at} is not in the vocabulary: ids go from 0 to {vocab - 1}"
        )


def all_known(ids: Tensor, vocab: int) -> bool:
    """Whether every id is in the vocabulary, those of padding too.

    >>> all_known(torch.tensor([[0, 9]]), 10), all_known(torch.tensor([[10]]), 10)
    (True, False)
    """
    if ids.numel() == 0:
        return True
    least, most = torch.stack(ids.aminmax()).tolist()  # one read from the device
    return least >= 0 and most < vocab


def random_ids(vocab: int, shape: tuple[int, int], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Random ids of this shape, on the generator's device, or on `device` without one."""
    return torch.randint(vocab, shape, generator=generator, device=device if generator is None else generator.device)
