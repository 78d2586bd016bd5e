"""Whisper: speech to text. The encoder reads a log-mel spectrogram through two convolutions, the decoder writes tokens.

https://arxiv.org/abs/2212.04356. `transcribe` goes from a waveform to text; `lamina/audio` has the steps between.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.audio.transcribe import transcribe
from lamina.audio.transcription import Transcription
from lamina.cache.counts import Counts, CountsLike
from lamina.cache.layers.cross import Source
from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import From, Value
from lamina.config import Config
from lamina.encoder import Encoder, EncoderDecoder
from lamina.errors import InputError
from lamina.models.t5 import bounded
from lamina.nn import MLP, CrossAttention, Embedding, LayerNorm, Linear, Positions, SelfAttention

Audio = str | os.PathLike[str] | np.ndarray | Tensor


class WhisperEncoderBlock(nn.Module):
    def __init__(self, c: Config, side: str = "encoder") -> None:
        super().__init__()
        heads = getattr(c, f"{side}_attention_heads")
        self.attention_norm = LayerNorm(c.d_model)
        self.attention = SelfAttention(c.d_model, heads, heads, c.d_model // heads, bias=True, out_bias=True, rope=None)
        self.mlp_norm = LayerNorm(c.d_model)
        self.mlp = MLP(c.d_model, getattr(c, f"{side}_ffn_dim"), c.get("activation_function", "gelu"), bias=True)
        self.specs: LayerSpecs = {"attention": self.attention.spec}

    def forward(self, x: Tensor, memory: Memory, shared: None) -> Tensor:
        x = self.attention(self.attention_norm(x), memory, Positions(), onto=x)
        return bounded(self.mlp(self.mlp_norm(x), onto=x))


class WhisperBlock(WhisperEncoderBlock):
    def __init__(self, c: Config) -> None:
        super().__init__(c, "decoder")
        heads = c.decoder_attention_heads
        self.source_norm = LayerNorm(c.d_model)
        self.source = CrossAttention(c.d_model, heads, c.d_model // heads, bias=True, out_bias=True)
        self.specs = {"attention": self.attention.spec, "source": self.source.spec}

    def cross(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(states)

    def forward(self, x: Tensor, memory: Memory, shared: None) -> Tensor:
        x = self.attention(self.attention_norm(x), memory["attention"], Positions(), onto=x)
        x = self.source(self.source_norm(x), memory["source"], onto=x)
        return self.mlp(self.mlp_norm(x), onto=x)


class WhisperEncoder(Encoder):
    """Embeddings are convolved frames: two frames of the spectrogram are one position."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(c.get("num_mel_bins", 80), c.d_model, 3, padding=1)
        self.conv2 = nn.Conv1d(c.d_model, c.d_model, 3, stride=2, padding=1)
        self.positions = Embedding(c.get("max_source_positions", 1500), c.d_model)
        self.blocks = nn.ModuleList(WhisperEncoderBlock(c) for _ in range(c.encoder_layers))
        self.norm = LayerNorm(c.d_model)

    def embed(self, ids: Tensor) -> Tensor:
        raise InputError(NO_IDS)

    def convolve(self, features: Tensor, counts: Tensor | None) -> Tensor:
        """features [B, mels, frames], of which the first counts[row] are real -> [B, ceil(frames / 2), width]

        Each convolution pads with zeros, so padding is zeroed before each: a row is convolved as it would be alone.
        """
        real = None if counts is None else torch.arange(features.shape[-1], device=features.device) < counts[:, None]
        x = features if real is None else features.masked_fill(~real[:, None], 0)
        x = F.gelu(self.conv1(x))
        x = x if real is None else x.masked_fill(~real[:, None], 0)
        return F.gelu(self.conv2(x)).transpose(1, 2)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.positions(positions, onto=x)

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)


NO_IDS = (
    "the source of a Whisper model is audio, not ids or text: model.transcribe(audio), or model.encode(features=…) "
    "with the log-mel spectrogram [B, mels, frames] of lamina.audio.log_mel"
)


def attention_names(ours: str, theirs: str, parts: str) -> dict[str, Value]:
    """`parts` of q, k and v as one matrix. k has no bias: zeros, of the size of v's."""
    biases = {name: f"{theirs}.{name}_proj.bias" for name in "qv"}
    zeros = From(biases["v"], torch.zeros_like)
    return {
        f"{ours}.weight": tuple(f"{theirs}.{name}_proj.weight" for name in parts),
        f"{ours}.bias": tuple(zeros if name == "k" else biases[name] for name in parts),
    }


def stack_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of the encoder or the decoder."""
    block, layer = f"{ours}blocks.{{i}}", f"{theirs}.layers.{{i}}"
    return {
        f"{ours}positions": f"{theirs}.embed_positions",
        f"{block}.attention_norm": f"{layer}.self_attn_layer_norm",
        **attention_names(f"{block}.attention.qkv", f"{layer}.self_attn", "qkv"),
        f"{block}.attention.out": f"{layer}.self_attn.out_proj",
        f"{block}.mlp_norm": f"{layer}.final_layer_norm",
        f"{block}.mlp.up": f"{layer}.fc1",
        f"{block}.mlp.down": f"{layer}.fc2",
        f"{ours}norm": f"{theirs}.layer_norm",
    }


class Whisper(EncoderDecoder):
    names = {
        "embedding": "model.decoder.embed_tokens",
        "head": "proj_out",
        "encoder.conv1": "model.encoder.conv1",
        "encoder.conv2": "model.encoder.conv2",
        **stack_names("encoder.", "model.encoder"),
        **stack_names("", "model.decoder"),
        "blocks.{i}.source_norm": "model.decoder.layers.{i}.encoder_attn_layer_norm",
        "blocks.{i}.source.q": "model.decoder.layers.{i}.encoder_attn.q_proj",
        **attention_names("blocks.{i}.source.kv", "model.decoder.layers.{i}.encoder_attn", "kv"),
        "blocks.{i}.source.out": "model.decoder.layers.{i}.encoder_attn.out_proj",
    }

    no_effect = ("num_hidden_layers", "median_filter_width", "use_weighted_layer_sum")
    own_defaults = ("forced_decoder_ids",)  # language and task, in older checkpoints
    max_positions: int
    max_source_positions: int
    encoder: WhisperEncoder

    def __init__(self, c: Config) -> None:
        super().__init__()
        c.require("scale_embedding", [False], False)  # transformers reads it, and scales nothing
        self.vocab = c.vocab_size
        self.mels = c.get("num_mel_bins", 80)
        self.start_ids = (c.get("decoder_start_token_id", 50257),)
        self.max_positions = c.get("max_target_positions", 448)
        self.max_source_positions = c.get("max_source_positions", 1500)
        self.encoder = WhisperEncoder(c)
        self.embedding = Embedding(c.vocab_size, c.d_model)
        self.positions = Embedding(self.max_positions, c.d_model)
        self.blocks = nn.ModuleList(WhisperBlock(c) for _ in range(c.decoder_layers))
        self.norm = LayerNorm(c.d_model)
        self.head = Linear(c.d_model, c.vocab_size, bias=False)
        if c.get("tie_word_embeddings", True):
            self.head.weight = self.embedding.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.positions(positions, onto=x)

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def encode(
        self,
        ids: Any = None,
        counts: CountsLike | None = None,
        embeds: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Source:
        """Runs the encoder over a log-mel spectrogram, features [B, mels, frames]. The source has a position for every
        two frames. `counts` [B]: how many frames of each row are real. None: all, as transformers has it; a window that
        is shorter than 30 s is then padded with silence (`lamina.audio.log_mel`), as in training.

        embeds   [B, S, width] convolved frames instead; `counts` are positions then

        >>> source = model.encode(features=log_mel(wave, model.mels)[None])      # doctest: +SKIP
        """
        if ids is not None:
            raise InputError(NO_IDS)
        if features is None:
            return super().encode(None, counts, embeds)
        if features.dim() != 3 or features.shape[1] != self.mels or 0 in features.shape:
            raise InputError(f"features must be [B, {self.mels}, frames], not {list(features.shape)}")
        features = features.to(self.device, self.dtype)
        if counts is None:
            return super().encode(embeds=self.encoder.convolve(features, None))
        real = Counts.of(counts, len(features), features.shape[-1], self.device, "counts").tensor
        return super().encode(None, (real + 1) // 2, self.encoder.convolve(features, real))

    def source_example(self, rows: int, positions: int) -> Tensor:
        return torch.zeros(rows, self.mels, 2 * positions, dtype=self.dtype, device=self.device)

    def trace_source(self, given: Tensor, counts: Tensor) -> Source:
        """given [B, mels, frames], of which counts [B] frames are real"""
        positions = (counts + 1) // 2
        return Source(self.encoder(None, positions, embeds=self.encoder.convolve(given, counts)), positions)

    def random_source(self, rows: int, length: int, generator: torch.Generator | None = None) -> Source:
        device = self.device if generator is None else generator.device
        return self.encode(features=torch.randn(rows, self.mels, 2 * length, generator=generator, device=device))

    @overload
    def transcribe(self, audio: Audio, rate: int | None = None, **options: Any) -> Transcription: ...
    @overload
    def transcribe(
        self, audio: Sequence[Audio], rate: int | Sequence[int] | None = None, **options: Any
    ) -> list[Transcription]: ...
    def transcribe(self, audio: Any, rate: Any = None, **options: Any) -> Transcription | list[Transcription]:
        """The text of a recording, or of several; see `lamina.audio.transcribe`."""
        return transcribe(self, audio, rate, **options)
