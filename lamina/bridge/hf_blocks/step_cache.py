"""`StepCache`: the `transformers.Cache` that a transformers model is given for one call inside an open Lamina pass.

Keys and values go to the layers of the pass, and come back as those layers return them: in slot order, with a View that
says which position is in which slot (`view_attention.py` reads it). Recurrent layers get layer objects of transformers,
filled with the states of their rows, so that the model's own code decides what a state is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from lamina.attention.core import Backend, without_unused
from lamina.attention.view import View
from lamina.bridge.hf_blocks.view_attention import Rule
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key
from lamina.cache.layers.tokens import TokenLayer
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.bridge.hf_blocks.run import Part, Run

ATTENTION, INDEX, STATE = "attention", "index", "state"  # names of entries


class StepCache(Cache):
    """One call over tokens `part.first` … `part.end` - 1 of some rows of the pass.

    states   (layer, entry) -> states before the call [rows, *shape], for rows that have tokens; none for new rows
    """

    def __init__(self, run: Run, part: Part, states: Mapping[Key, Mapping[str, Tensor]] | None) -> None:
        self.run, self.part, self.step = run, part, run.step
        self.rules: dict[int, Rule | None] = {}
        self._seen: list[tuple[Key, Tensor, View]] = []  # in order of calls: entry, its keys, what queries see
        super().__init__(layers=[self._layer(i, found, states) for i, found in enumerate(run.stack.layers)])

    def _layer(self, i: int, found: Any, states: Mapping[Key, Mapping[str, Tensor]] | None) -> Any:
        linear = isinstance(found.fresh, LinearAttentionCacheLayerMixin)
        if not linear:
            return TokenSlots(self, i)
        own = copied(found.fresh if states is None else found.used)
        if states is not None and (i, STATE) in states:
            fill_states(own, states[i, STATE])
        if ATTENTION not in found.specs:
            return own
        both = StateAndTokenSlots.__new__(StateAndTokenSlots)
        both.__dict__.update(own.__dict__, owner=self, index=i)
        return both

    def new_states(self) -> dict[Key, dict[str, Tensor]]:
        """The states after the call."""
        return {
            (i, STATE): states_of(self.layers[i])
            for i, found in enumerate(self.run.stack.layers)
            if STATE in found.specs
        }

    # -- what view_attention.py asks for ---------------------------------------------------------------------------

    @property
    def positions(self) -> Tensor:
        return self.part.of(self.step.positions)

    def attention_of(self, key: Key) -> str | Backend | None:
        return self.step.attention_of(key)

    def view_for(self, module: nn.Module, key: Tensor) -> tuple[Key, View] | None:
        """By the keys themselves, since layers may share them; else by the module's number, or the last that came."""
        for entry, keys, view in reversed(self._seen):
            if keys is key:
                return entry, view
        index = getattr(module, "layer_idx", None)
        for entry, _, view in reversed(self._seen):
            if index in (None, entry[0]) and view.shape[2] == key.shape[2]:
                return entry, view
        return None

    # -- what layers call ------------------------------------------------------------------------------------------

    @property
    def past(self) -> int:
        """Tokens before this call in the longest of its rows; the width of a mask less the new tokens."""
        return self.part.past

    def extend(self, i: int, name: str, new: Fields) -> Fields:
        """Stores the new tokens of a layer, and returns all that its queries may see."""
        if i >= len(self.run.stack.layers) or name not in self.run.stack.layers[i].specs:
            raise InputError(f"layer {i} has no entry {name!r}: it stored nothing in the call that found the layers")
        layer = self.step.entries(i)[name]
        assert isinstance(layer, TokenLayer)
        key = (i, name)
        if self.part.whole:
            tokens, view = layer.extend(self.step, key, new)
        else:
            tokens, view = self.run.gathered(self.part, key, layer, new)
        if name == ATTENTION:
            if self.part.whole:
                self.step.share(key, tokens["k"], tokens["v"], view)
            self._seen.append((key, tokens["k"], view))
        if name == INDEX or self.run.stack.dense:
            if tokens[next(iter(tokens))].shape[-2] != self.past + self.part.tokens:
                raise InputError(f"layer {i} reads other slots than its mask is for")
            if not view.clean:
                exists = view.exists()
                tokens = {
                    n: without_unused(x, view) if x.dim() == 4 else x.masked_fill(~exists[:, 0], 0)
                    for n, x in tokens.items()
                }
        return tokens


class TokenSlots(CacheLayerMixin):
    """One attention layer of a `StepCache`."""

    is_sliding = False  # masks come as rules over positions, whatever the layer stores

    def __init__(self, owner: StepCache, index: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index

    def lazy_initialization(self, *args: Any, **more: Any) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        tokens = self.owner.extend(self.index, ATTENTION, {"k": key_states, "v": value_states})
        return tokens["k"], tokens["v"]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self.owner.extend(self.index, INDEX, {"x": indexer_key_states})["x"]

    def get_seq_length(self) -> int:
        return max(0, self.owner.past)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.past + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.17


class StateAndTokenSlots(LinearAttentionLayer, TokenSlots):  # type: ignore[override, misc, unused-ignore]
    """A layer that attends and has a state."""

    update, get_seq_length, get_mask_sizes = TokenSlots.update, TokenSlots.get_seq_length, TokenSlots.get_mask_sizes
    get_max_length = get_max_cache_shape = TokenSlots.get_max_length


def copied(layer: Any) -> Any:
    """A copy of a layer object of transformers that shares its tensors, and nothing that is assigned to."""
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(new, name, dict(value))
    return new


def states_of(layer: Any) -> dict[str, Tensor]:
    """The states in a layer object of transformers, by name: "recurrent_states.0" …"""
    found: dict[str, Tensor] = {}
    for name, value in vars(layer).items():
        if name.endswith("_states") and isinstance(value, Tensor):
            found[name] = value
        elif name.endswith("_states") and isinstance(value, dict):
            found |= {f"{name}.{index}": one for index, one in value.items() if isinstance(one, Tensor)}
    return found


def fill_states(layer: Any, states: Mapping[str, Tensor]) -> None:
    """Puts states into a layer object of transformers."""
    for path, state in states.items():
        name, _, index = path.partition(".")
        if index:
            getattr(layer, name)[int(index)] = state
        else:
            setattr(layer, name, state)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of zeros, and of the lowest value where something is not seen."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
