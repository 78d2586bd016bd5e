"""`TransformersModel`: a Lamina model whose blocks are those of a transformers model.

It has caches, generation, speculation, prefix stores, cache files and `lamina.verify` like any Lamina model. Decode
steps are plain passes: the blocks are not Lamina's, so there are no kernels to capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lamina.bridge.hf_blocks.stack import Stack
from lamina.bridge.weights.memory_checkpoint import config_of, generation_config_of
from lamina.cache.spec import LayerSpecs
from lamina.config import Config
from lamina.errors import InputError
from lamina.model import Model
from lamina.notices import notice

CLOSE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""By how much logits may differ from transformers' own, relative to the largest, when a model is made."""


class TransformersModel(Model):
    uncaptured = "its blocks are those of transformers, for which Lamina has no kernels"
    takes_packed = False  # they make masks for rows

    def __init__(self, hf_model: PreTrainedModel) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stack(hf_model)])
        self.config = Config(config_of(hf_model))
        self.generation_defaults = generation_config_of(hf_model)
        self.max_positions = positions_in_tables(self.stack)
        self.vocab = self.stack.vocab

    @property
    def stack(self) -> Stack:
        stack = self.blocks[0]
        assert isinstance(stack, Stack)
        return stack

    @property
    def specs(self) -> list[LayerSpecs]:
        return [found.specs for found in self.stack.layers]

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings remember their ids until somebody changes them: models may do more with ids than this."""
        x = self.stack.embed(ids)
        x.of_ids = (ids, x._version)  # type: ignore[attr-defined]
        return x

    def enter(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """-> the embeddings, and the ids they were made of if those are known, which the block gets"""
        ids, version = getattr(embeds, "of_ids", (None, None))
        return embeds, ids if version == embeds._version else None

    def unembed(self, x: Tensor) -> Tensor:
        return self.stack.unembed(x)

    def compile(self, **options: Any) -> None:
        raise InputError(f"{self.stack.name} has blocks of transformers, which Lamina does not compile")


WAYS: tuple[dict[str, bool], ...] = (
    {},
    {"one_by_one": True},
    {"grouped": True, "takes_positions": False},
    {"one_by_one": True, "grouped": True, "takes_positions": False},
)
"""Ways of calling a model, the fastest first: see `Stack`."""


@torch.no_grad()
def checked(model: TransformersModel) -> TransformersModel:
    """Compares a few tokens, cached and in rows of different lengths, with the model's own uncached pass, and chooses
    the first way of calling it that gives the same logits. A model for which there is none is refused."""
    stack, close, why = model.stack, CLOSE.get(model.dtype, 0.1), ""
    for way in WAYS:
        before = {name: getattr(stack, name) for name in way}
        if way and (before == way or (way.get("one_by_one") and not stack.has_states)):
            continue  # no other way than one that was tried
        for name, value in way.items():
            setattr(stack, name, value)
        try:
            off = difference(model)
        except Exception as error:  # of many types, by what a model makes of its arguments
            off, why = torch.inf, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if off <= close:
            if off > close / 10:
                notice(
                    f"logits of {stack.name} differ by {off:.1g} of the largest from its own uncached pass, as they do "
                    "over transformers' own cache; lamina.verify(model) shows more",
                    unexpected=True,
                )
            return model
        why = f"logits differ by {off:.2g} of the largest from its own uncached pass" if off < torch.inf else why
        for name, value in before.items():
            setattr(stack, name, value)
    raise InputError(f"{stack.name} does not run over Lamina's caches: {why}")


def difference(model: TransformersModel) -> float:
    """The largest difference of logits, relative to the largest logit, in two rows that are fed in parts of different
    lengths. In half precision, the difference that three quarters of the tokens do not exceed."""
    hf_model = model.stack.hf_model
    length = min(9, model.max_positions or 9)
    ids = torch.randint(3, max(4, model.vocab - 3), (2, length), generator=torch.Generator().manual_seed(0))
    ids = ids.clamp(max=model.vocab - 1).to(model.device)
    truth = torch.cat([hf_model(input_ids=row[None], use_cache=False).logits for row in ids]).float()
    cache, done = model.new_cache(2), [0, 0]
    errors: list[Tensor] = []
    for counts in ([4, 2], [1, 1], [3, 2], [length - 8, length - 5]):
        counts = [max(0, min(count, length - at)) for count, at in zip(counts, done, strict=True)]
        if not any(counts):
            break
        part = torch.zeros(2, max(counts), dtype=torch.int64, device=model.device)
        for row, (at, n) in enumerate(zip(done, counts, strict=True)):
            part[row, :n] = ids[row, at : at + n]
        found = model(part, cache=cache, counts=counts)
        assert found is not None
        for row, (at, n) in enumerate(zip(done, counts, strict=True)):
            errors.append((found[row, :n].float() - truth[row, at : at + n]).abs().amax(dim=-1))
        done = [at + n for at, n in zip(done, counts, strict=True)]
    sorted_errors = torch.nan_to_num(torch.cat(errors), nan=torch.inf).sort().values
    # In few bits a near-tie of experts sends some tokens elsewhere, which says nothing about the others.
    most = len(sorted_errors) - 1 if model.dtype in (torch.float32, torch.float64) else len(sorted_errors) * 3 // 4
    return float(sorted_errors[most] / truth.abs().max())


def positions_in_tables(stack: Stack) -> int | None:
    """The number of positions, if the model looks them up in a table."""
    trained = getattr(stack.hf_model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
    tables = [
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in stack.base.named_modules()
        if isinstance(module, nn.Embedding) and "position" in name.rpartition(".")[2]
        if module.num_embeddings >= trained  # smaller ones belong to other towers
    ]
    return min(tables, default=None)
