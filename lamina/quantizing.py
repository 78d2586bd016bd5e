"""`lamina quantize`: writes a checkpoint with quantized weights, and says how much that changes the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.checkpoint.base_model import with_prefix
from lamina.checkpoint.loader import Destination, owner, plan
from lamina.checkpoint.quantized.writer import write_quantized
from lamina.checkpoint.source import Checkpoint, config_dtype, open_source
from lamina.config import Config
from lamina.errors import InputError
from lamina.loading import load
from lamina.model import Model
from lamina.models import family_of
from lamina.weights.format import weight_format, writable
from lamina.weights.int_groups import IntGroups
from lamina.weights.quantize import FLOAT32, PLAIN, fits, packable

TEXT = """\
The river begins in the hills as three small streams, and none of them looks as if it would ever reach the sea.
Below the old mill they meet, and from there on the water is deep enough for boats. In spring, when the snow melts,
it floods the meadows for a week or two; in August children walk across it. People who live beside it measure the
year by what it does: the first ice, the first swallow under the bridge, the evening when the mist stays until
noon. Engineers once planned a dam. They surveyed the valley, drilled into the rock, and calculated that the lake
behind it would be four kilometres long and thirty metres deep. The plan was given up, because the rock was
limestone and would have leaked like a sieve. So the river still runs where it wants to, a little further to the
east each century, and takes a field here and a fence there.
"""
MOST_TOKENS = 1024  # of a text that models are compared on


@dataclass(frozen=True)
class Quality:
    """How far a quantized model is from the original on a text: the mean over its positions.

    kl      divergence of the next token's distribution from the original's, in nats
    same    share of positions whose best token is the same
    """

    tokens: int
    kl: float
    same: float

    def __str__(self) -> str:
        return f"mean KL {self.kl:.4f} nats, the same best token at {self.same:.1%} of {self.tokens:,} positions"


@dataclass(frozen=True)
class Quantized:
    """What was written."""

    path: Path
    tensors: int
    before: int
    """Bytes of the original weights."""
    after: int
    plain: tuple[str, ...]
    """Linear layers that were not quantized."""
    quality: Quality | None
    """None if the checkpoint has no tokenizer."""


def quantize_checkpoint(
    path: str | Path,
    to: str,
    out: str | Path,
    *,
    group: int = 32,
    text: str | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
) -> Quantized:
    """Writes `path` with its linear layers quantized to the folder `out`, in the layout of compressed-tensors.

    to      "int4", "int8" or "fp8"; embedding and head stay as they are, as other programs expect
    group   values that share a scale, for int4 and int8: 32, 64 or 128
    text    on which the two are compared; None: a paragraph about a river

    >>> quantize_checkpoint("Qwen/Qwen3-0.6B", "int4", "qwen3-int4")         # doctest: +SKIP
    """
    if to not in writable():
        raise InputError(f"--to {to}: it must be one of {', '.join(writable())}")
    if group % 32 or group <= 0:
        raise InputError(f"group={group}: values that share a scale are a multiple of 32")
    out, source = Path(out), open_source(path, revision=revision)
    chosen, ignore = linear_tensors(source, to, group)
    before = sum(torch.Size(source.shape(name)).numel() for name in source.names) * config_dtype(source.config).itemsize
    after = write_quantized(source, out, to, group, chosen, ignore)
    quality = compare(path, out, text or TEXT, device, revision)
    return Quantized(out, len(chosen), before, after, tuple(sorted(ignore)), quality)


def linear_tensors(source: Checkpoint, to: str, group: int) -> tuple[set[str], set[str]]:
    """Names of tensors to quantize, and modules that stay plain: the head, and matrices that are more to the model than
    a product (routers, the up matrix of MLA), or whose rows groups do not divide."""
    config = Config(source.config)
    cls = family_of(config)
    with torch.device("meta"):
        model = cls.build(config)
    tensors = with_prefix(cls.part_of(source), model.names)
    if type(tensors) is not type(source):
        raise InputError(f"{source.path} is the text part of another model, or lacks a head: such are not written yet")
    format = IntGroups(4, group) if to == "int4" else IntGroups(8, group) if to == "int8" else weight_format(to)
    chosen: set[str] = set()
    matrices: set[str] = set()
    for place in plan(model, tensors, model.names, torch.float32, tuple(model.ignored)):
        owners = [owner(model, path) for path in place.paths]
        if all(isinstance(one, nn.Embedding) for one, _ in owners):
            continue
        names = [name for name in place.recipe.sources if len(source.shape(name)) == 2 and name.endswith(".weight")]
        matrices.update(names)
        if packable(owners) and not is_end(model, owners) and as_stored(place):
            chosen.update(name for name in names if fits(format, source.shape(name)[1]))
    return chosen, {"lm_head"} | {name.removesuffix(".weight") for name in matrices - chosen}


def is_end(model: Model, owners: list[tuple[nn.Module, str]]) -> bool:
    return any(isinstance(one, nn.Embedding) or one is getattr(model, "head", None) for one, _ in owners)


def as_stored(place: Destination) -> bool:
    """True if the parameter has the values of its tensors as they are."""
    return all(piece.fn is None for entry in place.recipe.entries for piece in entry)


def compare(
    path: str | Path, other: Path, text: str, device: str | torch.device | None = None, revision: str | None = None
) -> Quality | None:
    """The quality of `other` beside `path`; one of the two is in memory at a time."""
    first = load(path, device=device, revision=revision, weights=PLAIN)
    if first.tokenizer is None or hasattr(first, "encoder"):
        return None
    ids = torch.tensor([first.tokenizer.encode(text)[:MOST_TOKENS]], device=first.device)
    wanted = log_probabilities(first, ids)
    del first
    found = log_probabilities(load(other, device=device, activations=FLOAT32), ids)  # of the weights alone
    kl = (wanted.exp() * (wanted - found)).sum(-1).mean()
    same = (wanted.argmax(-1) == found.argmax(-1)).float().mean()
    return Quality(ids.shape[1], float(kl), float(same))


@torch.no_grad()
def log_probabilities(model: Model, ids: Tensor) -> Tensor:
    """ids [1, T] -> [T, vocab] float32"""
    logits = model(ids)
    assert logits is not None
    return F.log_softmax(logits[0].float(), -1)
