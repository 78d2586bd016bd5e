"""DeepSeek V3.2 and GLM-5: DeepSeek V3 in which an indexer selects the tokens that a layer attends to.

https://arxiv.org/abs/2512.02556  https://arxiv.org/abs/2603.12201
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from lamina.checkpoint.names import Value
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import layer_types
from lamina.models.deepseek import DeepseekV3
from lamina.nn import Indexer, LatentAttention, Mixer


def indexer_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of `Indexer`."""
    return {
        f"{ours}.q_up": f"{theirs}.wq_b",
        f"{ours}.k_weights": (f"{theirs}.wk", f"{theirs}.weights_proj"),
        f"{ours}.k_norm": f"{theirs}.k_norm",
    }


class DeepseekV32(DeepseekV3):
    names = DeepseekV3.names | indexer_names("blocks.{i}.attention.indexer", "model.layers.{i}.self_attn.indexer")
    defaults: ClassVar[dict[str, Any]] = DeepseekV3.defaults | dict(
        index_topk=2048, index_head_dim=128, index_n_heads=64
    )
    no_effect = (*DeepseekV3.no_effect, "mlp_bias")
    interleaves = (True,)
    neighbours: ClassVar[bool] = False
    """How RoPE pairs the dimensions of the indexer's heads; attention itself always rotates neighbours."""

    def __init__(self, c: Config) -> None:
        c.require("indexer_rope_interleave", (self.neighbours,), self.neighbours)
        if c.q_lora_rank is None:
            raise InputError("q_lora_rank=null in the configuration: an indexer needs the latent of the queries")
        layer_types(c, ["indexed_attention", "deepseek_sparse_attention"], lambda i: "indexed_attention")
        super().__init__(c)

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        return LatentAttention(c, indexer=Indexer(c, self.neighbours))

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        dense = c.first_k_dense_replace
        kinds = c.get("mlp_layer_types") or ["dense" if i < dense else "sparse" for i in range(c.num_hidden_layers)]
        if layer >= len(kinds) or kinds[layer] not in ("dense", "sparse"):
            raise InputError(
                f"mlp_layer_types={kinds} must say dense or sparse for each of {c.num_hidden_layers} layers"
            )
        dense_before = layer + (kinds[layer] == "dense")
        return super().make_mlp(c.with_values(first_k_dense_replace=dense_before, mlp_bias=False), layer)


class GlmMoeDsa(DeepseekV32):
    """Layers of the type "shared" use the selection of the last layer before them that has an indexer."""

    defaults = DeepseekV32.defaults | dict(
        index_n_heads=32, n_group=1, topk_group=1, rms_norm_eps=1e-5, q_lora_rank=2048, qk_nope_head_dim=192,
        v_head_dim=256,
    )  # fmt: skip
    neighbours = True

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        types = indexer_types(c)
        if types[layer] == "full":
            return super().make_mixer(c, layer)
        return LatentAttention(c, source=max(i for i in range(layer) if types[i] == "full"))


def indexer_types(c: Config) -> list[str]:
    """For each layer "full", it has an indexer, or "shared"; from a list, a text such as "FSSF", or a period.

    >>> indexer_types(Config(dict(num_hidden_layers=6, index_topk_freq=2)))
    ['full', 'full', 'shared', 'full', 'shared', 'full']
    """
    count, pattern = c.num_hidden_layers, c.get("index_topk_pattern")
    period, offset = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)
    types = c.get("indexer_types")
    if types is None and pattern is not None:
        types = [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    if types is None:
        types = ["shared" if max(i - offset + 1, 0) % period else "full" for i in range(count)]
    if len(types) < count or not set(types) <= {"full", "shared"} or types[0] != "full":
        raise InputError(
            f"indexer_types={types} must say full or shared for each of {count} layers, full for the first"
        )
    return list(types[:count])
