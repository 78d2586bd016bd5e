"""`ModelFacts`: what cache files and pools must know of a transformers model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn

from lamina.attention.window import Full, Sliding
from lamina.bridge.layers.specs import Attention, Columns, Cross, Index, State
from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codecs
from lamina.cache.layers.base import Key
from lamina.cache.spec import LayerSpecs, Spec
from lamina.config import Config
from lamina.errors import InputError

SPECS = {one.__name__: one for one in (Attention, Columns, Cross, Index, State)}
STORED = "lamina_bridge_specs"  # the field of a configuration in a cache file that holds the specs


class ModelFacts:
    """What Lamina's caches ask of their model: specs, configuration, parameters, dtype.

    given    a transformers model, or its configuration; then nothing is known about its parameters
    layers   layers of the decoder
    """

    max_positions = None

    def __init__(self, given: Any, layers: int) -> None:
        self.given, self.layers = given, layers
        self._decoder = getattr(given, "config", given).get_text_config(decoder=True)
        self._specs: Sequence[LayerSpecs] = [{} for _ in range(layers)]
        self._key_means: dict[Key, Tensor] = {}  # where `lamina.cache.codec.key_mean` looks for them; keys have none

    @property
    def attended(self) -> bool:
        """True if the model computes attention by our function, which reads the store itself (attention.py)."""
        return getattr(self._decoder, "_attn_implementation", None) == "lamina"

    @property
    def module(self) -> nn.Module | None:
        return self.given if isinstance(self.given, nn.Module) else None

    @property
    def specs(self) -> Sequence[LayerSpecs]:
        """For each layer, name -> spec: those of the cache that was made last, since the model does not tell."""
        return self._specs

    @specs.setter
    def specs(self, specs: Sequence[LayerSpecs]) -> None:
        self._specs = specs

    def listed(self, specs: Mapping[Key, Spec]) -> Sequence[LayerSpecs]:
        """Specs by layer and name; from now on these are the model's."""
        listed: list[dict[str, Spec]] = [{} for _ in range(self.layers)]
        for (i, name), spec in sorted(specs.items()):
            listed[i][name] = spec
        self.specs = listed
        return listed

    @property
    def config(self) -> Config:
        """The configuration of the model, and the specs: a file must say them, since nothing else does."""
        values = getattr(self.given, "config", self.given).to_dict()
        return Config(
            values | {STORED: [{name: as_values(one) for name, one in entry.items()} for entry in self.specs]}
        )

    @property
    def vocab(self) -> int:
        config = getattr(self.given, "config", self.given)
        return int(getattr(config.get_text_config(decoder=True), "vocab_size", 0))

    @property
    def dtype(self) -> torch.dtype:
        if self.module is None:
            return next(one.dtype for entry in self.specs for one in entry.values() if hasattr(one, "dtype"))
        return next(self.module.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.module is None else next(self.module.parameters()).device

    def parameters(self) -> Iterator[Tensor]:
        return iter(()) if self.module is None else self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(()) if self.module is None else self.module.named_parameters()

    def new_cache(self, rows: int = 1, slack: int = 0, codec: Codecs | None = None) -> Cache:
        """A cache for these specs, as a pool asks for."""
        return Cache(self.specs, rows=rows, slack=slack, codec=codec, dtype=self.dtype, device=self.device, model=self)  # type: ignore[arg-type]


def as_values(spec: Spec) -> dict[str, Any]:
    """A spec as values that JSON can hold.

    >>> as_values(State((2, 8), torch.float32))
    {'kind': 'State', 'shape': [2, 8], 'dtype': 'float32'}
    """
    values: dict[str, Any] = {"kind": type(spec).__name__}
    for one in fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, one.name)
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        elif isinstance(value, Full | Sliding):
            value = asdict(value).get("size")
        values[one.name] = list(value) if isinstance(value, tuple) else value
    return values


def from_values(values: Mapping[str, Any]) -> Spec:
    """The spec that `as_values` made these of."""
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name != "kind"
    }
    if values.get("kind") not in SPECS:
        raise InputError(f"a cache file of lamina.bridge names the spec {values.get('kind')!r}: it knows {list(SPECS)}")
    given["dtype"] = getattr(torch, given["dtype"])
    if "window" in given:
        given["window"] = Full() if given["window"] is None else Sliding(given["window"])
    return SPECS[values["kind"]](**given)
