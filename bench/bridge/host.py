"""The host's share of a token: `python -m bench.bridge --host [OUT.md]`.

On a GPU one row of tokens waits for Python and for PyTorch to launch kernels. Here that is nearly all there is: models
of 8 layers with vectors of 16 values, on one thread of a CPU. Both caches decode the same tokens by turns. A turn is as
many tokens as `Lines` makes views for at once, so that each turn pays for its share of them. From 16,384 tokens on a
CPU also reads the keys, and copies them for a `DynamicCache`, which a GPU does in no time. The times are those of the
CPU; on a machine that runs other programs too they vary by a few percent. The counts do not vary: calls of Python
functions, operations that compute or copy, operations that make a view, and where valgrind is installed, instructions
of the processor (`python -m bench.bridge.instructions MODEL TOKENS` for one model).
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from bench.bridge.instructions import instructions
from lamina import bridge
from lamina.bridge.lines import AHEAD

SIZES = dict(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=8, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=40_000,
)  # fmt: skip
CONTEXTS = (128, 16_384)  # tokens that are stored before those that are counted
WINDOW, TURNS = 16, 40  # tokens, turns
STARTING = 5  # turns until stores have grown and views are made for a whole turn
Make = Callable[[Any], Any]
Form = tuple[bool, int, Make, Make]
"""Whether our model attends, from how many tokens on both decode, what makes their cache, and what makes ours."""


class Cost(NamedTuple):
    """What the host did for one token, on average over a turn."""

    calls: float  # of Python functions
    kernels: float  # operations that compute or copy something
    views: float  # operations that make a view

    def __str__(self) -> str:
        return f"{self.calls:.0f} + {self.kernels:.0f} + {self.views:.0f}"


class Operations(TorchDispatchMode):
    """Counts operations that compute or copy something, and those that make a view."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.views += func.is_view
        if not func.is_view and not func.__name__.startswith(("empty", "set_")):  # those launch nothing
            self.kernels += len(args[0]) if func.__name__.startswith("_foreach") else 1
        return func(*args, **(kwargs or {}))


def configs() -> dict[str, Any]:
    windows = ["sliding_attention"] * 3 + ["full_attention"]
    states = dict(mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=8)
    return {
        "llama": transformers.LlamaConfig(**SIZES),
        "gemma3, full windows": transformers.Gemma3TextConfig(
            **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=windows * 2
        ),
        "falcon_h1": transformers.FalconH1Config(**SIZES, **states),
    }


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configs()[name]).eval()


def contexts(name: str) -> tuple[int, ...]:
    """From how many tokens on a model decodes. A prompt of 16,384 tokens through recurrent states takes minutes."""
    return CONTEXTS[:1] if name == "falcon_h1" else CONTEXTS


def forms(config: Any, context: int = CONTEXTS[0]) -> dict[str, Form]:
    """How our cache is used, by name."""
    most = context + (STARTING + TURNS + 1) * AHEAD

    def dynamic(model: Any) -> Any:
        return transformers.DynamicCache(config=model.config)

    def static(model: Any) -> Any:
        return transformers.StaticCache(config=model.config, max_cache_len=most)

    def fixed(model: Any) -> Any:
        return bridge.Cache(model, capacity=most)

    found: dict[str, Form] = {
        "growing": (False, context, dynamic, bridge.Cache),
        "growing, attend": (True, context, dynamic, bridge.Cache),
        "fixed": (False, context, static, fixed),
        "fixed, attend": (True, context, static, fixed),
    }
    return found if config.model_type != "falcon_h1" else dict(list(found.items())[:2])  # it has no static cache


def fill(model: Any, cache: Any, rows: int, tokens: int) -> None:
    """Random keys and values of this many tokens; for a model with states, those of a prompt."""
    config, device = model.config, model.device
    if config.model_type == "falcon_h1":
        model(torch.ones((rows, tokens), dtype=torch.long, device=device), past_key_values=cache, use_cache=True)
        return
    generator = torch.Generator(device).manual_seed(0)
    shape = (rows, config.num_key_value_heads, tokens, config.head_dim)
    for i in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, generator=generator, device=device, dtype=model.dtype) for _ in range(2)), i)


def turn(model: Any, cache: Any) -> None:
    token = torch.ones((1, 1), dtype=torch.long)
    for _ in range(AHEAD):
        model(token, past_key_values=cache, use_cache=True)


def count(model: Any, cache: Any) -> Cost:
    """The cost of a token over a cache that was started."""
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        turn(model, cache)
    finally:
        sys.setprofile(before)
    with Operations() as operations:
        turn(model, cache)
    return Cost(calls / AHEAD, operations.kernels / AHEAD, operations.views / AHEAD)


@torch.inference_mode()
def pair(model: Any, attends: bool, context: int, theirs: Make, ours: Make) -> list[tuple[Any, Any]]:
    """Their model and cache, and our model and cache, both started."""
    own = bridge.attend(copy.deepcopy(model)) if attends else model
    both = [(model, theirs(model)), (own, ours(own))]
    for one, cache in both:
        fill(one, cache, 1, context)
        for _ in range(STARTING):
            turn(one, cache)
    return both


@torch.inference_mode()
def costs(model: Any, attends: bool, context: int, theirs: Make, ours: Make) -> tuple[Cost, Cost]:
    """The cost of a token over their cache, and over ours."""
    their_cost, our_cost = (count(one, cache) for one, cache in pair(model, attends, context, theirs, ours))
    return their_cost, our_cost


@torch.inference_mode()
def times(model: Any, attends: bool, context: int, theirs: Make, ours: Make) -> tuple[float, float]:
    """Microseconds of the CPU for a token over their cache, and over ours: medians of the turns."""
    both = pair(model, attends, context, theirs, ours)
    spent: tuple[list[float], list[float]] = ([], [])
    for i in range(TURNS):  # who comes first alternates too
        for whose in (0, 1) if i % 2 else (1, 0):
            begin = time.process_time_ns()
            turn(*both[whose])
            spent[whose].append((time.process_time_ns() - begin) / AHEAD / 1e3)
    return statistics.median(spent[0]), statistics.median(spent[1])


def lines() -> list[str]:
    """The table."""
    torch.set_num_threads(1)
    found = [
        "| model | ours | from token | theirs, us | ours, us | ours / theirs | theirs: calls + kernels + views | ours "
        "| theirs, 1,000 instructions | ours / theirs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in configs():
        model = make_model(name)
        for context in contexts(name):
            executed = instructions(name, context)
            for form, one in forms(model.config, context).items():
                their_time, our_time = times(model, *one)
                their_cost, our_cost = costs(model, *one)
                cells = [name, form, str(context), f"{their_time:.0f}", f"{our_time:.0f}"]
                cells += [f"{our_time / their_time:.3f}", str(their_cost), str(our_cost)]
                if executed is None:
                    cells += ["", ""]
                else:
                    theirs, ours = executed[f"{form}: theirs"], executed[f"{form}: ours"]
                    cells += [f"{theirs / 1e3:.0f}", f"{ours / theirs:.3f}"]
                found.append(f"| {' | '.join(cells)} |")
                print(found[-1], flush=True)
    return found
