"""The convolution kernel: a few tokens on the cache's ring are the convolution by steps."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.activation import ACTIVATIONS, activation
from lamina.errors import InputError
from lamina.kernels.recurrent import conv
from lamina.kernels.recurrent.conv_product import convolve_product_step, one_launch_is_faster
from lamina.kernels.workspace import scratch
from lamina.nn.linear import Linear
from lamina.nn.recurrent.short_conv import ShortConvolution
from lamina.recurrence import causal_convolution_by_steps
from tests.kernels.stores import Ring


def random_case(
    seed: int, tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[Ring, Tensor, Tensor, Tensor | None, Tensor]:
    """-> ring, x [B, T, C], weight [C, K], bias, counts"""
    draw, picks = torch.Generator().manual_seed(seed), random.Random(seed)
    taps, channels, rows = picks.randint(2, 5), picks.choice([3, 64, 77]), 4
    slots = taps + picks.choice([0, 0, 3])
    lengths = [0, picks.randint(1, taps), picks.randint(taps, 30), picks.randint(4, 30)]
    ring = Ring([torch.randn(n, channels, generator=draw).to(dtype) for n in lengths], slots, dtype)
    x = torch.randn(rows, tokens, channels + 5, generator=draw).to(dtype)[..., 2 : channels + 2]
    weight = torch.randn(channels, taps, generator=draw).to(dtype)
    bias = torch.randn(channels, generator=draw).to(dtype) if picks.random() < 0.5 else None
    counts = torch.tensor([picks.randint(0, tokens) for _ in range(rows - 1)] + [0])
    return ring, x, weight, bias, counts


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_on_the_ring_are_the_convolution_by_steps(seed: int, tokens: int, ragged: bool) -> None:
    ring, x, weight, bias, counts = random_case(seed, tokens)
    taps, slots, before = weight.shape[1], ring.store.shape[1], ring.store.clone()
    if ragged:
        x = x.masked_fill((torch.arange(tokens) >= counts[:, None])[..., None], torch.nan)
    out = conv.convolve_step(x, weight, bias, ring.table(counts if ragged else None))
    for row, length in enumerate(ring.lengths.tolist()):
        count = int(counts[row]) if ragged else tokens
        new = x[row : row + 1, :count]
        expected = causal_convolution_by_steps(ring.past(row, taps), new, weight, bias)
        assert torch.allclose(out[row : row + 1, :count], expected, rtol=1e-5, atol=1e-5)
        assert (out[row, count:] == 0).all()
        after = Ring([torch.cat([ring.history[row], new[0]])], slots).store[0]
        written = torch.tensor([s in {(length + t) % slots for t in range(count)} for s in range(slots)])
        assert torch.equal(ring.store[row, written], after[written])
        assert torch.equal(ring.store[row, ~written].view(torch.int32), before[row, ~written].view(torch.int32))


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_ring_that_is_not_to_be_written_stays_and_outputs_are_the_same(tokens: int) -> None:
    ring, x, weight, bias, counts = random_case(4, tokens)
    table, before = ring.table(counts), ring.store.clone()
    looked = conv.convolve_step(x, weight, bias, table, write=False)
    assert torch.equal(ring.store.view(torch.int32), before.view(torch.int32))
    assert torch.equal(looked, conv.convolve_step(x, weight, bias, table))


@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_is_summed_in_float32_and_kept_as_it_came(seed: int) -> None:
    ring, x, weight, bias, _ = random_case(seed, 2, torch.bfloat16)
    out = conv.convolve_step(x, weight, bias, ring.table(None))
    past = torch.cat([ring.past(row, weight.shape[1]) for row in range(4)])
    wide = None if bias is None else bias.double()
    truth = causal_convolution_by_steps(past.double(), x.double(), weight.double(), wide)
    assert out.dtype == torch.bfloat16
    # One step of the format: the interpreter cuts off what the device rounds.
    assert ((out - truth).abs() <= 2**-7 * truth.abs() + 1e-5).all()
    newest = (ring.lengths + 1) % ring.store.shape[1]
    assert torch.equal(ring.store[torch.arange(4), newest], x[:, 1])


@pytest.mark.parametrize("seed", range(3))
def test_a_product_of_the_convolution_can_be_in_its_launch(seed: int) -> None:
    ring, x, weight, bias, counts = random_case(seed, 1)
    module = ShortConvolution(*weight.shape, bias=bias is not None, act="silu")
    module.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    product, counts[:2] = Linear(weight.shape[0], 5, bias=False), torch.tensor([1, 0])
    other, before = ring.table(counts), ring.store.clone()
    with torch.no_grad():
        plain = conv.convolve_step(x, module.weight, module.bias, other, act="silu")
        expected, ring.store[:] = ring.store.clone(), before
        out, y = convolve_product_step(x, module, product.weight, other, tile=(2, 32, 1))
        assert torch.allclose(out, plain, rtol=1e-5, atol=1e-5)
        assert torch.allclose(y, product(plain), rtol=1e-4, atol=1e-5)
    assert torch.equal(ring.store.view(torch.int32), expected.view(torch.int32))
    assert not scratch(x.device)[1].any()
    assert one_launch_is_faster(product, 1, 1)
    assert not any(one_launch_is_faster(product, *shape) for shape in ((1, 2), (4, 1)))
    assert not one_launch_is_faster(Linear(4, 5), 1, 1) and not one_launch_is_faster(torch.relu, 1, 1)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_activation_that_follows_can_be_applied(act: str) -> None:
    ring, x, weight, bias, _ = random_case(1, 2)
    past = torch.cat([ring.past(row, weight.shape[1]) for row in range(4)])
    out = conv.convolve_step(x, weight, bias, ring.table(None), act=act)
    expected = activation(act)(causal_convolution_by_steps(past, x, weight, bias))
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3])
def test_gates_are_factors_on_what_goes_in_and_on_what_comes_out(tokens: int) -> None:
    ring, x, weight, bias, _ = random_case(2, tokens)
    wide = torch.randn(4, tokens, 2 * x.shape[2])
    gates = wide.chunk(2, dim=-1)
    past = torch.cat([ring.past(row, weight.shape[1]) for row in range(4)])
    out = conv.convolve_step(x, weight, bias, ring.table(None), act="silu", gates=(gates[0], gates[1]))
    expected = gates[1] * F.silu(causal_convolution_by_steps(past, gates[0] * x, weight, bias))
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
    newest = (ring.lengths + tokens - 1) % ring.store.shape[1]
    assert torch.allclose(ring.store[torch.arange(4), newest], (gates[0] * x)[:, -1])


def test_many_single_tokens_go_around_the_ring_like_one_long_convolution() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 15, 6, generator=draw), torch.randn(6, 4, generator=draw)
    ring = Ring([torch.zeros(0, 6)] * 2, slots=4)
    outs = []
    for t in range(15):
        outs.append(conv.convolve_step(x[:, t : t + 1], weight, None, ring.table(None), act="silu"))
        ring.lengths += 1
    expected = F.silu(causal_convolution_by_steps(torch.zeros(2, 3, 6), x, weight))
    assert torch.allclose(torch.cat(outs, 1), expected, rtol=1e-5, atol=1e-5)


def test_an_unknown_activation_is_refused_by_name() -> None:
    ring, x, weight, bias, _ = random_case(0, 1)
    with pytest.raises(InputError, match="activation 'mish' has no kernel; known: silu"):
        conv.convolve_step(x, weight, bias, ring.table(None), act="mish")
