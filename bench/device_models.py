"""The models that `bench.device_check` runs: a small random checkpoint of each family, in transformers and here.

`model_of(model_type)` makes one on the device. `Family` is a decoder, `WithSource` a decoder that reads a source. Both
say how the checks feed, decode and compare their model, so that a check is written once.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lamina
from lamina.cache.layers.cross import Source
from lamina.generation import Result
from lamina.model import Model
from lamina.models import TEXT_PARTS
from tests.families.cases import CASES
from tests.families.encoder_decoder_cases import FIRST_CASES, pair_of
from tests.families.harness import loaded, pair, random_ids, truth

PROMPTS = [[5, 9, 12, 3, 44, 8, 21], [7], [30, 31, 32]]
OTHER_NAMES = {"llama4_text": "llama4"}
"""model_type -> the family's name in tests/families/cases, where that is another."""
WITH_STATES = "bert with cross-attention"
"""A family of its own here: a decoder without an encoder, which reads a source that is given as states."""


@dataclass
class Family:
    """A family's model on the device, with the same weights in both libraries; ids [2, T] are compared."""

    theirs: Any
    model: Model
    ids: Tensor

    @property
    def drafts(self) -> list[dict[str, Any]]:
        """Settings of speculation that are checked."""
        return [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1, "num_assistant_tokens": 4}]

    @property
    def encodes(self) -> bool:
        """True if the model reads a source."""
        return any(spec.reads_source for entry in self.model.specs for spec in entry.values())

    def logits(self) -> Tensor:
        """[2, T, vocab] of one pass without a cache."""
        found = self.model(self.ids)
        assert found is not None
        return found

    def truth(self) -> Tensor:
        """The logits of transformers' pass without a cache over each row."""
        return truth(self.theirs, self.ids)

    def new_cache(self, rows: int, **how: Any) -> lamina.Cache:
        return self.model.new_cache(rows, **how)

    def generate(self, more: int, **settings: Any) -> Result:
        return self.model.generate(PROMPTS, more, eos_token_id=None, **settings)

    def plain(self, more: int, **settings: Any) -> Result:
        """By plain passes: a captured step writes no logits down."""
        return self.generate(more, output_logits=True, **settings)


SOURCES = {"input_ids": "ids", "input_features": "features", "input_values": "waves"}
"""What a source is called by transformers -> by `model.encode`."""


@dataclass
class WithSource(Family):
    """
    name     what transformers calls the source: input_ids, input_features, input_values, encoder_hidden_states
    source   of three rows, the first two of which are compared
    """

    name: str
    source: Tensor

    @property
    def drafts(self) -> list[dict[str, Any]]:
        by_ids = self.name in ("input_ids", "encoder_hidden_states")  # an assistant encodes the ids of the source again
        return super().drafts if by_ids else super().drafts[:1]

    def encoded(self, rows: int) -> Source:
        if self.name in SOURCES:
            return self.model.encode(**{SOURCES[self.name]: self.source[:rows]})
        states = self.source[:rows].to(self.model.dtype)
        return Source(states, torch.full((rows,), states.shape[1], device=states.device))

    def logits(self) -> Tensor:
        found = self.model(self.ids, source=self.encoded(len(self.ids)))
        assert found is not None
        return found

    @torch.no_grad()
    def truth(self) -> Tensor:
        text = "decoder_input_ids" if self.name in SOURCES else "input_ids"
        rows = [{self.name: source[None], text: row[None]} for source, row in zip(self.source, self.ids, strict=False)]
        return torch.cat([self.theirs(**row, use_cache=False).logits for row in rows])

    def new_cache(self, rows: int, **how: Any) -> lamina.Cache:
        return self.model.new_cache(rows, source=self.encoded(rows), **how)

    def generate(self, more: int, **settings: Any) -> Result:
        if self.name == "input_ids":
            return super().generate(more, **settings)
        text = "decoder_input_ids" if self.model.start_ids else "prompts"
        given = {text: PROMPTS, "cache": self.new_cache(len(PROMPTS))}
        return self.model.generate(max_new_tokens=more, eos_token_id=[], **given, **settings)


# -- one of each family --------------------------------------------------------------------------------------------


def config_of(model_type: str) -> dict[str, Any]:
    """The configuration of a decoder's first case, or of an encoder–decoder family's."""
    name = OTHER_NAMES.get(model_type, model_type)
    return (FIRST_CASES[name] if name in FIRST_CASES else next(iter(CASES[name].values())))().to_dict()


def model_of(model_type: str) -> Family:
    if model_type == WITH_STATES:
        return with_states()
    if model_type in FIRST_CASES:
        return with_encoder(model_type)
    inside = TEXT_PARTS.get(model_type, model_type)
    name = OTHER_NAMES.get(inside, inside)
    theirs, model = pair(name, next(iter(CASES[name])))
    pair.cache_clear()
    if model_type in TEXT_PARTS:
        model = inside_of(model_type, theirs)
    length = min(40, model.context or 40)
    return Family(theirs.cuda(), model.cuda(), random_ids(2, length, model.vocab).cuda())


NOISE = {"whisper": 0.3, "moonshine": 0.1}  # added to weights; with less, the same token follows every other


def with_encoder(model_type: str) -> WithSource:
    theirs, model = pair_of(FIRST_CASES[model_type](), NOISE.get(model_type, 0.05))
    ids = 3 + random_ids(3, 24, 50)  # above special ids: some families count no positions for padding
    name = theirs.main_input_name
    noise = {"input_features": (3, 80, 100), "input_values": (3, 6000)}
    source = torch.randn(noise[name], generator=torch.Generator().manual_seed(0)) if name in noise else ids
    return WithSource(theirs.cuda(), model.cuda(), ids[:2].cuda(), name, source.cuda())


def with_states() -> WithSource:
    """BERT with cross-attention and no encoder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = CASES["bert"]["plain"](add_cross_attention=True)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model, states = loaded(theirs), torch.randn(3, 9, config.hidden_size)
    ids = 7 + random_ids(2, 24, 60)
    return WithSource(theirs.cuda(), model.cuda(), ids.cuda(), "encoder_hidden_states", states.cuda())


def inside_of(model_type: str, theirs: Any) -> Model:
    """A text model, loaded from a checkpoint of the multimodal release `model_type` that has it inside."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save_pretrained(folder)
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": text}))
        file = folder / "model.safetensors"
        stored = {inner.replace("model.", "model.language_model.", 1): x for inner, x in load_file(file).items()}
        save_file(stored | {"vision_tower.weight": torch.zeros(2)}, file)
        return lamina.load(folder, device="cpu")


# -- faults of older versions of transformers ----------------------------------------------------------------------


def with_partial_rope(one: Family) -> Tensor:
    config = copy.deepcopy(one.theirs.config)
    config.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": config.rotary_dim / config.head_dim}
    inner = one.theirs.model
    inner.rotary_emb = type(inner.rotary_emb)(config).to(one.ids.device)
    return one.truth()


@torch.no_grad()
def with_causal_mask(one: Family) -> Tensor:
    T = one.ids.shape[1]
    mask = torch.full((T, T), torch.finfo(torch.float32).min, device=one.ids.device).triu(1)[None, None]
    return torch.cat([one.theirs(row[None], attention_mask=mask, use_cache=False).logits for row in one.ids])


MENDED: dict[str, tuple[str, Callable[[Family], Tensor]]] = {
    "minimax_m2": ("ignores rotary_dim, and was given partial_rotary_factor", with_partial_rope),
    "roformer": ("does not mask later tokens, and was given a causal mask", with_causal_mask),
}
"""model_type -> what transformers 5.17 does wrong, and its logits without that; 5.22 is right."""
