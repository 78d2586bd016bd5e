from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.bench.random_model import random_model
from lamina.cache import Codec
from lamina.cache.spec import Attention, Convolution, Cross, Keeping, Latent, Recurrent, Shared, Tokens
from lamina.errors import InputError
from lamina.planning.bytes import Moved, decode_bytes, distinct_experts, moved_by, visible, weight_bytes
from lamina.recurrence import SSD
from tests.bench.small import small
from tests.laws.outside import Peak


@pytest.mark.parametrize("window", [Full(), Sliding(1), Sliding(7), Sliding(5, keep=3), Chunked(6)])
def test_visible_tokens_are_those_that_the_window_sees(window: Window) -> None:
    for position in range(30):
        seen = window.sees(torch.tensor(position), torch.arange(position))
        assert visible(window, position) == int(seen.sum())


def kept(size: int) -> Keeping:
    dtype = {2: torch.bfloat16, 4: torch.float32}[size]
    return Keeping(5, None, 3, dtype, torch.device("cpu"))  # rows and slack of the cache do not matter here


def test_each_kind_of_memory_moves_what_it_keeps() -> None:
    assert moved_by(Attention(2, 8, 6), 3, 100, kept(2)) == Moved(tokens=3 * 100 * 2 * 14 * 2, new=3 * 2 * 14 * 2)
    sliding = Attention(2, 8, 8, Sliding(16))
    assert moved_by(sliding, 1, 100, kept(2)) == Moved(tokens=15 * 2 * 16 * 2, new=2 * 16 * 2)
    assert moved_by(Latent(16, 4), 2, 10, kept(4)) == Moved(tokens=2 * 10 * 20 * 4, new=2 * 20 * 4)
    assert moved_by(Tokens(5), 1, 10, kept(4)) == Moved(tokens=10 * 5 * 4, new=5 * 4)
    assert moved_by(Convolution(6, 4), 2, 100, kept(2)) == Moved(states=2 * 4 * 6 * 2)  # three read, one written
    assert moved_by(Convolution(6, 4), 2, 1, kept(2)) == Moved(states=2 * 2 * 6 * 2)
    rule = SSD(4, 8, 16, 1)
    assert moved_by(Recurrent(rule), 3, 100, kept(2)) == Moved(states=3 * 2 * 4 * 8 * 16 * 4)  # float32 all the same
    assert moved_by(Cross(2, 8, 6), 3, 10, kept(2)) == Moved(tokens=3 * 10 * 2 * 14 * 2)


@pytest.mark.parametrize("codec", ["int8", "k5v4", "fp8"])
def test_a_source_in_codes_moves_the_bytes_of_its_codes(codec: str) -> None:
    spec, keeping = Cross(2, 32, 64), replace(kept(2), codec=Codec.of(codec))
    moved = moved_by(spec, 3, 10, keeping)
    as_tokens = moved_by(Attention(2, 32, 64), 3, 10, keeping)
    assert moved == Moved(tokens=as_tokens.tokens)
    assert moved.tokens < moved_by(spec, 3, 10, kept(2)).tokens


def test_a_kind_from_outside_moves_all_that_it_stores() -> None:
    assert moved_by(Peak(3), 5, 100, kept(2)) == Moved(states=5 * 2 * 2 * 3 * 2)  # two slots of 3 values each


def test_a_decoder_reads_its_source_and_none_of_the_encoders_weights() -> None:
    config = dict(
        model_type="t5", d_model=16, d_kv=4, num_heads=4, d_ff=24, num_layers=3, num_decoder_layers=2, vocab_size=67,
        relative_attention_num_buckets=8, layer_norm_epsilon=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    model = random_model(config, torch.float32, "cpu")
    with pytest.raises(InputError, match="reads a source: say how many tokens it has with source=…"):
        decode_bytes(model, 2, 10)
    moved = decode_bytes(model, 2, 10, source=5)
    assert moved.tokens == 2 * 2 * (10 + 5) * 4 * 8 * 4  # rows, layers, tokens, heads, key and value, bytes
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters()) - 16 * 32 * 4  # but for cross keys
    rest = model.norm.weight.nbytes + model.head.weight.nbytes + model.bias.weight.nbytes  # type: ignore[union-attr, operator]
    assert moved.weights == 2 * block + rest + 2 * 16 * 4  # and two lines of the embedding


def test_a_layer_that_shares_anothers_tokens_reads_them_and_writes_none() -> None:
    model = random_model(small("llama-3.1-8b"), torch.float32, "cpu")
    alone = decode_bytes(model, 2, 50)
    model.blocks[1].specs = {"attention": Shared(0)}  # type: ignore[assignment]
    sharing = decode_bytes(model, 2, 50)
    assert sharing.tokens == alone.tokens
    assert sharing.new == alone.new / 2


def test_every_weight_is_read_once_and_of_the_embedding_only_the_rows_lines() -> None:
    untied = random_model(small("llama-3.1-8b"), torch.bfloat16, "cpu")
    every = sum(parameter.nbytes for parameter in untied.parameters())
    table = 67 * 32 * 2
    assert weight_bytes(untied, rows=3) == every - table + 3 * 32 * 2
    assert weight_bytes(untied, rows=1000) == every
    tied = random_model(small("smollm2-135m"), torch.bfloat16, "cpu")
    assert weight_bytes(tied, rows=3) == sum(parameter.nbytes for parameter in tied.parameters())


def test_only_the_experts_that_are_visited_are_read() -> None:
    model = random_model(small("qwen3-next"), torch.float32, "cpu")
    expert = 3 * 32 * 16 * 4
    layers = 4
    one, all_of_them = weight_bytes(model, 1), weight_bytes(model, 1, experts=8)
    assert all_of_them - one == pytest.approx(layers * 5 * expert)
    several = weight_bytes(model, 4) - 3 * 32 * 4  # three more lines of the embedding
    assert several - one == pytest.approx(layers * (distinct_experts(8, 3, 4) - 3) * expert)


def test_the_expected_number_of_experts_is_that_of_random_choices() -> None:
    rng = random.Random(0)
    tries = [len({e for _ in range(4) for e in rng.sample(range(16), 3)}) for _ in range(4000)]
    assert distinct_experts(16, 3, 4) == pytest.approx(sum(tries) / len(tries), rel=0.02)
