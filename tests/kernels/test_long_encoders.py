"""Encoders with patterns of their own: BigBird-Pegasus against its whole mask, LongT5's kernels against its blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import BigBirdPegasusConfig, LongT5Config

from lamina.config import Config
from lamina.kernels import fuses
from lamina.kernels.attention.prefill import many
from lamina.models import bigbird_pegasus, family_of, longt5
from lamina.models.bigbird_pegasus import BlockSparseAttention
from lamina.planning.meta_model import subject_of
from lamina.rehearsal.rehearsal import Fused, as_on_gpu
from tests.families.encoder_decoder_cases import FAMILIES, pair_of
from tests.families.harness import relative
from tests.largest import Largest

BLOCK, SPARE = 4, 1


def sparse_attention() -> BlockSparseAttention:
    config = BigBirdPegasusConfig(d_model=16, encoder_attention_heads=2, block_size=BLOCK, num_random_blocks=SPARE)
    return BlockSparseAttention(Config(config.to_dict()))


def whole_mask(length: int, counts: Tensor) -> Tensor:
    """What is added to the scores [B, 1, S, S] of rows with this many tokens [B]."""
    at, counts = torch.arange(length), counts[:, None, None]
    q, kv, last = at[:, None] // BLOCK, at // BLOCK, (counts - 1) // BLOCK
    full = (counts <= (5 + 2 * SPARE) * BLOCK) | (q == 0) | (q == last)
    seen = (full | (kv == 0) | (kv == last) | ((q - kv).abs() <= 1)) & (at < counts)
    bias = torch.where(~full & (kv == 0), math.log(1 + SPARE), 0.0)
    return bias.masked_fill(~seen, -math.inf)[:, None]


@pytest.mark.parametrize("room", [1, 1 << 15, 1 << 26])
@pytest.mark.parametrize("counts", [None, [50, 28, 29, 3], [41, 48, 32, 49]])
@torch.no_grad()
def test_gathered_blocks_give_what_the_whole_mask_gives(
    counts: list[int] | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bigbird_pegasus, "ROOM", room)
    torch.manual_seed(0)
    attention, length = sparse_attention(), 50
    real = torch.tensor([50] * 4 if counts is None else counts)
    q, k, v = torch.randn(3, 4, 2, length, 8)
    at = torch.arange(length).expand(4, -1)
    view = bigbird_pegasus.View(at, torch.where(at < real[:, None], at, -1), bigbird_pegasus.Full(), causal=False)
    found = attention.attend(q, k, v, view, None if counts is None else real)
    scores = q @ k.mT * attention.scale + whole_mask(length, real)
    expected = scores.softmax(-1) @ v
    for row, count in enumerate(real.tolist()):
        torch.testing.assert_close(found[row, :, :count], expected[row, :, :count], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES["longt5"])
@torch.no_grad()
def test_longt5_by_kernels_gives_the_states_of_its_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair_of(FAMILIES["longt5"][name]())[1]
    ids, counts = torch.randint(3, 60, (3, 29), generator=torch.Generator().manual_seed(0)), [29, 13, 2]
    expected = model.encode(ids, counts).states
    monkeypatch.setattr(longt5, "ROOM", 1)
    some = model.encode(ids, counts).states
    calls: list[int] = []
    run = many.attend_many
    monkeypatch.setattr(many, "attend_many", lambda *given, **how: calls.append(1) or run(*given, **how))
    monkeypatch.setattr("lamina.kernels.fuses", lambda x: not torch.is_grad_enabled())
    found = model.encode(ids, counts).states
    monkeypatch.setattr("lamina.kernels.fuses", fuses)
    assert len(calls) == len(model.encoder.blocks) * (1 if name == "local" else 2)
    for row, count in enumerate(counts):
        assert relative(some[row, :count], expected[row, :count]) < 1e-5
        assert relative(found[row, :count], expected[row, :count]) < 2e-4


def long_configs() -> dict[str, dict[str, object]]:
    bigbird = BigBirdPegasusConfig(
        vocab_size=64, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=16384,
    )  # fmt: skip
    summaries = LongT5Config(
        vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4,
        encoder_attention_type="transient-global",
    )  # fmt: skip
    return {"bigbird_pegasus": bigbird.to_dict(), "longt5": summaries.to_dict()}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("family", long_configs())
def test_nothing_is_as_large_as_the_square_of_a_source(family: str, gpu: bool) -> None:
    tokens = 16384
    model = subject_of(long_configs()[family], "bfloat16").model
    with torch.device("meta"), torch.no_grad(), as_on_gpu(gpu), Fused(), Largest() as made:
        model.encoder(torch.zeros(1, tokens, dtype=torch.int64), torch.full((1,), tokens))
    assert made.most <= 1 << 26  # a flag for each pair would be four times as much
    assert family_of(Config(long_configs()[family])) is type(model)
