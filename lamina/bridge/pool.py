"""`Pool`: memory in pages that many caches of a transformers model share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lamina.bridge.model_facts import ModelFacts
from lamina.cache.codec.codec import Codecs
from lamina.cache.pool import pool as lamina_pool
from lamina.cache.spec import LayerSpecs
from lamina.errors import InputError


class Pool:
    """Pages for caches of one model: `lamina.bridge.Cache(model, pool=pool)`. Arguments as for `lamina.Pool`.

    Memory is allocated when the first of its caches has been through a pass: the shapes are known then.

    >>> pool = lamina.bridge.Pool(tokens=100_000)                                          # doctest: +SKIP
    >>> cache = lamina.bridge.Cache(model, pool=pool)                                      # doctest: +SKIP
    >>> tries = [cache.fork() for _ in range(50)]       # copies no tokens                 # doctest: +SKIP
    """

    def __init__(
        self,
        tokens: int | None = None,
        rows: int | None = None,
        page: int = 64,
        slack: int = 0,
        codec: Codecs | None = None,
    ) -> None:
        self.slack, self.codec = slack, codec
        self._arguments: dict[str, Any] = dict(tokens=tokens, rows=rows, page=page, slack=slack, codec=codec)
        self._pool: lamina_pool.Pool | None = None
        self._kind: object = None
        self._model: ModelFacts | None = None

    @property
    def inner(self) -> lamina_pool.Pool:
        """The Lamina pool."""
        if self._pool is None:
            raise InputError("this pool has no memory yet: run a model over one of its caches first")
        return self._pool

    @property
    def model(self) -> ModelFacts:
        """The model of its caches."""
        assert self._model is not None
        return self._model

    def __repr__(self) -> str:
        return "Pool, empty" if self._pool is None else repr(self._pool)

    def made(
        self, model: ModelFacts, specs: Sequence[LayerSpecs], dtype: torch.dtype, device: torch.device
    ) -> lamina_pool.Pool:
        """The Lamina pool for caches of these specs; made at the first call."""
        kind = ([dict(entry) for entry in specs], dtype, device)
        if self._pool is None:
            self._pool = lamina_pool.Pool(model, **self._arguments)  # type: ignore[arg-type]
            self._kind, self._model = kind, model
        if kind != self._kind:
            raise InputError(
                "this pool holds caches of another model, dtype or device: make a lamina.bridge.Pool for each"
            )
        return self._pool
