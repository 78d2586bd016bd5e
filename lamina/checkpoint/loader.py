"""Fills a module built on the meta device from a checkpoint.

First everything is checked against the headers alone: each parameter's recipe (see names.py), the shapes,
and that no tensor is left over. Then each parameter is allocated once, in its final dtype and place, and its
pieces are copied into it one at a time from the memory map: the peak is the weights plus one tensor. A matrix that the
checkpoint stores packed may stay packed (packing.py): on a CPU it then stays on the memory map.

A module takes part in three ways, all optional:
- `keep_float32`: a class attribute, the names of its own parameters that stay float32 whatever the dtype.
- `reset_buffers()`: called after filling; makes the buffers that are computed, not stored (a module built on meta has
  them there, empty). It is run on the CPU, so that the numbers are the same on every device.
- a parameter shared by two modules stays shared; the checkpoint may hold either name, or both. Where it holds
  both and they differ, it knows better than the configuration: each module gets its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lamina.checkpoint.huge_pages import ask_for_huge_pages, collapse
from lamina.checkpoint.names import Names, Recipe, find_recipes, matches_any
from lamina.checkpoint.packing import Packer
from lamina.checkpoint.progress import Bar
from lamina.checkpoint.source import Checkpoint, config_dtype, listing
from lamina.errors import CheckpointError
from lamina.notices import notice
from lamina.weights.quantize import PLAIN, put_packed


@dataclass(frozen=True)
class Destination:
    """A parameter or buffer to fill: all the paths it is known by, and what fills it."""

    paths: tuple[str, ...]
    like: torch.Tensor
    dtype: torch.dtype
    recipe: Recipe


def fill(
    module: nn.Module,
    source: Checkpoint,
    names: Names,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ignore: Iterable[str] = (),
    progress: bool = True,
    weights: str = PLAIN,
) -> None:
    """Give every parameter of `module` its values from `source`.

    `names` maps parameter paths to checkpoint names. `ignore` lists patterns (`{i}` a number, `*` anything)
    of tensors that may be left over. dtype None is the configuration's, else float32. Buffers keep their own
    dtype and are filled only where the checkpoint has them. Nothing is changed when the checkpoint does not
    fit. `weights` says how matrices are stored: "packed" as in the checkpoint, "plain", or a format to quantize them in
    (packing.py).

    >>> import json, pathlib, tempfile
    >>> from safetensors.torch import save_file
    >>> from lamina.checkpoint import open_source
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    >>> save_file({"q.weight": torch.ones(2, 4), "k.weight": torch.zeros(1, 4)}, folder / "model.safetensors")
    >>> with torch.device("meta"):
    ...     module = nn.ModuleDict({"qk": nn.Linear(4, 3, bias=False)})
    >>> fill(module, open_source(folder), {"qk": ("q", "k")})
    >>> module["qk"].weight.sum(1).tolist(), module["qk"].weight.dtype
    ([4.0, 4.0, 0.0], torch.bfloat16)
    """
    dtype = config_dtype(source.config) if dtype is None else dtype
    device = torch.device("cpu") if device is None else torch.device(device)
    places = plan(module, source, names, dtype, tuple(ignore))
    packer = Packer(source, weights, device)
    with Bar("loading weights", sum(p.like.numel() * p.dtype.itemsize for p in places), wanted=progress) as bar:
        for place in places:
            owners = [owner(module, path) for path in place.paths]
            if (packed := packer.pack(module, owners, place.recipe, place.dtype)) is not None:
                put_packed(owners, packed)
            else:
                values = room(place.like.shape, place.dtype, device)
                if device.type != "meta":
                    copy_pieces(values, place.recipe, source)
                put(module, place.paths, place.like, values)
            bar.advance(place.like.numel() * place.dtype.itemsize)
    if packer.dequantized:
        notice(f"packed weights that no matrix of the model has as rows are dequantized: {listing(packer.dequantized)}")
    finish_buffers(module, device)
    collapse(module.parameters())


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a weight, to be filled."""
    values = torch.empty(shape, dtype=dtype, device=device)
    ask_for_huge_pages(values)
    return values


def plan(
    module: nn.Module, source: Checkpoint, names: Names, dtype: torch.dtype, ignore: tuple[str, ...]
) -> list[Destination]:
    """What fills what; raises one error that names everything missing, misshapen or left over."""
    missing: list[str] = []
    misshapen: list[str] = []
    integers: list[str] = []
    used: set[str] = set()
    places: list[Destination] = []
    for paths, tensor in tensors_of(module):
        every = {path: find_recipes(names, path, tuple(tensor.shape)) for path in paths}
        recipes = {path: preferred(found, source) for path, found in every.items() if found}
        used.update(name for recipe in recipes.values() for name in recipe.sources)
        whole = {path: recipe for path, recipe in recipes.items() if recipe.fits(source)}
        for some, recipe in shared_paths(paths, whole, source):
            if problem := shape_problem(recipe, source, tuple(tensor.shape)):
                misshapen.append(f"{some[0]}: {problem}")
            if isinstance(tensor, nn.Parameter):
                integers += integer_pieces(recipe, source)
            places.append(Destination(some, tensor, own_dtype(module, some, tensor, dtype), recipe))
        if not whole and isinstance(tensor, nn.Parameter):
            if not recipes:
                missing.append(f"{paths[0]} (no checkpoint name is given for it)")
            else:
                first = next(iter(recipes.values()))
                missing += [name for name in first.sources if name not in source.names]
    unexpected = [name for name in sorted(source.names) if name not in used and not matches_any(name, ignore)]
    unexpected = [name for name in unexpected if 0 not in source.shape(name)]  # of experts that are none, say
    problems = [
        f"{len(found)} {kind}: {listing(found, separator)}"
        for kind, found, separator in (
            ("missing", missing, ", "),
            ("unexpected", unexpected, ", "),
            ("of another shape", misshapen, "; "),
            ("of integers, as of quantized weights, which are not read", integers, ", "),
        )
        if found
    ]
    if problems:
        text = "\n  ".join(problems)
        raise CheckpointError(f"{source.path} does not fit {type(module).__name__}; tensors\n  {text}")
    return places


def preferred(recipes: Sequence[Recipe], source: Checkpoint) -> Recipe:
    """The first recipe whose tensors the checkpoint has; the first of all if it has none of them."""
    return next((recipe for recipe in recipes if recipe.fits(source)), recipes[0])


def shared_paths(
    paths: tuple[str, ...], whole: dict[str, Recipe], source: Checkpoint
) -> list[tuple[tuple[str, ...], Recipe]]:
    """The paths of one parameter that get the same values, and what fills them: one group unless values differ."""
    if not whole:
        return []
    first = next(iter(whole.values()))
    own = {path: recipe for path, recipe in whole.items() if recipe != first and differ(recipe, first, source)}
    return [(tuple(path for path in paths if path not in own), first)] + [
        ((path,), recipe) for path, recipe in own.items()
    ]


def differ(a: Recipe, b: Recipe, source: Checkpoint) -> bool:
    pieces = [[piece for entry in recipe.entries for piece in entry] for recipe in (a, b)]
    if len(pieces[0]) != len(pieces[1]):
        return True
    return any(not torch.equal(one.read(source), other.read(source)) for one, other in zip(*pieces, strict=True))


def tensors_of(module: nn.Module) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Each parameter and stored buffer once, with all its paths."""
    paths: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for path, tensor in module.state_dict(keep_vars=True).items():
        paths.setdefault(id(tensor), []).append(path)
        tensors[id(tensor)] = tensor
    return [(tuple(paths[key]), tensor) for key, tensor in tensors.items()]


def owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, leaf = path.rpartition(".")
    return module.get_submodule(parent), leaf


def own_dtype(module: nn.Module, paths: tuple[str, ...], tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    if not isinstance(tensor, nn.Parameter):
        return tensor.dtype
    owners = (owner(module, path) for path in paths)
    keep = any(leaf in getattr(submodule, "keep_float32", ()) for submodule, leaf in owners)
    return torch.float32 if keep else dtype


def shape_problem(recipe: Recipe, source: Checkpoint, expected: tuple[int, ...]) -> str | None:
    """None where the recipe gives the expected shape; else what was found."""
    for entry in recipe.entries:
        try:
            shapes = [piece.shape(source) for piece in entry]
        except (RuntimeError, IndexError) as error:  # a transform that cannot take the shape it is given
            texts = (f"{name} {list(source.shape(name))}" for piece in entry for name in piece.names)
            return f"found {' + '.join(texts)}, which cannot be transformed: {error}"
        found: tuple[int, ...] | None = shapes[0]
        if len(shapes) > 1:
            rest = {shape[1:] for shape in shapes}
            joined = len(rest) == 1 and all(shapes)
            found = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if joined else None
        wanted = expected[1:] if recipe.stacked else expected
        if found != wanted:
            texts = (f"{piece} {list(shape)}" for piece, shape in zip(entry, shapes, strict=True))
            each = " for each entry" if recipe.stacked else ""
            return f"found {' + '.join(texts)}, expected {list(wanted)}{each}"
    return None


def integer_pieces(recipe: Recipe, source: Checkpoint) -> list[str]:
    """The tensors that would be copied as they are and are not floating-point numbers."""
    names = [piece.names[0] for entry in recipe.entries for piece in entry if piece.fn is None]
    stored = {name: dtype for name in names if (dtype := source.dtype(name)) is not None}
    return [f"{name} ({dtype})" for name, dtype in stored.items() if not dtype.is_floating_point]


def copy_pieces(values: torch.Tensor, recipe: Recipe, source: Checkpoint) -> None:
    for index, entry in enumerate(recipe.entries):
        target = values[index] if recipe.stacked else values
        if len(entry) == 1:
            target.copy_(entry[0].read(source))
            continue
        start = 0
        for piece in entry:
            tensor = piece.read(source)
            target[start : start + tensor.shape[0]].copy_(tensor)
            start += tensor.shape[0]
            del tensor  # before the next is read


def put(module: nn.Module, paths: Iterable[str], like: torch.Tensor, values: torch.Tensor) -> None:
    """Makes values the parameter or buffer at all these paths, which `like` was."""
    shared = nn.Parameter(values, requires_grad=False) if isinstance(like, nn.Parameter) else values
    for path in paths:
        submodule, leaf = owner(module, path)
        setattr(submodule, leaf, shared)


def finish_buffers(module: nn.Module, device: torch.device) -> None:
    with torch.device("cpu"):
        for submodule in module.modules():
            if callable(reset := getattr(submodule, "reset_buffers", None)):
                reset()
    for path, buffer in list(module.named_buffers(remove_duplicate=False)):
        submodule, leaf = owner(module, path)
        if buffer.is_meta and device.type != "meta":
            raise CheckpointError(
                f"the buffer {path} has no values: the checkpoint does not hold it, and "
                f"{type(submodule).__name__}.reset_buffers does not make it"
            )
        setattr(submodule, leaf, buffer.to(device))
