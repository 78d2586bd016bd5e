"""`Architecture`: how the metadata and tensors of one GGUF architecture are presented."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lamina.checkpoint.gguf.header import StoredTensor
from lamina.checkpoint.gguf.metadata import Metadata, common_config
from lamina.checkpoint.names import expression

Fields = dict[str, Any]
Change = Callable[[torch.Tensor, Fields], torch.Tensor]
FUSED = "blk.{i}.ffn_gate_up_exps"
"""Gates and ups of experts in one stack [E, 2 · inner, width], which the converter makes of any mixture if asked to."""


@dataclass(frozen=True)
class Joined:
    """A presented tensor that is made of several stored ones, or of a part of one; fn(*tensors, config)."""

    name: str
    stored: tuple[str, ...]
    fn: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Presented:
    """A presented tensor: what it is read from, and what is done to it. expert: the entry of a stack that it is"""

    stored: tuple[StoredTensor, ...]
    fn: Callable[..., torch.Tensor] | None = None
    expert: int | None = None

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.stored if self.expert is None else (self.stored[0].entry(self.expert),)


@dataclass(frozen=True)
class Architecture:
    """names     GGUF module, or whole tensor name -> Hugging Face's; {i} is the layer, {e} an expert: the stored tensor
                 is a stack, or one of several
    config       fields beside those of `common_config`, which it is given
    model_types  the families that have such files, the usual one first; the one of the same name if empty
    changes      patterns of GGUF tensor names -> what undoes that they are stored otherwise, fn(tensor, config)
    joined       tensors that are made of several stored ones, if a file has them
    unread       fields of `common_config` that the family does not have
    derived      tensors that the configuration already says, or that no model reads
    """

    names: Mapping[str, str]
    config: Callable[[Metadata, Fields], Fields] = lambda m, c: {}
    model_types: tuple[str, ...] = ()
    changes: Mapping[str, Change] = field(default_factory=dict)
    joined: tuple[Joined, ...] = ()
    unread: tuple[str, ...] = ()
    derived: tuple[str, ...] = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

    def configure(self, values: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Fields:
        """The configuration, as config.json of the original has it."""
        m = Metadata(values, tensors)
        kind = self.model_types[0] if self.model_types else m.architecture
        common = {"model_type": kind} | common_config(m)
        own = self.config(m, common)
        return {name: value for name, value in common.items() if name not in self.unread} | own

    def split_fused(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The tensors, with gates and ups of experts in two stacks if the architecture does not name them as one."""
        found = dict(tensors)
        if f"{FUSED}.weight" in self.names:
            return found
        for name in [name for name in tensors if matches(f"{FUSED}.weight", name)]:
            both = found.pop(name)
            for part, half in zip(("gate", "up"), both.halves(), strict=True):
                found[name.replace("gate_up", part)] = half
        return found

    def present(self, tensors: Mapping[str, StoredTensor], config: Fields) -> dict[str, Presented]:
        """The tensors by Hugging Face's names. One that nothing is known about keeps its own name, so that the loader
        reports it. Layers after the last, which are for multi-token prediction, are left out."""
        found: dict[str, Presented] = {}
        left = {name: tensor for name, tensor in tensors.items() if not self._skipped(name, config)}
        used: set[str] = set()  # a tensor can be a part of several
        bound: dict[Any, Callable[..., torch.Tensor]] = {}  # one function for all layers, so that it is known again

        def with_config(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            return bound.setdefault(fn, lambda *tensors: fn(*tensors, config))

        for join in self.joined:
            for numbers, parts in matching(join.stored, left):
                stored = tuple(left[name] for name in parts)
                found[join.name.format(**numbers)] = Presented(stored, with_config(join.fn))
                used.update(parts)
        for name, tensor in left.items():
            if name in used:
                continue
            change = next((fn for pattern, fn in self.changes.items() if matches(pattern, name)), None)
            fn = None if change is None else with_config(change)
            for presented, expert in self._named(name, tensor):
                found[presented] = Presented((tensor,), fn, expert)
        return found

    def _named(self, name: str, tensor: StoredTensor) -> Iterator[tuple[str, int | None]]:
        numbers = dict(zip("ie", re.findall(r"\.(\d+)(?=\.)", name), strict=False))
        pattern = re.sub(r"\.\d+(?=\.)", ".{e}", re.sub(r"^blk\.\d+\.", "blk.{i}.", name))
        module, _, leaf = pattern.rpartition(".")
        theirs = self.names.get(pattern)
        if theirs is None and module in self.names:
            theirs = f"{self.names[module]}.{leaf}"
        if theirs is None:
            yield name, None
        elif "{e}" in theirs and "e" not in numbers:
            for e in range(tensor.shape[0]):
                yield theirs.format(**numbers, e=e), e
        else:
            yield theirs.format(**numbers), None

    def _skipped(self, name: str, config: Fields) -> bool:
        layer = re.match(r"blk\.(\d+)\.", name)
        return name in self.derived or (layer is not None and int(layer[1]) >= config["num_hidden_layers"])


def matches(pattern: str, name: str) -> bool:
    return re.fullmatch(expression(pattern), name) is not None


def matching(stored: tuple[str, ...], names: Mapping[str, Any]) -> list[tuple[dict[str, str], list[str]]]:
    """The numbers for which all of these tensors exist, and their names."""
    first = re.compile(expression(stored[0]))
    every = [match.groupdict() for name in names if (match := first.fullmatch(name))]
    parts = [(numbers, [pattern.format(**numbers) for pattern in stored]) for numbers in every]
    return [(numbers, found) for numbers, found in parts if all(name in names for name in found)]
