"""Pairs of an encoder and a decoder that were trained apart, each BERT or a relative: EncoderDecoderModel.

https://arxiv.org/abs/1907.12461
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lamina.cache.layers.base import Key
from lamina.cache.layers.cross import Source
from lamina.config import Config
from lamina.encoder import EncoderDecoder
from lamina.errors import InputError
from lamina.models.bert import Bert, BertEncoder, decoder_names, kind_of, stack_names
from lamina.nn import Linear


class Pair(EncoderDecoder, Bert):
    """The encoder's states are projected if the decoder is of another width."""

    def __init__(self, c: Config) -> None:
        source, target = c.part("encoder"), c.part("decoder")
        source.ignore("tie_word_embeddings")
        c.ignore("tie_encoder_decoder", "vocab_size", "tie_word_embeddings")  # the tensors of both parts are loaded
        target.require("add_cross_attention", [True], False)
        Bert.__init__(self, target)
        self.names = {
            **decoder_names(kind_of(target), "decoder."),
            **stack_names("encoder.", "encoder."),
            "project": "enc_to_dec_proj",
        }
        given = target.get("cross_attention_hidden_size")
        if given not in (None, target.hidden_size):
            raise InputError(
                f"decoder.cross_attention_hidden_size={given} in the configuration is not supported: the decoder reads "
                f"states of its own width, {target.hidden_size}"
            )
        starts = ("decoder_start_token_id", "bos_token_id")
        self.start_ids = (c.first(*starts, default=target.first(*starts, "pad_token_id", default=0)),)
        self.encoder = BertEncoder(source)
        self.source_vocab, self.max_source_positions = source.vocab_size, self.encoder.embedding.count
        same = source.hidden_size == target.hidden_size
        self.project = None if same or given is not None else Linear(source.hidden_size, target.hidden_size)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        ids = super().eos_ids or self.config.part("decoder").get("eos_token_id", ())
        return (ids,) if isinstance(ids, int) else tuple(ids)

    def cross_states(self, source: Source) -> dict[Key, tuple[Tensor, Tensor]]:
        if self.project is not None:
            source = replace(source, states=self.project(source.states))
        return super().cross_states(source)
