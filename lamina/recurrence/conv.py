"""The short causal convolution in front of a recurrence: each channel mixes its last K tokens.

The last K - 1 inputs must be remembered. The newest token is multiplied by the last tap of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.tracing import cast


def causal_convolution(past: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Depthwise convolution of new tokens that follow `past`.

    past [B, K-1, C] (the K-1 inputs before x, zeros before the first token), x [B, T, C], weight [C, K],
    bias [C] -> [B, T, C] in x's dtype, summed in float32 or better. No activation is applied.

    >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
    >>> causal_convolution(torch.zeros(1, 1, 1), x, torch.tensor([[10.0, 1.0]]))[0, :, 0].tolist()
    [1.0, 12.0, 23.0]
    """
    taps = weight.shape[1]
    if past.shape[1] != taps - 1:
        raise InputError(f"past holds {past.shape[1]} tokens, a kernel of {taps} taps needs {taps - 1}")
    exact = torch.promote_types(x.dtype, torch.float32)
    tokens = x.shape[1]
    window = torch.cat([cast(past, exact), cast(x, exact)], 1)  # [B, K-1+T, C]
    kernel = cast(weight, exact).t().contiguous()  # [K, C]
    # One product per tap keeps the channels contiguous: no transposes, and faster than a grouped conv1d.
    out = window[:, :tokens] * kernel[0]
    if bias is not None:
        out += cast(bias, exact)
    for tap in range(1, taps):
        out.addcmul_(window[:, tap : tap + tokens], kernel[tap])
    return cast(out, x.dtype)


def causal_convolution_by_steps(past: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The reference for `causal_convolution`: token by token, each shifted into the window."""
    exact = torch.promote_types(x.dtype, torch.float32)
    outs = []
    for token in x.unbind(1):
        window = torch.cat([past, token[:, None]], 1).to(exact)  # [B, K, C]
        out = torch.einsum("bkc,ck->bc", window, weight.to(exact))
        outs.append((out if bias is None else out + bias.to(exact)).to(x.dtype))
        past = torch.cat([past, token[:, None]], 1)[:, 1:]
    return torch.stack(outs, 1) if outs else torch.zeros_like(x)
