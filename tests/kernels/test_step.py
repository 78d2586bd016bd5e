"""The two ends of a captured step, against plain Python."""

from __future__ import annotations

import copy

import pytest
import torch

from lamina.kernels.columns import header_row
from lamina.kernels.step_ends import STRETCH, commit_tokens, finish, positions, scratch_for
from lamina.runtime import Graphs
from lamina.sampling.chooser import Chooser
from lamina.sampling.noise import draw
from tests.families.harness import pair


def header_of(
    lengths: torch.Tensor, written: torch.Tensor, base: torch.Tensor, record: torch.Tensor, logits: torch.Tensor,
    slack: int = 0,
) -> torch.Tensor:  # fmt: skip
    tensors = {"lengths": lengths, "written": written, "base": base, "record": record, "logits": logits}
    pointers = {name: one.data_ptr() for name, one in tensors.items()}
    return torch.tensor(header_row(pointers | {"record_width": record.shape[1], "slack": slack}))


def base_after(base: int, after: int, slack: int) -> int:
    """Where the base of a row is after commit: see `lamina.cache.layers.recurrent`."""
    return after - slack if after - base > 2 * slack or not slack else base


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(("rows", "vocab", "slack"), [(1, 7, 0), (3, STRETCH, 0), (5, 2 * STRETCH + 13, 2)])
def test_finish_chooses_commits_and_ends_rows(rows: int, vocab: int, slack: int, sample: bool) -> None:
    torch.manual_seed(rows)
    lengths, written, base = (torch.randint(0, 9, (rows,)) for _ in range(3))
    base = torch.minimum(base, lengths) if slack else base
    record, kept = torch.full((rows, 16), -1), torch.full((rows, vocab), -7.0)
    header = header_of(lengths, written, base, record, kept, slack)
    ids = torch.randint(0, 6, (rows, 1))
    counts, left = torch.ones(rows, dtype=torch.int64), torch.arange(1, rows + 1)
    counts[-1:] = rows == 1  # with several rows, the last one has ended before
    ends = torch.tensor([4, 5, -1])
    logits = torch.randn(rows, vocab)
    before = {name: t.clone() for name, t in locals().items() if isinstance(t, torch.Tensor)}
    scratch = scratch_for(rows, vocab, torch.device("cpu"))
    at = torch.zeros(rows, 1, dtype=torch.int64)
    positions(header, at)
    assert torch.equal(at[:, 0], lengths)

    scores = torch.randn(rows, vocab)  # what processors made of the logits
    scores[0, -1] = scores[0].max()  # of equal ones the first is taken
    seed, numbers = torch.tensor([2**40 + 3]), torch.arange(rows) + 7
    chosen = draw(scores, int(seed), numbers, lengths + 1) if sample else scores.argmax(dim=-1)
    finish(logits, scores, (seed, numbers) if sample else None, header, ids, counts, left, ends, scratch, slack > 0)
    for r in range(rows):
        fed, live = int(before["ids"][r]), bool(before["counts"][r])
        assert lengths[r] == before["lengths"][r] + int(live)
        assert written[r] == (max(before["written"][r], before["lengths"][r] + 1) if live else before["written"][r])
        assert base[r] == (base_after(before["base"][r], lengths[r], slack) if live else before["base"][r])
        assert torch.equal(kept[r], logits[r] if live else before["kept"][r])
        assert ids[r] == (chosen[r] if live else fed)
        assert left[r] == before["left"][r] - int(live)
        assert counts[r] == (live and fed not in (4, 5) and left[r] > 0)
        assert record[r].tolist() == [fed if live and p == before["lengths"][r] else -1 for p in range(16)]
    assert (scratch[2] == 0).all()


@pytest.mark.parametrize(("T", "vocab", "slack"), [(1, 7, 0), (5, STRETCH, 0), (8, STRETCH + 13, 3), (2, 7, 1)])
def test_commit_tokens_records_the_accepted_tokens_and_leaves_other_rows_alone(T: int, vocab: int, slack: int) -> None:
    torch.manual_seed(T)
    rows = 4
    lengths, written, base = (torch.randint(0, 9, (rows,)) for _ in range(3))
    base = torch.minimum(base, lengths) if slack else base
    record, kept = torch.full((rows, 20), -1), torch.full((rows, vocab), -7.0)
    header = header_of(lengths, written, base, record, kept, slack)
    ids, logits = torch.randint(0, 60, (rows, T)), torch.randn(rows, T, vocab)
    accepted = torch.tensor([0, 1, T // 2, T])
    before = {name: t.clone() for name, t in locals().items() if isinstance(t, torch.Tensor)}
    at = torch.zeros(rows, T, dtype=torch.int64)
    positions(header, at)
    assert torch.equal(at, lengths[:, None] + torch.arange(T))
    positions(header, at, most=5)
    assert torch.equal(at, (lengths[:, None] + torch.arange(T)).clamp(max=4))
    commit_tokens(logits, header, ids, accepted, slack > 0)
    for r, count in enumerate(accepted.tolist()):
        start = int(before["lengths"][r])
        after = start + count
        assert lengths[r] == after
        assert written[r] == (max(before["written"][r], after) if count else before["written"][r])
        assert base[r] == (base_after(before["base"][r], after, slack) if count else before["base"][r])
        assert torch.equal(kept[r], logits[r, count - 1] if count else before["kept"][r])
        assert record[r].tolist() == [-1] * start + ids[r, :count].tolist() + [-1] * (20 - after)


def test_a_model_that_was_converted_is_captured_anew() -> None:
    model = copy.deepcopy(pair("llama", "grouped")[1])
    graphs = Graphs(model)
    with graphs.step(1, Chooser()) as first:
        pass
    with graphs.step(1, Chooser()) as again:
        assert again is first
        model.to(torch.bfloat16)
        with graphs.step(1, Chooser()) as other:
            assert other is not first
    with graphs.step(1, Chooser()) as again:  # what was lent while the model was converted is not kept
        assert again is other
