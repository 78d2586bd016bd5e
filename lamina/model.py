"""`Model`: the base of every model family: a stack of blocks between an embedding and a head.

A family defines its blocks, `embed` (ids to vectors) and `unembed` (vectors to logits). Nothing else is needed: no
configuration, and no checkpoint (`docs/own_model.py` is a complete program). A block is called as
`block(x, memory, shared)`: `memory` is its only access to earlier tokens, and `shared` is what `prepare` makes once per
pass for all blocks (RoPE tables, for example). Its `specs` say what the cache must store for it. A family never deals
with caches, masks, position arguments or padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import torch
from torch import Tensor, nn

from lamina import kernels
from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codecs, codecs_of
from lamina.cache.codec.key_mean import key_means_of
from lamina.cache.counts import CountsLike
from lamina.cache.layers.base import Key
from lamina.cache.layers.cross import Source
from lamina.cache.passes import Pass
from lamina.cache.pool.pool import check_pool
from lamina.cache.recompute import recompute_pass
from lamina.cache.spec import LayerSpecs, specs_of
from lamina.cache.step import Step
from lamina.config import EMPTY, Config, config_of
from lamina.errors import InputError
from lamina.generation.entry import generate, stream
from lamina.generation.prefill.chunks import SHARE
from lamina.generation.prefill.score import Score, ScoreOptions, score
from lamina.generation.result import Result
from lamina.generation.stream import Event, Stream
from lamina.inputs import check_ids, checked_ids, checked_marks, random_ids
from lamina.nn.attention.rope_settings import positions_of
from lamina.rehearsal.explain import explain_decoding, explain_prompts
from lamina.runtime.builders import wait_for_kernels
from lamina.runtime.compile import CompiledBlocks, why_not_compiled
from lamina.runtime.eligibility import how_packed
from lamina.runtime.feed import feed, run, step_alone
from lamina.runtime.graphs import Graphs
from lamina.weights.packed import Packed, first_weight
from lamina.weights.quantize import INT8, check_activations

if TYPE_CHECKING:
    from lamina.cache.pool.pool import Pool
    from lamina.checkpoint.names import Names
    from lamina.checkpoint.source import Checkpoint
    from lamina.checkpoint.tokenizer import Tokenizer
    from lamina.generation.settings.options import CallOptions
    from lamina.kernels.gemm.fusion import FusionPlan

Logits = Literal["all", "last"] | None


class Model(nn.Module):
    """Subclasses define `blocks`, `embed` and `unembed`; with learned positions also `add_positions` and
    `max_positions`; and `prepare` if blocks share tensors in a pass."""

    names: Names = {}
    """Parameter paths in this model -> names in checkpoints; see lamina.checkpoint.names."""
    ignored: tuple[str, ...] = ()
    """Patterns of checkpoint tensors that are not loaded."""
    no_effect: tuple[str, ...] = ()
    """Fields of config.json that change nothing in this family, or only where another field asks for them."""
    max_positions: int | None = None
    """The number of positions, if that is a hard limit (a learned table)."""
    max_source_positions: int | None = None
    """The same of an encoder."""
    takes_packed = True
    """Whether blocks see rows through their memory alone, so that ragged rows can run side by side: cache/packed.py"""
    start_ids: tuple[int, ...] = ()
    """The ids that every row of a decoder with a source starts with."""
    blocks: nn.ModuleList
    head: nn.Module
    """[..., width] -> [..., vocab], the last part of `unembed`"""
    config: Config = EMPTY
    """The checkpoint's configuration; empty for a model without one."""
    tokenizer: Tokenizer | None = None
    generation_defaults: Mapping[str, Any] = {}
    preprocessor_config: Mapping[str, Any] = {}
    """The contents of the checkpoint's generation_config.json, and of its preprocessor_config.json."""
    own_defaults: tuple[str, ...] = ()
    """Names in `generation_defaults` that the family reads itself, so that they are no settings of `generate`."""
    compiled: CompiledBlocks | None = None
    uncaptured: str | None = None  # why decode steps of this class are never captured
    sharing: Any = None  # of a model made by `lamina.from_transformers`: the bytes it shares (lamina.bridge)

    @classmethod
    def build(cls, config: Config) -> Self:
        """A model with this configuration and initial weights, in inference mode."""
        config.ignore(*cls.no_effect)
        with config.naming_fields():
            model = cls(config)
        model.config = config
        return model.requires_grad_(False).eval()

    @classmethod
    def part_of(cls, source: Checkpoint) -> Checkpoint:
        """The part of a checkpoint that this family loads, under the names of its table: by default all."""
        return source

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """As in `nn.Module`, except that an AttributeError raised inside a property is shown instead of hidden."""
            try:
                return super().__getattr__(name)
            except AttributeError:
                found = inspect.getattr_static(type(self), name, None)
                if not isinstance(found, property | cached_property):
                    raise
            return found.__get__(self, type(self))  # runs the property again, which raises its own error

    @property
    def specs(self) -> list[LayerSpecs]:
        """For each layer, what the cache must store: name -> spec."""
        return [specs_of(i, block) for i, block in enumerate(self.blocks)]

    @property
    def vocab(self) -> int:
        """The vocabulary size: as set, otherwise the number of logits."""
        if (found := self.__dict__.get("_vocab")) is None:
            found = self.__dict__["_vocab"] = self._count_logits()
        return found

    @vocab.setter
    def vocab(self, count: int) -> None:
        self.__dict__["_vocab"] = count

    @torch.no_grad()
    def _count_logits(self) -> int:
        first = next(self.parameters(), None)
        try:
            ids = torch.zeros(1, 1, dtype=torch.int64, device=None if first is None else first.device)
            return self.unembed(self.embed(ids)).shape[-1]
        except Exception as error:
            raise InputError(
                f"the vocabulary size of {type(self).__name__} cannot be found by its embed and unembed ({error}): "
                "set self.vocab"
            ) from error

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids of the checkpoint."""
        ids = self.generation_defaults.get("eos_token_id")
        if ids is None and self.tokenizer is not None and self.tokenizer.eos_ids:
            ids = self.tokenizer.eos_ids
        ids = config_of(self).get("eos_token_id", ()) if ids is None else ids
        return (ids,) if isinstance(ids, int) else tuple(ids)

    @property
    def context(self) -> int | None:
        """The context length of the checkpoint: `generate` ends a row there unless `beyond_context=True`.

        None if there is none: recurrent models, relative positions (T5), a configuration without one.
        """
        if not any(spec.uses_positions for entry in self.specs for spec in entry.values()):
            return self.max_positions
        return min((n for n in (positions_of(config_of(self)), self.max_positions) if n is not None), default=None)

    @property
    def device(self) -> torch.device:
        return first_weight(self).device

    @property
    def dtype(self) -> torch.dtype:
        first = first_weight(self).dtype
        return first if first.is_floating_point else next(x.dtype for x in self.parameters() if x.is_floating_point())

    # -- defined by a family ---------------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> [B, T, width]"""
        raise InputError(f"{type(self).__name__} does not say how ids are embedded")

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Adds learned positions. x [B, T, width], positions [B, T] -> [B, T, width]

        >>> def add_positions(self, x, positions):
        ...     return x + self.position(positions)  # an nn.Embedding(self.max_positions, width)
        """
        return x

    def prepare(self, positions: Tensor) -> Any:
        """Makes what all blocks of a pass share, from the positions [B, T]."""
        return None

    def finish(self, x: Tensor) -> Tensor:
        """The last hidden state [..., width], usually the final norm of the last block's output [..., width]."""
        return x

    def unembed(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., vocab]"""
        raise InputError(f"{type(self).__name__} does not say how logits are made")

    def encode(self, ids: Any, counts: Any = None, embeds: Any = None) -> Source:
        """The encoder's output, for encoder–decoder models."""
        raise InputError(f"{type(self).__name__} reads no source: only encoder–decoder models do")

    def random_source(self, rows: int, length: int, generator: torch.Generator | None = None) -> Source:
        """The encoder's output for random input of `length` positions, which checks and plans read."""
        return self.encode(random_ids(self.vocab, (rows, length), generator, self.device))

    # -- passes ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        ids: Tensor | None,
        step: Pass,
        logits: Logits = "all",
        embeds: Tensor | None = None,
        hidden: Collection[int] = (),
    ) -> Tensor | None:
        """Runs the model in an open pass: a pure tensor program, which can be compiled, captured and exported.

        hidden   hidden states to keep in `step.hidden`: 0 is the input of the first block, i the output of the i-th
        """
        if isinstance(step, Step) and step.recomputes:
            assert ids is not None
            return recompute_pass(self, ids, step, logits, hidden)
        if embeds is None:
            assert ids is not None
            embeds = self.embed(ids if step.valid is None else ids.masked_fill(~step.valid, 0))
        x, shared = self.enter(embeds, step.positions)
        del embeds  # the blocks need its memory
        compiled = None if hidden or torch.compiler.is_compiling() else self.compiled
        if compiled is not None and isinstance(step, Step) and why_not_compiled(step, x) is None:
            x = compiled(x, step, shared)
        else:
            for i, block in enumerate(self.blocks):
                if i in hidden:
                    step.hidden[i] = x
                x = block(x, step.memory(i), shared)
            if len(self.blocks) in hidden:
                step.hidden[len(self.blocks)] = x
        step.has_run(ids)
        if logits is None:
            return None
        step.logits = self.unembed(step.last(x) if logits == "last" else x)
        return step.logits

    def enter(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
        """The input of the first block, from embedded tokens [B, T, width], and what all blocks share."""
        if self.max_positions is not None and not kernels.on():  # a captured program clamps where it writes them
            positions = positions.clamp(max=self.max_positions - 1)
        return self.add_positions(embeds, positions), self.prepare(positions)

    def __call__(
        self,
        ids: Tensor | Sequence[Sequence[int]] | None = None,
        *,
        cache: Cache | None = None,
        counts: CountsLike | None = None,
        logits: Logits = "all",
        embeds: Tensor | None = None,
        segments: Tensor | None = None,
        spans: Tensor | None = None,
        source: Source | None = None,
    ) -> Tensor | None:
        """Runs ids [B, T] and returns logits.

        cache     continues the rows of this cache, without gradients; None: each row is a whole sequence
        counts    [B] how many of the T tokens are real; the rest is padding on the right
        logits    "all" [B, T, vocab], "last" (after each row's last real token) [B, vocab], or None
        embeds    [B, T, width] instead of ids
        segments  [B, T] only without a cache: several sequences packed into one row
        spans     [B, T] tokens with the same span >= 0 see each other in both directions
        source    only without a cache: the encoder's output, for encoder–decoder models
        """
        ids, embeds = checked_ids(self, ids, embeds, counts)
        shape = embeds.shape[:2] if embeds is not None else ids.shape  # type: ignore[union-attr]
        spans = checked_marks(self, "spans", spans, shape)
        segments = checked_marks(self, "segments", segments, shape)
        if logits not in ("all", "last", None):
            raise InputError(f'logits={logits!r}: it must be "all", "last" or None')
        if cache is None:
            step = step_alone(self, shape, counts, segments=segments, spans=spans, source=source)
            return run(self, step, ids, logits, embeds)
        if segments is not None:
            raise InputError("packed segments run without a cache; with one, give each sequence a row of its own")
        if source is not None:
            raise InputError("a cache holds its source: give it to new_cache(source=…) or cache.attach(source)")
        if cache.model is not self:
            raise InputError("this cache was made by another model; make one with this model's new_cache()")
        if shape[0] != cache.rows:
            raise InputError(f"{shape[0]} rows were given, the cache has {cache.rows}")
        return feed(self, cache, ids, counts=counts, logits=logits, embeds=embeds, spans=spans)[0]

    def check_ids(self, ids: Tensor, counts: CountsLike | None = None) -> None:
        """Raises InputError for ids outside the vocabulary, among the first `counts` of each row."""
        check_ids(ids, self.vocab, counts)

    # -- caches and sources ----------------------------------------------------------------------------------------

    def new_cache(
        self,
        rows: int = 1,
        capacity: int | None = None,
        slack: int = 0,
        source: Source | None = None,
        codec: Codecs | None = None,
        residence: str = "device",
        pool: Pool | None = None,
    ) -> Cache:
        """A cache for this model. The model's specs say what it stores, the arguments say how.

        rows        how many sequences
        capacity    the most tokens a row may hold; None: stores grow as needed
        slack       how many committed tokens sliding windows and recurrent states can be rewound by
        source      the encoder's output, for encoder–decoder models
        codec       how keys and values are quantized: "int8", "int4", "k8v4", "fp8" …, a `Codec`, or layer -> either
        residence   "device", or "host": layers are stored on the host, and fetched while the layer before computes
        pool        a `lamina.Pool` that stores the tokens in pages, which forks share; it sets slack and codec

        >>> model.new_cache(codec={"default": "k5v4", 0: "int8"})      # doctest: +SKIP
        """
        if pool is not None:
            slack, codec = check_pool(pool, self, slack, codec)
        specs = self.specs
        plain = codec is None or all([one.keys == "plain" for one in codecs_of(codec, specs)])
        cache = Cache(
            specs, rows=rows, capacity=capacity, slack=slack, dtype=self.dtype, device=self.device, codec=codec,
            key_means=None if plain else key_means_of(self),
            max_positions=self.max_positions, model=self, residence=residence, pool=pool,
        )  # fmt: skip
        return cache if source is None else cache.attach(source)

    def cross_states(self, source: Source) -> dict[Key, tuple[Tensor, Tensor]]:
        """(layer, entry) -> keys and values [B, H, S, D] of this source, for each cross-attention layer."""
        return {
            (i, name): block.cross(source.states)  # type: ignore[operator]
            for i, block in enumerate(self.blocks)
            for name, spec in block.specs.items()  # type: ignore[union-attr, operator]
            if spec.reads_source
        }

    def cross_inputs(self, source: Source, rows: int) -> Mapping[Key, dict[str, Tensor]]:
        """The source as a pass of `rows` rows without a cache reads it. The source has one row for all, or one each."""
        states = self.cross_states(source)
        if not states:
            raise InputError(f"{type(self).__name__} reads no source: only encoder–decoder models do")
        return {key: source.inputs(k, v, rows) for key, (k, v) in states.items()}

    # -- generation ------------------------------------------------------------------------------------------------

    @property
    def graphs(self) -> Graphs:
        """The captured programs of this model (runtime/graphs.py)."""
        if "_graphs" not in self.__dict__:
            self.__dict__.setdefault("_graphs", Graphs(self))  # if two threads race, both get the first one's
        return self.__dict__["_graphs"]

    @property
    def fusion_plan(self) -> FusionPlan:
        """Which norms a captured decode step computes in the launch in front of them, by module path.

        >>> print(model.fusion_plan)                                  # doctest: +SKIP
        blocks.0.attention.out → blocks.0.mlp_norm        deferred
        blocks.0.mlp.down      → blocks.1.attention_norm  deferred
        """
        return self.graphs.fusion_plan()

    @property
    def activations(self) -> str:
        """Activations of native products with packed integer weights on a CPU: "int8" in groups of 32, or "float32"."""
        found: str = self.__dict__.get("_activations", INT8)
        return found

    @activations.setter
    def activations(self, activations: str) -> None:
        check_activations(activations)
        self.__dict__["_activations"] = activations
        for module in self.modules():
            if isinstance(module, Packed):
                module.activations = activations

    def explain(self, cache: Cache | None = None, rows: int = 1) -> str:
        """How tokens are decoded and prompts are run, and why not faster; how weights are packed, if they are. A small
        prompt is run to find out.

        >>> print(model.explain())                                    # doctest: +SKIP
        decoding: one native program a step …
        """
        return "\n".join([explain_decoding(self, cache, rows), *explain_prompts(self, cache, rows, SHARE)])

    def compile(self, **options: Any) -> None:
        """Compiles blocks for passes of few tokens: decoding is faster from then on.

        The first pass with a new number of rows or tokens compiles for some seconds. Blocks of a kind share one
        program, which serves any length, and growing and fixed caches. `options` are those of `torch.compile`. Unlike
        with `nn.Module.compile`, prompts and other long passes run uncompiled. Captured decode steps do not need it.
        """
        if (packed := how_packed(self)) is not None:
            raise InputError(f'compile is for plain weights, load(weights="plain"); those of this model are {packed}')
        wait_for_kernels(self)  # finish building kernels first, or Dynamo would trace modules in use
        self.compiled = CompiledBlocks(self.blocks, **options)

    def generate(
        self,
        prompts: Any = None,
        max_new_tokens: int | None = None,
        *,
        stream: Callable[[Event], object] | None = None,
        **options: Unpack[CallOptions],
    ) -> Result:
        """Continues each prompt; see `lamina.generation.entry`."""
        return generate(self, prompts, max_new_tokens, stream=stream, **options)

    def score(self, texts: Any = None, **options: Unpack[ScoreOptions]) -> Score:
        """The log-probability of each token of given texts; see `lamina.generation.prefill.score`."""
        return score(self, texts, **options)

    def stream(
        self, prompts: Any = None, max_new_tokens: int | None = None, **options: Unpack[CallOptions]
    ) -> Stream[Result]:
        """The same, as an iterator of events; see `lamina.generation.stream`."""
        return stream(self, prompts, max_new_tokens, **options)
