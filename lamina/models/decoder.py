"""`Decoder`: the base of decoder-only families: an embedding, blocks, a norm and a head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from lamina.checkpoint.names import Value
from lamina.checkpoint.source import Checkpoint
from lamina.checkpoint.text_part import TextPartCheckpoint, is_text_part
from lamina.config import Config
from lamina.errors import InputError
from lamina.model import Model
from lamina.nn import Embedding, Linear, Norm, Positions, Rotary


class Decoder(Model):
    """A family gives its blocks and final norm. `quantized` lists the quantization methods that its names can read.

    rope        the RoPE table of all blocks, or several by name; None: no RoPE
    tied        the head has the weight of the embedding
    head_bias   the head adds a bias
    """

    quantized: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        c: Config,
        blocks: Iterable[nn.Module],
        norm: Norm,
        *,
        rope: Rotary | Mapping[str, Rotary] | None,
        tied: bool,
        head_bias: bool = False,
    ) -> None:
        super().__init__()
        self.vocab = c.vocab_size
        self.embedding = Embedding(c.vocab_size, c.hidden_size)
        ropes = {} if rope is None else {"default": rope} if isinstance(rope, Rotary) else rope
        self.ropes = nn.ModuleDict(ropes)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = Linear(c.hidden_size, c.vocab_size, bias=head_bias)
        if tied:
            self.head.weight = self.embedding.weight

    @classmethod
    def part_of(cls, source: Checkpoint) -> Checkpoint:
        """All of it; if its names are those of a multimodal release, the text model. (Fine-tuned text models are
        published so, with the configuration of the text model alone.)"""
        return TextPartCheckpoint(source) if any(map(is_text_part, source.names)) else source

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def prepare(self, positions: Tensor) -> Any:
        return Positions({name: rope(positions) for name, rope in self.ropes.items()})

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def layer_types(c: Config, known: Sequence[str], otherwise: Callable[[int], str]) -> Sequence[str]:
    """The type of each layer: `layer_types` of the configuration, or what `otherwise` says of each layer's index.

    >>> layer_types(Config({"num_hidden_layers": 2}), ["conv", "full_attention"], lambda i: "conv")
    ['conv', 'conv']
    """
    return kinds_of_layers("layer_types", c.get("layer_types"), c, known, otherwise)


def kinds_of_layers(
    name: str, given: Sequence[str] | None, c: Config, known: Sequence[str], otherwise: Callable[[int], str]
) -> Sequence[str]:
    """The same for another field: its name, and what it has."""
    count = c.num_hidden_layers
    found = given or [otherwise(i) for i in range(count)]
    if len(found) < count or not set(found) <= set(known):
        raise InputError(f"{name}={found} must say {' or '.join(known)} for each of {count} layers")
    return found[:count]


def qkv_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names: a checkpoint's separate q, k and v are concatenated to the one matrix of `SelfAttention`."""
    return {f"{ours}.qkv": (f"{theirs}.q_proj", f"{theirs}.k_proj", f"{theirs}.v_proj")}


def mlp_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of an MLP; gate and up of a gated one are concatenated to one matrix."""
    return {
        f"{ours}.gate_up": (f"{theirs}.gate_proj", f"{theirs}.up_proj"),
        f"{ours}.up": f"{theirs}.up_proj",
        f"{ours}.down": f"{theirs}.down_proj",
    }
