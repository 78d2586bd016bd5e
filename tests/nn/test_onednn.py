from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lamina.activation import activation
from lamina.nn import GatedMLP, Linear, onednn

pytestmark = pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of PyTorch has no oneDNN products")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def weights(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return module


def exact(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """The same in float64, where PyTorch's own operations run."""
    found = module.double()(*(x.double() for x in inputs)).float()
    module.float()
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 100), (3, 37)])
def test_a_product_of_many_rows_and_its_residual_are_those_of_float64(shape: tuple[int, ...], bias: bool) -> None:
    linear = weights(Linear(256, 264, bias=bias))
    assert isinstance(linear, Linear)
    x, onto = torch.randn(*shape, 256), torch.randn(*shape, 264)
    strided = torch.randn(*shape, 300)[..., 20:276]
    assert onednn.fits(x, linear.weight)
    for given in ((x,), (x, onto), (strided, onto)):
        torch.testing.assert_close(linear(*given), exact(linear, *given), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new", "relu", "quick_gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_mlp_of_many_rows_is_that_of_float64(act: str, bias: bool) -> None:
    mlp = weights(GatedMLP(256, 272, act, bias=bias))
    x, onto = torch.randn(1, 90, 256), torch.randn(1, 90, 256)
    torch.testing.assert_close(mlp(x, onto), exact(mlp, x, onto), atol=3e-6, rtol=3e-6)


def test_activations_have_the_names_that_onednn_gives_them() -> None:
    x, weight = torch.randn(80, 256), torch.randn(256, 256) / 16
    for name in ("silu", "gelu", "gelu_new", "relu", "tanh"):
        act = onednn.act_of(activation(name))
        assert act is not None
        expected = activation(name)(F.linear(x, weight))
        torch.testing.assert_close(onednn.product(x, weight, None, act), expected, atol=5e-6, rtol=5e-6)
    assert onednn.act_of(activation("quick_gelu")) is onednn.act_of(activation("relu2")) is None


def test_gradients_few_rows_small_weights_and_other_dtypes_keep_the_plain_product() -> None:
    x, weight = torch.randn(80, 256), torch.randn(256, 256)
    assert onednn.fits(x, weight)
    assert not onednn.fits(x[:64], weight) and not onednn.fits(x[:, :128], weight[:, :128])
    assert not onednn.fits(x.double(), weight.double()) and not onednn.fits(x, weight.t().contiguous().t())
    with torch.enable_grad():
        assert not onednn.fits(x, weight)
        assert Linear(256, 256)(x).requires_grad
