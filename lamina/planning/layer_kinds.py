"""What the layers of a model remember, in words: with sizes for `lamina inspect`, without for tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.cache.spec import (
    Attention,
    Convolution,
    Cross,
    IndexKeys,
    Latent,
    LayerSpecs,
    Recurrent,
    Shared,
    SharedIndex,
    Spec,
    Tokens,
)


def kind_name(spec: Spec) -> str:
    """
    >>> kind_name(Attention(8, 128, 128, Sliding(4096)))
    'sliding attention'
    """
    match spec:
        case Attention(window=window):
            return f"{_window_name(window)}attention"
        case Latent(window=window):
            return f"{_window_name(window)}latent attention (MLA)"
        case IndexKeys():
            return "indexer keys"
        case Tokens():
            return "token vectors"
        case Convolution():
            return "convolution"
        case Recurrent(rule=rule):
            return f"recurrence ({type(rule).__name__})"
        case Cross():
            return "cross-attention"
        case Shared():
            return "shared attention"
        case SharedIndex():
            return "shared selection"
    return type(spec).__name__


def kind_with_sizes(spec: Spec) -> str:
    """
    >>> kind_with_sizes(Attention(8, 128, 128, Sliding(4096)))
    'attention, sliding 4,096, 8 kv heads × 128'
    """
    match spec:
        case Attention(kv_heads=heads, key_dim=key, value_dim=value, window=window):
            return f"attention{_window_size(window)}, {_heads(heads, key, value)}"
        case Latent(rank=rank, rope_dim=rope, window=window):
            return f"latent attention (MLA){_window_size(window)}, rank {rank} + {rope} rotary"
        case IndexKeys(dim=dim, top=top):
            return f"indexer keys, {dim} per token, {top:,} tokens selected"
        case Tokens(dim=dim, window=window):
            return f"token vectors{_window_size(window)}, {dim} per token"
        case Convolution(channels=channels, kernel=kernel):
            return f"convolution, {channels:,} channels, kernel {kernel}"
        case Recurrent(rule=rule):
            return f"recurrence {type(rule).__name__}, state {' × '.join(f'{n:,}' for n in rule.state_shape)}"
        case Cross(kv_heads=heads, key_dim=key, value_dim=value):
            return f"cross-attention, {_heads(heads, key, value)}"
        case Shared(source=layer):
            return f"attention with keys and values of layer {layer}"
        case SharedIndex(source=layer):
            return f"tokens selected by layer {layer}"
    return str(spec)


def _heads(heads: int, key: int, value: int) -> str:
    size = f"{key}" if key == value else f"({key} + {value})"
    return f"{heads} kv head{'s' * (heads != 1)} × {size}"


def _window_name(window: Window) -> str:
    return {Full: "", Sliding: "sliding ", Chunked: "chunked "}.get(type(window), f"{type(window).__name__} ")


def _window_size(window: Window) -> str:
    match window:
        case Full():
            return ""
        case Sliding(size=size, keep=keep):
            return f", sliding {size:,}" + (f" and the first {keep}" if keep else "")
        case Chunked(size=size):
            return f", chunks of {size:,}"
    return f", {window}"


def layer_kinds(specs: Sequence[LayerSpecs]) -> dict[str, list[int]]:
    """What layers remember, with sizes -> the indices of the layers that do, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for i, entry in enumerate(specs):
        kinds = " + ".join(kind_with_sizes(spec) for spec in entry.values()) or "nothing to remember"
        found.setdefault(kinds, []).append(i)
    return found


def ranges(indices: Iterable[int], most: int = 4) -> str:
    """Indices as runs; if there are more than `most` runs, the first two and the last, and how many indices there are.

    >>> ranges([0, 1, 2, 5, 7, 8]), ranges(range(0, 20, 2))
    ('0–2, 5, 7–8', '0, 2 … 18 (10)')
    """
    runs: list[list[int]] = []
    every = list(indices)
    for i in every:
        if runs and runs[-1][-1] == i - 1:
            runs[-1] = [runs[-1][0], i]
        else:
            runs.append([i])
    texts = ["–".join(map(str, run)) for run in runs]
    return ", ".join(texts) if len(runs) <= most else f"{texts[0]}, {texts[1]} … {texts[-1]} ({len(every)})"
