"""Moonshine: speech to text. The encoder reads the waveform itself, through three convolutions, and the source is as
long as the recording; positions are RoPE in both parts.

https://arxiv.org/abs/2410.15608
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.audio.wave import waveform
from lamina.cache.counts import Counts, CountsLike
from lamina.cache.layers.cross import Source
from lamina.cache.memory import Memory
from lamina.checkpoint.names import From, Value
from lamina.config import Config
from lamina.encoder import Encoder, EncoderDecoder
from lamina.errors import InputError
from lamina.models.decoder import qkv_names
from lamina.nn import (
    MLP,
    Block,
    CrossAttention,
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    Positions,
    Rotary,
    SelfAttention,
)

SHORTEST = 895  # samples of one position
NO_IDS = (
    "the source of a Moonshine model is audio, not ids or text: model.transcribe(audio), or model.encode(waves=…) with "
    "samples [B, N] at 16 kHz"
)


def make_norm(c: Config) -> LayerNorm:
    return LayerNorm(c.hidden_size, bias=False)


def make_attention(c: Config, side: str) -> SelfAttention:
    heads = c.get(f"{side}_num_attention_heads", 8)
    c.require(f"{side}_num_key_value_heads", [heads], heads)  # transformers can compute nothing else
    bias = c.get("attention_bias", False)
    c.require("head_dim", (c.hidden_size // heads, None))
    return SelfAttention(c.hidden_size, heads, heads, c.hidden_size // heads, bias=bias, neighbours=True)


def make_rope(c: Config, side: str) -> Rotary:
    return Rotary.of(c, c.hidden_size // c.get(f"{side}_num_attention_heads", 8), partial=0.9)


class MoonshineBlock(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm, self.source_norm, self.mlp_norm = make_norm(c), make_norm(c), make_norm(c)
        self.attention = make_attention(c, "decoder")
        heads = c.get("decoder_num_attention_heads", 8)
        bias = c.get("attention_bias", False)
        self.source = CrossAttention(c.hidden_size, heads, c.hidden_size // heads, bias=bias)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.get("decoder_hidden_act", "silu"), bias=True)
        self.specs = {"attention": self.attention.spec, "source": self.source.spec}

    def cross(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(states)

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        x = self.attention(self.attention_norm(x), memory["attention"], shared, onto=x)
        x = self.source(self.source_norm(x), memory["source"], onto=x)
        return self.mlp(self.mlp_norm(x), onto=x)


class MoonshineEncoder(Encoder):
    """Embeddings are convolved samples: 384 of them are one position."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        width = c.hidden_size
        self.conv1 = nn.Conv1d(1, width, 127, stride=64, bias=False)
        self.wave_norm = nn.GroupNorm(1, width)
        self.conv2 = nn.Conv1d(width, 2 * width, 7, stride=3)
        self.conv3 = nn.Conv1d(2 * width, width, 3, stride=2)
        self.rope = make_rope(c, "encoder")
        self.blocks = nn.ModuleList(
            Block(
                make_attention(c, "encoder"),
                MLP(width, c.intermediate_size, c.get("encoder_hidden_act", "gelu"), bias=True),
                attention_norm=make_norm(c),
                mlp_norm=make_norm(c),
            )
            for _ in range(c.encoder_num_hidden_layers)
        )
        self.norm = make_norm(c)

    def embed(self, ids: Tensor) -> Tensor:
        raise InputError(NO_IDS)

    def convolve(self, wave: Tensor) -> Tensor:
        """One recording [N] -> [S, width]. The norm is over the whole recording, so rows are not convolved together."""
        x = self.wave_norm(self.conv1(wave[None, None]).tanh())
        return F.gelu(self.conv3(F.gelu(self.conv2(x))))[0].mT

    def convolve_rows(self, waves: Tensor, counts: Tensor) -> Tensor:
        """The same for recordings [B, N] of counts [B] samples, as tensor operations alone -> [B, S, width]"""
        x = self.conv1(waves[:, None]).tanh()  # [B, width, F]
        frames = ((counts - 127) // 64 + 1).clamp(min=1)[:, None, None]
        real = torch.arange(x.shape[2], device=x.device) < frames
        size = frames * x.shape[1]
        x = x - (x * real).sum((1, 2), keepdim=True) / size
        variance = (x.square() * real).sum((1, 2), keepdim=True) / size
        scale, shift = self.wave_norm.weight[:, None], self.wave_norm.bias[:, None]
        x = x * (variance + self.wave_norm.eps).rsqrt() * scale + shift
        return F.gelu(self.conv3(F.gelu(self.conv2(x)))).mT

    def prepare(self, positions: Tensor) -> Positions:
        return Positions({"default": self.rope(positions)})

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)


def gate_first(both: Tensor) -> Tensor:
    """Rows of up, then of gate -> of gate, then of up"""
    up, gate = both.chunk(2)
    return torch.cat([gate, up])


def stack_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of the encoder or the decoder."""
    block, layer = f"{ours}blocks.{{i}}", f"{theirs}.layers.{{i}}"
    return {
        f"{block}.attention_norm": f"{layer}.input_layernorm",
        **qkv_names(f"{block}.attention", f"{layer}.self_attn"),
        f"{block}.attention.out": f"{layer}.self_attn.o_proj",
        f"{block}.mlp.up": f"{layer}.mlp.fc1",
        f"{block}.mlp.gate_up": From(f"{layer}.mlp.fc1", gate_first),
        f"{block}.mlp.down": f"{layer}.mlp.fc2",
    }


class Moonshine(EncoderDecoder):
    names = {
        **stack_names("encoder.", "model.encoder"),
        **stack_names("", "model.decoder"),
        **{f"encoder.{name}": f"model.encoder.{name}" for name in ("conv1", "conv2", "conv3")},
        "encoder.wave_norm": "model.encoder.groupnorm",
        "encoder.blocks.{i}.mlp_norm": "model.encoder.layers.{i}.post_attention_layernorm",
        "encoder.norm": "model.encoder.layer_norm",
        "blocks.{i}.source_norm": "model.decoder.layers.{i}.post_attention_layernorm",
        "blocks.{i}.source.q": "model.decoder.layers.{i}.encoder_attn.q_proj",
        "blocks.{i}.source.kv": tuple(f"model.decoder.layers.{{i}}.encoder_attn.{name}_proj" for name in "kv"),
        "blocks.{i}.source.out": "model.decoder.layers.{i}.encoder_attn.o_proj",
        "blocks.{i}.mlp_norm": "model.decoder.layers.{i}.final_layernorm",
        "embedding": "model.decoder.embed_tokens",
        "norm": "model.decoder.norm",
        "head": "proj_out",
    }

    encoder: MoonshineEncoder

    def __init__(self, c: Config) -> None:
        super().__init__()
        c.ignore("pad_head_dim_to_multiple_of")  # zeros, for the kernels of transformers
        self.vocab = c.vocab_size
        self.start_ids = (c.get("decoder_start_token_id", 1),)
        self.encoder = MoonshineEncoder(c)
        self.embedding = Embedding(c.vocab_size, c.hidden_size)
        self.rope = make_rope(c, "decoder")
        self.blocks = nn.ModuleList(MoonshineBlock(c) for _ in range(c.decoder_num_hidden_layers))
        self.norm = make_norm(c)
        self.head = Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.get("tie_word_embeddings", True):
            self.head.weight = self.embedding.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def prepare(self, positions: Tensor) -> Positions:
        return Positions({"default": self.rope(positions)})

    def finish(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def encode(
        self,
        ids: Any = None,
        counts: CountsLike | None = None,
        embeds: Tensor | None = None,
        waves: Tensor | None = None,
    ) -> Source:
        """Runs the encoder over recordings, waves [B, N] at 16 kHz. `counts` [B]: how many samples of each are real.

        embeds   [B, S, width] convolved samples instead; `counts` are positions then

        >>> source = model.encode(waves=waveform("recording.wav")[None])         # doctest: +SKIP
        """
        if ids is not None:
            raise InputError(NO_IDS)
        if waves is None:
            return super().encode(None, counts, embeds)
        if waves.dim() != 2:
            raise InputError(f"waves must be [B, N], not {list(waves.shape)}")
        lengths = [waves.shape[1]] * len(waves)
        if counts is not None:
            lengths = Counts.of(counts, len(waves), waves.shape[1], self.device, "counts").tensor.tolist()
        if min(lengths, default=0) < SHORTEST:
            raise InputError(f"a recording has {min(lengths, default=0)} samples, and the encoder needs {SHORTEST}")
        waves = waves.to(self.device, self.dtype)
        rows = [self.encoder.convolve(wave[:n]) for wave, n in zip(waves, lengths, strict=True)]
        return super().encode(None, [len(row) for row in rows], nn.utils.rnn.pad_sequence(rows, batch_first=True))

    def source_example(self, rows: int, positions: int) -> Tensor:
        return torch.zeros(rows, SHORTEST + 384 * (positions - 1), dtype=self.dtype, device=self.device)

    def trace_source(self, given: Tensor, counts: Tensor) -> Source:
        """given [B, samples], of which counts [B] are real"""
        positions = ((counts - SHORTEST) // 384 + 1).clamp(min=0)
        return Source(self.encoder(None, positions, embeds=self.encoder.convolve_rows(given, counts)), positions)

    def random_source(self, rows: int, length: int, generator: torch.Generator | None = None) -> Source:
        device = self.device if generator is None else generator.device
        samples = SHORTEST + 384 * (length - 1)
        return self.encode(waves=torch.randn(rows, samples, generator=generator, device=device))

    def transcribe(self, audio: Any, rate: int | None = None, **options: Any) -> str | list[str]:
        """The text of a recording, or of a list of them: paths of WAV files, or arrays with their `rate`.

        options   of `generate`; max_new_tokens is by default 6.5 for each second, beyond which the model repeats itself

        >>> model.transcribe("recording.wav")                                    # doctest: +SKIP
        """
        waves = [waveform(one, rate) for one in (audio if isinstance(audio, list) else [audio])]
        lengths = [len(wave) for wave in waves]
        source = self.encode(None, lengths, waves=nn.utils.rnn.pad_sequence(waves, batch_first=True))
        options = {"max_new_tokens": math.ceil(6.5 * max(lengths) / 16000)} | options
        cache = self.new_cache(len(waves), source=source)
        text = self.generate(decoder_input_ids=[[*self.start_ids]] * len(waves), cache=cache, **options).text
        return text if isinstance(audio, list) else text[0]
