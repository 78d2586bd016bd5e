"""The short convolution over long prompts against the reference: ragged rows, NaN in padding, slices, activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lamina.activation import ACTIVATIONS, activation
from lamina.errors import InputError
from lamina.kernels.recurrent.prompt.conv import conv_prompt
from lamina.recurrence import causal_convolution
from tests.recurrence.inputs import error

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")

SMALL = (8, 16, 4)


def case(
    tokens: int, channels: int = 21, taps: int = 4, rows: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> past, x as a slice of something wider, weight, bias"""
    torch.manual_seed(tokens + channels)
    past, x = torch.randn(rows, taps - 1, channels), torch.randn(rows, tokens, channels + 9)
    weight, bias = torch.randn(channels, taps), torch.randn(channels)
    past, x, weight, bias = (one.to(dtype) for one in (past, x, weight, bias))
    return past, x[..., 3 : channels + 3], weight, bias


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 8, 19])
def test_prompts_equal_the_reference(tokens: int, taps: int) -> None:
    past, x, weight, bias = case(tokens, taps=taps)
    for some in (bias, None):
        found = conv_prompt(past, x, weight, some, tile=SMALL)
        assert found.shape == x.shape and error(found, causal_convolution(past, x, weight, some)) < 1e-6


def test_tiles_as_configured_give_the_same() -> None:
    past, x, weight, bias = case(40, channels=150, rows=1)
    assert error(conv_prompt(past, x, weight, bias), causal_convolution(past, x, weight, bias)) < 1e-6


def test_rows_end_where_they_end_and_padding_may_be_nan() -> None:
    past, x, weight, bias = case(19, rows=4)
    counts = torch.tensor([19, 0, 8, 11])
    real = torch.arange(19) < counts[:, None]
    expected = causal_convolution(past, x, weight, bias)
    found = conv_prompt(past, x.masked_fill(~real[..., None], torch.nan), weight, bias, "silu", counts, tile=SMALL)
    assert error(found[real], torch.nn.functional.silu(expected)[real]) < 1e-6
    assert (found[~real] == 0).all()


def test_two_calls_in_sequence_are_one() -> None:
    past, x, weight, bias = case(20)
    whole = conv_prompt(past, x, weight, bias, tile=SMALL)
    first = conv_prompt(past, x[:, :2], weight, bias, tile=SMALL)
    window = torch.cat([past, x[:, :2]], 1)[:, -3:]
    second = conv_prompt(window, x[:, 2:], weight, bias, tile=SMALL)
    assert torch.allclose(torch.cat([first, second], 1), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_activation_that_follows_can_be_applied(act: str) -> None:
    past, x, weight, bias = case(5)
    expected = activation(act)(causal_convolution(past, x, weight, bias))
    assert torch.allclose(conv_prompt(past, x, weight, bias, act), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_as_exact_as_the_plain_computation() -> None:
    past, x, weight, bias = case(19, dtype=torch.bfloat16)
    truth = torch.nn.functional.silu(causal_convolution(*(one.double() for one in (past, x, weight, bias))))
    plain = torch.nn.functional.silu(causal_convolution(past, x, weight, bias))
    found = conv_prompt(past, x, weight, bias, "silu", tile=SMALL)
    assert found.dtype == torch.bfloat16 and error(found, truth) <= error(plain, truth)


def test_no_tokens_give_no_outputs() -> None:
    past, x, weight, bias = case(3)
    assert conv_prompt(past, x[:, :0], weight, bias).shape == (2, 0, 21)


def test_an_unknown_activation_is_refused_by_name() -> None:
    past, x, weight, bias = case(3)
    with pytest.raises(InputError, match="activation 'mish' has no kernel; known: silu"):
        conv_prompt(past, x, weight, bias, "mish")
