"""The floating-point operations that any implementation of a prefill has to do, and the bytes that it has to move.

Every matrix takes part once for each token (of experts those that a token visits), the head once for each row, since
only the last token's logits are wanted. Attention scores and sums count the pairs that are visible, not the square.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

from torch import nn

from lamina.attention.window import Window
from lamina.cache.cache import Cache
from lamina.cache.spec import Attention, IndexKeys, Latent, Recurrent, SharedIndex, Spec
from lamina.config import Config
from lamina.model import Model
from lamina.nn import Experts
from lamina.planning.bytes import chosen_experts, visible, weight_bytes
from lamina.weights.inventory import inside, named_weights, own_weights


def prefill_flops(model: Model, tokens: int, rows: int = 1) -> float:
    """Operations of a pass of `tokens` tokens over empty rows (a multiplication and an addition are two)."""
    each = chosen_experts(model)
    matrices = sum(_weights_a_token(module, each.get(id(module))) for _, module in inside(model))
    head = model.get_submodule("head")
    last = sum(weight.numel() for _, weight in named_weights(head))
    every = [spec for entry in model.specs for spec in entry.values() if not isinstance(spec, SharedIndex)]
    kept = sum(_of_spec(_source(spec, model), model.config, tokens) for spec in every)
    return rows * (2 * (matrices - last) * tokens + 2 * last + kept)


def prefill_bytes(model: Model, counts: Sequence[int]) -> float:
    """Bytes that a pass over empty rows of `counts` tokens moves: each weight once (of the embedding and of experts
    those that tokens visit), and all that a cache of these rows keeps."""
    kept = sum(
        rows * Cache(model.specs, rows=1, capacity=count, dtype=model.dtype, device="meta").nbytes
        for count, rows in Counter(counts).items()
    )
    return weight_bytes(model, sum(counts)) + kept


def _weights_a_token(module: nn.Module, chosen: int | None) -> float:
    """How many weights of this module itself a token is multiplied with; chosen: the experts that it visits."""
    if isinstance(module, nn.Embedding):
        return 0
    numbers = sum(weight.numel() for weight in own_weights(module).values() if weight.ndim > 1)
    if not isinstance(module, Experts) or chosen is None:
        return numbers
    return numbers * chosen / (module.down.shape[0] + module.identity)


def _source(spec: Spec, model: Model) -> Spec:
    if spec.reads_from is None:
        return spec
    layer, name = spec.reads_from
    return model.specs[layer][name]


def _of_spec(spec: Spec, c: Config, tokens: int) -> float:
    match spec:
        case Attention(key_dim=key, value_dim=value, window=window):
            return 2 * c.num_attention_heads * (key + value) * pairs(window, tokens)
        case Latent(rope_dim=rope, window=window):  # expanded: the way up is a matrix like others
            numbers = c.qk_nope_head_dim + rope + c.v_head_dim
            return 2 * c.num_attention_heads * numbers * pairs(window, tokens)
        case IndexKeys(dim=dim, window=window):
            return 2 * c.index_n_heads * dim * pairs(window, tokens)
        case Recurrent(rule=rule):  # each number of the state decays, takes in and is read
            return 6 * math.prod(rule.state_shape) * tokens
    return 0


@cache
def pairs(window: Window, tokens: int) -> int:
    """How many (query, key) pairs see each other in a sequence from its start.

    >>> from lamina.attention.window import Full
    >>> pairs(Full(), 4)
    10
    """
    return sum(visible(window, position) + 1 for position in range(tokens))
