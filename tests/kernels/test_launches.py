"""What a captured step launches: kernels of ours alone, and no more of them than a layer is meant to have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from lamina import kernels
from lamina.attention import Full
from lamina.cache.memory import Memory
from lamina.config import Config
from lamina.models.deepseek_v3 import LatentAttention
from lamina.runtime.tables import DeviceLatent
from tests.families.cases.deepseek_v3 import make
from tests.kernels.stores import Held


class Launched(TorchDispatchMode):
    """Kernels of ours by name, and what PyTorch computes, in order; views and new memory are neither."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = False
        launch = GridExecutor.__call__

        def counted(executor: Any, *args: Any, **how: Any) -> Any:
            self.names.append(executor.fn.__name__)
            self.inside = True  # the interpreter's own use of PyTorch does not count
            found = launch(executor, *args, **how)
            self.inside = False
            return found

        monkeypatch.setattr(GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        made = isinstance(found, Tensor) and not function.is_view and "empty" not in str(function)
        if made and not self.inside:
            self.names.append(str(function))
        return found


@pytest.mark.parametrize(("q_rank", "before"), [(None, ["rows"]), (12, ["rows", "norm", "rows"])])
def test_latent_attention_is_products_and_three_launches(
    q_rank: int | None, before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = LatentAttention(Config(make(q_lora_rank=q_rank).to_dict())).requires_grad_(False)
    held = Held.random(Full(), [9, 0], 1, (attention.spec.rank + attention.spec.rope_dim,), slots=16, counts=[1, 1])
    layer = DeviceLatent(attention.spec, held.table())
    x, angles = torch.randn(2, 1, 32), torch.rand(2, 1, attention.spec.rope_dim // 2)
    memory = Memory(None, 0, {"attention": layer})  # type: ignore[arg-type, dict-item]
    rope = angles.cos(), angles.sin()
    with kernels.in_use():
        attention(x, memory, rope, onto=x)  # what is made once is there
        with Launched(monkeypatch) as launched:
            attention(x, memory, rope, onto=x)
    products = {"rows_kernel": "rows", "tiles_kernel": "rows", "_norm_kernel": "norm"}
    found = [products.get(name, name) for name in launched.names]
    assert found == [*before, "_into_latent", "_attend_latent", "_out_of_latent", "rows"]
