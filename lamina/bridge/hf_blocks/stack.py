"""`Stack`: all layers of a transformers model as one block of a Lamina model, and what each of its layers remembers.

What layers remember is found by one call over one token, whose cache shows the shapes of keys, values and states. A
sliding window is kept as a ring if the model's own mask never lets a query see further (`reaches`).
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from lamina.attention.window import Sliding
from lamina.bridge.hf_blocks.opaque_state import OpaqueState
from lamina.bridge.hf_blocks.run import Run
from lamina.bridge.hf_blocks.step_cache import ATTENTION, INDEX, STATE, StepCache, additive, copied, states_of
from lamina.bridge.hf_blocks.view_attention import NAME, RUNNING, Rule
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.memory import Memory
from lamina.cache.spec import Attention, Spec, Tokens
from lamina.cache.step import Step
from lamina.errors import InputError

KNOWN = {
    "DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer",
}  # fmt: skip
"""Layer classes of transformers' caches whose contents Lamina can keep."""


@dataclass
class FoundLayer:
    """What one layer remembers.

    fresh, used   its layer object of transformers before any token, and after one
    """

    specs: dict[str, Spec]
    fresh: Any
    used: Any


class Lock:
    """A lock that a copy of its owner gets anew."""

    def __init__(self) -> None:
        self.held = threading.RLock()

    def __deepcopy__(self, memo: Any) -> Lock:
        return Lock()


class Stack(nn.Module):
    """The block: `stack(x, memory, ids)` runs the model over embeddings x [R, T, W], or over ids [R, T] if given.

    dense        the model computes attention itself, and gets a mask over tokens in order of position
    grouped      the model finds positions by itself: only rows of one length can be called together
    one_by_one   the model continues a row correctly by single tokens alone
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.name = type(hf_model).__name__
        self.lock = Lock()
        configs = (getattr(module, "config", None) for module in hf_model.modules())
        self.configs = [*{id(config): config for config in configs if config is not None}.values()]
        self.base_name = name_of_base(hf_model)
        given = inspect.signature(self.base.forward).parameters
        self.cache_name = next((name for name in ("past_key_values", "cache_params") if name in given), "")
        if not self.cache_name:
            raise InputError(f"{self.name} takes no cache (past_key_values), so Lamina cannot run it")
        self.takes_positions = "position_ids" in given
        self.dense, self.grouped, self.one_by_one = False, not self.takes_positions, False
        self.layers: list[FoundLayer] = []
        self.output: Any = None  # of the base model, which `unembed` hands to the head
        self.vocab = 0
        with torch.no_grad():
            self.find_layers()

    @property
    def has_states(self) -> bool:
        return any(STATE in found.specs for found in self.layers)

    @property
    def base(self) -> Any:
        """The model without its head."""
        return self.hf_model.get_submodule(self.base_name)

    def forward(self, x: Tensor, memory: Memory, ids: Tensor | None = None) -> Tensor:
        """-> the last hidden states [R, T, W]"""
        return Run(self, memory.step, ids, x)()

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, ids: Tensor | None, embeds: Tensor, cache: StepCache) -> Tensor:
        """Calls the model without its head. ids or embeds [R, T] -> [R, T, W]"""
        given: dict[str, Any] = {self.cache_name: cache, "use_cache": True}
        given |= {"inputs_embeds": embeds} if ids is None else {"input_ids": ids}
        if self.takes_positions:
            given["position_ids"] = cache.positions
        if self.dense:
            slots = torch.arange(cache.past + cache.part.tokens, device=embeds.device)
            given["attention_mask"] = additive((slots <= cache.positions[..., None])[:, None], embeds.dtype)
        with self.lock.held, self.with_attention(None if self.dense else NAME):
            token = RUNNING.set(cache)
            try:
                return self.base(**given)[0]
            finally:
                RUNNING.reset(token)

    @contextmanager
    def with_attention(self, name: str | None) -> Iterator[None]:
        """The attention function of this name in all layers; None: as the model has it."""
        before = [config._attn_implementation for config in self.configs]
        try:
            for config in self.configs if name is not None else ():
                config._attn_implementation_internal = name
            yield
        finally:
            for config, old in zip(self.configs, before, strict=True):
                config._attn_implementation_internal = old

    def embed(self, ids: Tensor) -> Tensor:
        return self.hf_model.get_input_embeddings()(ids)

    def unembed(self, x: Tensor) -> Tensor:
        """The head, with all that the model does around it. [..., W] -> [..., vocab]"""
        shape = x.shape
        x = x.reshape(-1, 1, shape[-1]) if x.dim() == 2 else x
        output = copy.copy(self.output)
        output["last_hidden_state"] = x
        base = self.base
        with self.lock.held:
            base.forward = lambda *args, **more: output
            try:
                ids = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
                logits: Tensor = self.hf_model(input_ids=ids, use_cache=False).logits
            finally:
                del base.forward
        return logits.reshape(*shape[:-1], logits.shape[-1])

    def past_of(self, step: Step) -> int:
        """Slots of a line in a pass over all rows at once, less the new tokens."""
        if step.start is not None:
            return step.start
        lines = (
            layer
            for entry in step.layers
            for layer in entry.values()
            if isinstance(layer, TokenLayer) and layer.layout.ring is None and not layer.bare
        )
        line = next(lines, None)
        if line is None or step.bound is None:
            return 0 if step.cache is None else (step.bound or 0) - step.T
        return min(step.bound, line.slots) - step.T

    # -- what layers remember --------------------------------------------------------------------------------------

    def find_layers(self) -> None:
        """Fills `layers`, by a call over one token with transformers' own cache and one over two tokens with ours."""
        fresh, cache = self.new_cache(), self.new_cache()
        device = next(self.hf_model.parameters()).device
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        given: dict[str, Any] = {"input_ids": ids[:, :1], self.cache_name: cache, "use_cache": True}
        if self.takes_positions:
            given["position_ids"] = ids[:, :1]
        try:
            self.vocab = self.hf_model(**given).logits.shape[-1]
        except Exception as error:  # of many types: some models have a cache of their own
            raise InputError(f"{self.name} does not run with transformers' DynamicCache: {error}") from error
        self.output = self.base(input_ids=ids[:, :1], use_cache=False)
        for i, used in enumerate(cache.layers):
            own = fresh.layers[i] if i < len(fresh.layers) else type(used)()
            self.layers.append(FoundLayer(self.specs_of_layer(i, used), copied(own), copied(used)))
        if not any(found.specs for found in self.layers):
            raise InputError(f"{self.name} stored nothing in its cache, so Lamina cannot run it")
        rules = self.rules(ids)
        for i, found in enumerate(self.layers):
            size, rule, spec = getattr(found.used, "sliding_window", None), rules.get(i), found.specs.get(ATTENTION)
            if (
                isinstance(spec, Attention)
                and size is not None
                and rule is not None
                and not reaches(rule, size, device)
            ):
                found.specs[ATTENTION] = replace(spec, window=Sliding(size))

    def new_cache(self) -> Any:
        try:
            return DynamicCache(config=self.hf_model.config.get_text_config(decoder=True))
        except Exception as error:
            raise InputError(f"transformers makes no DynamicCache for {self.name}: {error}") from error

    def specs_of_layer(self, i: int, used: Any) -> dict[str, Spec]:
        """What a layer stored."""
        kind, specs = type(used).__name__, dict[str, Spec]()
        if kind not in KNOWN:
            raise InputError(f"layer {i} of {self.name} keeps its past in a {kind}, which Lamina cannot store")
        k, v = getattr(used, "keys", None), getattr(used, "values", None)
        if isinstance(k, Tensor) and isinstance(v, Tensor) and k.numel():
            if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape[2] != 1:
                raise InputError(
                    f"layer {i} of {self.name} stores keys {list(k.shape)} and values {list(v.shape)} for one token; "
                    "Lamina stores [rows, heads, tokens, dim]"
                )
            specs[ATTENTION] = Attention(k.shape[1], k.shape[3], v.shape[3])
        if getattr(used, "indexer_keys", None) is not None:
            specs[INDEX] = Tokens(used.indexer_keys.shape[-1])
        if isinstance(used, LinearAttentionCacheLayerMixin) and (states := states_of(used)):
            parts = ((name, tuple(x.shape[1:]), str(x.dtype).removeprefix("torch.")) for name, x in states.items())
            specs[STATE] = OpaqueState(tuple(parts))
        return specs

    def rules(self, ids: Tensor) -> dict[int, Rule | None]:
        """Layer -> the rule of its mask. Sets `dense` if the model computes attention by itself."""
        step = Step.alone([found.specs for found in self.layers], (1, ids.shape[1]), ids.device)
        run = Run(self, step, ids, self.embed(ids))
        caches: list[StepCache] = []
        for part in run.parts():
            caches.append(StepCache(run, part, None))
            try:
                self.call(ids, run.embeds, caches[-1])
            except Exception as error:  # of many types: a model that reads more of its cache than there is
                why = f"{type(error).__name__}: {error}"
                raise InputError(f"{self.name} does not run over Lamina's caches: {why}") from error
        attends = {i for i, found in enumerate(self.layers) if ATTENTION in found.specs}
        rules = caches[0].rules
        self.dense = not attends <= rules.keys()
        return {} if self.dense else rules


@torch.no_grad()
def name_of_base(hf_model: PreTrainedModel) -> str:
    """The path of the module that the head calls: the model without its head."""
    names = {id(module): name for name, module in hf_model.named_modules() if name}
    decoder = hf_model.get_decoder() if hasattr(hf_model, "get_decoder") else None
    wanted = [one for one in (hf_model.base_model, getattr(hf_model, "model", None), decoder) if id(one) in names]
    called: list[int] = []
    hooks = [
        one.register_forward_hook(lambda module, *_: called.append(id(module))) for one in wanted if one is not None
    ]
    try:
        hf_model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=hf_model.device), use_cache=False)
    except Exception as error:  # of many types, by what the model lacks
        raise InputError(f"{type(hf_model).__name__} does not run on ids alone: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    found = next((names[id(one)] for one in wanted if id(one) in called), None)
    if found is None:
        raise InputError(f"{type(hf_model).__name__} calls no base model that Lamina could run without the head")
    return found


def reaches(rule: Rule, size: int, device: torch.device | str = "cpu") -> bool:
    """True if by this rule some query sees a key that is `size` tokens before it, or further."""
    q = torch.arange(1 << 20, (1 << 20) + 2 * size, device=device)[:, None]
    back = torch.tensor([size, size + 1, 2 * size, 1 << 20], device=device)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        return bool(rule(zero, 0, q, q - back).any())
    except Exception:  # a rule that looks tokens up by position: nothing is known of it
        return True
