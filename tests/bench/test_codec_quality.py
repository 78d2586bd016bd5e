"""The measure of codec quality: nothing for the plain codec, less for more bits."""

from __future__ import annotations

import torch

from bench.codec_quality import PIECE, TEXT, divergences
from lamina.bench import random_model
from tests.bench.small import small


def test_plain_is_no_distance_away_and_fewer_bits_are_further() -> None:
    model = random_model(small("smollm2-135m"), torch.float32, "cpu")
    ids = torch.randint(model.vocab, (PIECE + 7,))
    far, same = divergences(model, ids, ["plain", "int8", "int4"])
    assert all(distances.shape == ids.shape for distances in far.values())
    assert far["plain"].abs().max() == 0 and same["plain"].all()
    assert 0 < far["int8"].mean() < far["int4"].mean()


def test_the_text_is_plain_english_of_a_fair_length() -> None:
    words = TEXT.read_text().split()
    assert 1500 < len(words) < 2000 and TEXT.read_text().isascii()
