"""`lamina.inspect`: what a checkpoint is and what its layers remember, without a weight being loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lamina import kernels
from lamina.cache.codec.codec import Codec
from lamina.cache.spec import Attention, Keeping, Latent, Spec, Tokens
from lamina.cache.summary import size
from lamina.checkpoint.base_model import with_prefix
from lamina.checkpoint.ctranslate2 import CTranslate2Checkpoint
from lamina.checkpoint.gguf.file import GGUFCheckpoint
from lamina.checkpoint.hub import locate
from lamina.checkpoint.loader import plan as check_fit
from lamina.checkpoint.loader import tensors_of
from lamina.checkpoint.names import find_recipes, matches_any
from lamina.checkpoint.shapes import SHAPES
from lamina.checkpoint.source import Checkpoint, config_dtype, open_source
from lamina.checkpoint.text_part import TextPartCheckpoint, towers
from lamina.config import Config
from lamina.errors import CheckpointError, InputError
from lamina.loading import on_meta, refuse_quantized, stored_on_meta
from lamina.model import Model
from lamina.models import family_of
from lamina.planning.bytes import bytes_of_one, chosen_experts
from lamina.planning.layer_kinds import layer_kinds, ranges
from lamina.planning.meta_model import find_config
from lamina.runtime.eligibility import why_no_kernels
from lamina.weights.inventory import packed_formats, weight_bytes
from lamina.weights.quantize import PACKED

GPU = "an NVIDIA GPU of sm_80 or later"
CONFIG_ALONE = "a configuration alone"


@dataclass(frozen=True)
class UnusedTensors:
    """Tensors of a checkpoint that are not loaded: a tower, or what the family's `ignored` patterns match."""

    what: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """What `lamina.inspect` found; printed as text."""

    name: str
    model_type: str
    family: str
    """The class, and its module."""
    format: str
    """safetensors, pickle, GGUF, CTranslate2, or a configuration alone"""
    dtype: str
    context: int | None
    layers: dict[str, list[int]]
    """What layers remember, in words -> indices of the layers; of the decoder, if there is an encoder too."""
    encoder: str | None
    """The encoder, in words."""
    parameters: int
    active: int
    """Parameters that one token uses: without those of experts that it does not visit."""
    experts: str | None
    weight_bytes: int
    packed: dict[str, int]
    """Formats of weights that stay packed -> number of tensors."""
    token_bytes: int
    """Bytes that the cache grows by per token of a row."""
    row_bytes: int
    """Bytes per row that do not grow: full windows, convolutions, states."""
    source_bytes: int
    """Bytes per token of an encoder's output, for decoders with cross-attention."""
    tensors: int | None
    """How many tensors the checkpoint has; None for a configuration alone."""
    unused: tuple[UnusedTensors, ...]
    unread: tuple[str, ...]
    """Fields of the configuration that no code read."""
    not_captured: str | None
    """Why decode steps would not be captured on a GPU; None if they would be."""
    problem: str | None = None
    """Why the checkpoint cannot be loaded; None if it can."""

    def __str__(self) -> str:
        return text(self)


def inspect(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    revision: str | None = None,
    pickle: bool = False,
) -> Inspection:
    """What a checkpoint is: family, layer kinds, parameters, cache bytes, and what of it is not used.

    path      a folder, a .gguf file, a Hub id, a config.json, or a known name or shape such as "llama-3.1-8b"; of a Hub
              id that is not in the cache only the configuration is downloaded
    dtype     in which it would be loaded; None: the checkpoint's own
    revision  a branch, tag or commit, of a Hub id
    pickle    whether pytorch_model.bin is opened where there are no safetensors

    >>> found = inspect("llama-3.1-8b")
    >>> found.family, found.token_bytes, found.not_captured
    ('Llama (lamina.models.llama)', 131072, None)
    """
    name, values = find_config(path, revision)
    config = Config(values)
    cls = family_of(config)
    kind = config_dtype(values) if dtype is None else dtype
    with torch.device("meta"):
        context = cls.build(config).context  # read from the configuration too
    model = on_meta(values, kind)
    place = None if path in SHAPES else locate(path, revision, weights=False)
    source, problem = opened(place, pickle)
    unused: list[UnusedTensors] = []
    if source is not None:
        unused, problem = unused_tensors(model, source), problem or why_unfit(model, source, kind)
    try:
        refuse_quantized(config, path, getattr(cls, "quantized", ()))
    except InputError as error:
        problem = str(error)
    stored = model if problem else stored_on_meta(values, kind, source, PACKED)
    grows, constant, per_source = cache_bytes(model)
    every, active, experts = count_parameters(model)
    return Inspection(
        name=name,
        model_type=config.model_type,
        family=f"{cls.__name__} ({cls.__module__})",
        format=format_of(source, place),
        dtype=str(model.dtype).removeprefix("torch."),
        context=context,
        layers=layer_kinds(model.specs),
        encoder=encoder_of(model),
        parameters=every,
        active=active,
        experts=experts,
        weight_bytes=weight_bytes(stored),
        packed=packed_formats(stored),
        token_bytes=grows,
        row_bytes=constant,
        source_bytes=per_source,
        tensors=None if source is None else len(source.names),
        unused=tuple(unused),
        unread=tuple(config.unread),
        not_captured=why_not_on_a_gpu(model),
        problem=problem,
    )


def opened(place: Path | None, pickle: bool) -> tuple[Checkpoint | None, str | None]:
    """The tensors of a checkpoint; None for a configuration alone. And why they cannot be read, if they are there."""
    if place is None or place.suffix == ".json":
        return None, None
    try:
        return open_source(place, pickle=pickle), None
    except CheckpointError as error:
        return None, str(error) if weight_files(place) else None


def weight_files(folder: Path) -> list[str]:
    """The endings of the weight files of a folder."""
    return [end for end in ("safetensors", "bin", "gguf") if any(folder.glob(f"*.{end}*"))]


def format_of(source: Checkpoint | None, place: Path | None) -> str:
    """The format of a checkpoint; that of its files if they cannot be opened."""
    if isinstance(source, GGUFCheckpoint):
        return "GGUF"
    if isinstance(source, CTranslate2Checkpoint):
        return "CTranslate2"
    found = weight_files(place) if place is not None and place.is_dir() else []
    return {"safetensors": "safetensors", "bin": "pickle", "gguf": "GGUF"}[found[0]] if found else CONFIG_ALONE


def encoder_of(model: Model) -> str | None:
    """The encoder of a model, in words."""
    encoder = getattr(model, "encoder", None)
    count = len(getattr(encoder, "blocks", ()))
    return f"{count} layer{'s' * (count != 1)}, run once for each source" if count else None


def why_not_on_a_gpu(model: Model) -> str | None:
    """Why decode steps of a model on the meta device would not be captured on a GPU: a kind of layer without kernels,
    or a call that no kernel serves, found by a step that launches nothing."""
    reason = why_no_kernels(model.specs, None, model.dtype)
    return reason if reason or not kernels.installed() else model.fusion_plan.reason


# -- tensors -------------------------------------------------------------------------------------------------------


def unused_tensors(model: Model, source: Checkpoint) -> list[UnusedTensors]:
    """Towers that are skipped, and tensors that a pattern of the family's `ignored` matches."""
    text = model.part_of(source)
    part = with_prefix(text, model.names)
    skipped = text.skipped if isinstance(text, TextPartCheckpoint) else []
    found = [tensors(prefix, names, source) for prefix, names in towers(skipped).items()]
    used = {name for paths, like in tensors_of(model) for path in paths for name in sources(model, path, like)}
    for pattern in model.ignored:
        if names := [name for name in sorted(part.names - used) if matches_any(name, (pattern,))]:
            found.append(tensors(pattern, names, part))
    return found


def sources(model: Model, path: str, like: torch.Tensor) -> set[str]:
    """Names of tensors that may fill a parameter."""
    return {name for recipe in find_recipes(model.names, path, tuple(like.shape)) for name in recipe.sources}


def tensors(what: str, names: Sequence[str], source: Checkpoint) -> UnusedTensors:
    return UnusedTensors(what, len(names), sum(source.read(name).nbytes for name in names))


def why_unfit(model: Model, source: Checkpoint, dtype: torch.dtype) -> str | None:
    """Why the tensors do not fit the model: missing, unexpected or of another shape."""
    try:
        check_fit(model, with_prefix(model.part_of(source), model.names), model.names, dtype, tuple(model.ignored))
    except CheckpointError as error:
        return str(error)
    return None


# -- sizes ---------------------------------------------------------------------------------------------------------


def cache_bytes(model: Model) -> tuple[int, int, int]:
    """Bytes of a cache in the model's dtype: per token of a row, per row, and per token of a source."""
    keeping = Keeping(1, None, 0, model.dtype, torch.device("meta"), Codec())
    token = row = source = 0
    for spec in (spec for entry in model.specs for spec in entry.values() if spec.reads_from is None):
        span = window_span(spec)
        if spec.reads_source:
            source += sum(dim * spec.kv_heads for dim in (spec.key_dim, spec.value_dim)) * model.dtype.itemsize  # type: ignore[attr-defined]
        elif isinstance(spec, Attention | Latent | Tokens) and span is None:
            token += bytes_of_one(spec, keeping)
        elif isinstance(spec, Attention | Latent | Tokens):
            row += (span or 0) * bytes_of_one(spec, keeping)
        else:
            row += bytes_of_one(spec, keeping)
    return token, row, source


def window_span(spec: Spec) -> int | None:
    """How many tokens an entry keeps at most; None: all."""
    window = getattr(spec, "window", None)
    if window is None or window.span is None:
        return None
    return window.span + getattr(window, "keep", 0)


def count_parameters(model: Model) -> tuple[int, int, str | None]:
    """All parameters, those that one token uses, and the experts in words."""
    each = chosen_experts(model)
    every = active = 0
    experts: dict[str, int] = {}
    seen: set[int] = set()
    for module in model.modules():
        own = {id(x): x for x in module.parameters(recurse=False) if id(x) not in seen}
        seen.update(own)
        count = sum(x.numel() for x in own.values())
        every += count
        if id(module) in each and own:
            total, chosen = max(len(x) for x in own.values()), each[id(module)]
            active += count * min(chosen, total) // total
            words = f"{total} experts, {chosen} per token"
            experts[words] = experts.get(words, 0) + 1
        else:
            active += count
    told = "; ".join(f"{words}, in {n} layer{'s' * (n != 1)}" for words, n in experts.items())
    return every, active, told or None


# -- text ----------------------------------------------------------------------------------------------------------


def text(found: Inspection) -> str:
    """One fact a line, aligned."""
    family, part = found.family.replace("TextPart (", " ("), "TextPart (" in found.family
    lines: list[tuple[str, str]] = [
        ("family", f"{family}, {'the text model of' if part else 'model_type'} {found.model_type}"),
        ("format", f"{found.format}, loaded in {found.dtype}"),
    ]
    if found.encoder is not None:
        lines.append(("encoder", found.encoder))
    decoder = "decoder " if found.encoder is not None else ""
    for kinds, indices in found.layers.items():
        lines.append((f"{decoder}layer{'s' * (len(indices) > 1)} {ranges(indices)}", kinds))
    if found.context is not None:
        lines.append(("context", f"{found.context:,} tokens"))
    active = "" if found.active == found.parameters else f", {number(found.active)} active per token"
    lines.append(("parameters", f"{number(found.parameters)}{active}"))
    if found.experts is not None:
        lines.append(("experts", found.experts))
    packed = ", ".join(f"{kind} ({count})" for kind, count in found.packed.items())
    lines.append(("weights", size(found.weight_bytes) + (f", packed: {packed}" if packed else "")))
    lines.append(("cache", f"{size(found.token_bytes)} per token, {size(found.row_bytes)} per row besides"))
    if found.source_bytes:
        lines.append(("", f"{size(found.source_bytes)} per token of the source"))
    if found.tensors is not None and not found.unused and found.problem is None:
        lines.append(("tensors", f"all {found.tensors:,} are loaded"))
    for one in found.unused:
        lines.append(
            ("not loaded", f"{one.what}: {one.tensors:,} tensor{'s' * (one.tensors != 1)}, {size(one.nbytes)}")
        )
    unread = f"not read by this family: {', '.join(found.unread)}" if found.unread else "every field is read"
    lines.append(("configuration", unread))
    reason = found.not_captured
    lines.append(("decoding", f"captured on {GPU}" if reason is None else f"plain passes, since {reason}"))
    if found.problem is not None:
        lines.append(("cannot be loaded", found.problem.replace("\n", "\n" + " " * 2)))
    width = max(len(label) for label, _ in lines)
    return "\n".join([found.name, *(f"  {label.ljust(width)}  {fact}" for label, fact in lines)])


def number(count: int) -> str:
    """
    >>> number(8_030_261_248), number(134_515_008), number(52_096)
    ('8.03 B', '134.5 M', '52,096')
    """
    if count < 1e6:
        return f"{count:,}"
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
