"""Windows against their definition, position by position."""

from __future__ import annotations

import pytest
import torch

from lamina.attention import Chunked, Full, Sliding, Window

POSITIONS = range(14)


def definition(window: Window, q: int, kv: int) -> bool:
    if isinstance(window, Sliding):
        return kv > q - window.size or kv < window.keep
    if isinstance(window, Chunked):
        return kv // window.size == q // window.size
    return True


WINDOWS = [
    Full(),
    Sliding(1),
    Sliding(3),
    Sliding(4, keep=2),
    Sliding(20),
    Chunked(1),
    Chunked(4),
    Chunked(20),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_window_sees_what_its_definition_says(window: Window) -> None:
    at = torch.tensor(POSITIONS)
    expected = torch.tensor([[definition(window, q, kv) for kv in POSITIONS] for q in POSITIONS])
    assert torch.equal(window.sees(at[:, None], at[None]), expected)
    assert window.sees(at[3], at[5]).shape == ()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_span_bounds_how_far_back_a_query_sees_beyond_the_kept_tokens(window: Window) -> None:
    keep = window.keep if isinstance(window, Sliding) else 0
    reach = max(q - kv + 1 for q in POSITIONS for kv in range(keep, q + 1) if definition(window, q, kv))
    assert reach == (len(POSITIONS) if window.span is None else min(window.span, len(POSITIONS) - keep))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("slots", [0, 1, 2, 3, 4, 5])
def test_a_window_spares_a_run_of_slots_only_when_it_hides_nothing_in_any_such_run(window: Window, slots: int) -> None:
    if window.spares(slots):
        for start in range(len(POSITIONS) - slots + 1):
            run = range(start, start + slots)
            assert all(definition(window, q, kv) for q in run for kv in run if kv <= q)


def test_windows_are_values() -> None:
    assert Sliding(4, keep=1) == Sliding(4, keep=1)
    assert len({Full(), Full(), Chunked(2), Chunked(2)}) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sliding(0), r"Sliding\(size=0\): size is at least 1"),
        (lambda: Sliding(4, keep=-1), r"Sliding\(keep=-1\): keep counts first tokens"),
        (lambda: Chunked(0), r"Chunked\(size=0\): size is at least 1"),
    ],
)
def test_impossible_sizes_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
