"""The short convolution: the form for many tokens against one token after the other, and against conv1d."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lamina.recurrence import causal_convolution, causal_convolution_by_steps

from .inputs import error


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 50])
def test_many_tokens_equal_one_after_the_other(tokens: int, taps: int, bias: bool) -> None:
    torch.manual_seed(tokens)
    past, x = torch.randn(2, taps - 1, 5), torch.randn(2, tokens, 5)
    weight, shift = torch.randn(5, taps), torch.randn(5) if bias else None
    out = causal_convolution(past, x, weight, shift)
    assert out.shape == x.shape
    assert error(out, causal_convolution_by_steps(past, x, weight, shift)) < 1e-6
    if tokens:
        whole = torch.cat([past, x], 1).transpose(1, 2)
        assert error(out, F.conv1d(whole, weight[:, None], shift, groups=5).transpose(1, 2)) < 1e-6


def test_any_cut_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3 + 20, 4), torch.randn(4, 4)
    whole = causal_convolution(x[:, :3], x[:, 3:], weight)
    for cut in range(21):
        first = causal_convolution(x[:, :3], x[:, 3 : 3 + cut], weight)
        second = causal_convolution(x[:, cut : 3 + cut], x[:, 3 + cut :], weight)
        assert torch.equal(torch.cat([first, second], 1), whole)


def test_bfloat16_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    past, x, weight, bias = (torch.randn(shape).bfloat16() for shape in [(2, 3, 64), (2, 30, 64), (64, 4), (64,)])
    out = causal_convolution(past, x, weight, bias)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, causal_convolution(past.float(), x.float(), weight.float(), bias.float()).bfloat16())


def test_it_compiles_to_one_graph() -> None:
    torch.manual_seed(0)
    past, x, weight, bias = torch.randn(2, 3, 4), torch.randn(2, 9, 4), torch.randn(4, 4), torch.randn(4)
    compiled = torch.compile(causal_convolution, fullgraph=True, backend="aot_eager")
    assert error(compiled(past, x, weight, bias), causal_convolution(past, x, weight, bias)) < 1e-6


def test_arguments_are_not_written_to() -> None:
    torch.manual_seed(0)
    arguments = torch.randn(2, 0, 4), torch.randn(2, 9, 4), torch.randn(4, 1), torch.randn(4)
    before = [x.clone() for x in arguments]
    causal_convolution(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))


def test_a_past_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="past holds 4 tokens, a kernel of 4 taps needs 3"):
        causal_convolution(torch.zeros(1, 4, 2), torch.zeros(1, 1, 2), torch.zeros(2, 4))
