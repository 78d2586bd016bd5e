"""What a type checker says about options of `generate`. mypy reads this file, and `warn_unused_ignores` makes sure that
each line marked as an error is one. Nothing here is run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lamina
from lamina.generation import Chat, Event, History, Result, Settings, Stream, generate, stream
from lamina.model import Model


def right(model: Model, cache: lamina.Cache, store: lamina.PrefixStore, ids: Tensor) -> None:
    def halved(scores: Tensor, history: History) -> Tensor:
        return scores / 2

    def told(event: Event) -> None:
        print(event.text)

    result: Result = model.generate("The sky is", 20, do_sample=True, temperature=0.7, top_k=None, seed=1)
    model.generate(ids, attention_mask=ids > 0, cache=cache, whole=True, row_ids=[0, 1], stream=told)
    model.generate([[1, 2]], max_new_tokens=5, prefixes=store, eos_token_id=[1, 2], num_beams=3, early_stopping="never")
    model.generate([[1]], stop_strings="a", stop=lambda row, tokens, text: len(tokens) > row, logits_processor=halved)
    model.generate([[1]], eos_token_id=torch.tensor([1]), bad_words_ids=[[1]], sequence_bias={(1, 2): 3.0})
    model.generate([[1]], prefix_allowed_tokens_fn=lambda row, tokens: [row], grammar={"regex": "a"}, max_length=9)
    generate(model, "The sky is", assistant_model=model, dola_layers="low", stream=told)
    events: Stream[Result] = model.stream("The sky is", temperature=0.7)
    again: Stream[Result] = stream(model, "The sky is", cache=result.cache)
    chat = Chat(model, system="Be short.", max_new_tokens=20, do_sample=True)
    added: dict[str, Any] = {"my_filter": 0.3}  # of register_setting
    print(events, again, chat, model.generate("The sky is", do_sample=True, **added))


def wrong(model: Model) -> None:
    model.generate("The sky is", temperatur=0.7)  # type: ignore[call-arg]
    model.generate("The sky is", temperature="hot")  # type: ignore[arg-type]
    model.generate("The sky is", max_new_tokens="many")  # type: ignore[arg-type]
    model.generate("The sky is", num_beams=2.5)  # type: ignore[arg-type]
    model.generate("The sky is", do_sample="yes")  # type: ignore[arg-type]
    model.generate("The sky is", early_stopping="always")  # type: ignore[arg-type]
    model.generate("The sky is", cache=5)  # type: ignore[arg-type]
    model.generate("The sky is", grammar="[0-9]+")  # type: ignore[arg-type]
    model.generate("The sky is", stream=5)  # type: ignore[arg-type]
    model.stream("The sky is", stream=print)  # type: ignore[call-arg]
    model.stream("The sky is", top_pp=0.5)  # type: ignore[call-arg]
    generate(model, "The sky is", seed="one")  # type: ignore[arg-type]
    Chat(model, maximal_new_tokens=20)  # type: ignore[call-arg]
    Chat(model, cache=None, whole=True)  # type: ignore[call-arg]
    Chat(model, top_k=0.5)  # type: ignore[arg-type]
    print(Settings(do_sample=True).top_pp)  # type: ignore[attr-defined]
    Settings(top_pp=0.5)  # type: ignore[call-arg]
