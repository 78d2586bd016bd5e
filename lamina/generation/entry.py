"""`generate` and `stream`: the public functions. They check their arguments; `Call` (call.py) does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.generation.call import Call
from lamina.generation.prefill.watch import Progress
from lamina.generation.prefix_store import PrefixStore
from lamina.generation.prompt import prompt_of
from lamina.generation.result import Result
from lamina.generation.settings.arguments import check_arguments
from lamina.generation.settings.options import CALL, CallOptions, Options
from lamina.generation.settings.settings import settings_of
from lamina.generation.stream import Event, Stream

if TYPE_CHECKING:
    from lamina.model import Model

OWN = ("prompts", "stream", *CALL)  # arguments that are not settings; named beside settings in "no such parameter"


def generate(
    model: Model,
    prompts: Any = None,
    max_new_tokens: int | None = None,
    *,
    stream: Callable[[Event], object] | None = None,
    **options: Unpack[CallOptions],
) -> Result:
    """Continues each prompt until it ends.

    prompts         text, texts, ids, id lists, a tensor, a chat or chats; the source of encoder–decoder models. None
                    starts from the BOS id, or continues the rows of the cache
    attention_mask  for a tensor: 1 for real tokens; padding on the left or the right
    cache           continues its rows, one prompt each; a cache of one row serves any number of prompts
    whole           with a cache: True if prompts are whole sequences, of which the rows may hold a part; False if they
                    follow the rows. None decides row by row and never drops tokens of a row: text follows the row; ids
                    and chats are whole sequences only if the row's tokens are a strict prefix of them
    prefixes        a PrefixStore: prefixes that it knows are not computed again, and it stores prompts and answers
    row_ids         integers from 0 to 2**32 - 1, one per sequence, that sampling draws depend on. None: a sequence's
                    draws depend on the seed, its prompt, and its index among equal prompts of the call
    progress        called as progress(done, total) after each pass over the prompts, in tokens. What it raises ends the
                    call, and a cache that was given then holds the tokens so far
    stream          called with an Event (row, token, text, reason) for each new token; text is always whole characters
    and settings    see `lamina.generation.Settings`: max_new_tokens, do_sample, temperature, num_beams … Sampling keeps
                    the 50 best tokens unless top_k says otherwise, as transformers does; top_k=0 keeps all. A setting
                    of sampling, such as temperature, without do_sample samples too, with a notice

    >>> result = model.generate([[1, 2, 3], [4]], max_new_tokens=5)   # doctest: +SKIP
    >>> result.tokens, result.reasons                                 # doctest: +SKIP

    How a prompt continues a row that holds 5 6 7, if "no" is encoded as 8, and with special tokens as 1 8:

    call                                           row             why
    generate("no", cache=cache)                    5 6 7 8         text follows the row, without a BOS
    generate([[5, 6, 7, 8]], cache=cache)          5 6 7 8         whole: 5 6 7 is a strict prefix of it
    generate([[5, 6, 7]], cache=cache)             5 6 7 5 6 7     follows the row: 5 6 7 is not a strict prefix of it
    generate([[5, 9]], cache=cache)                5 6 7 5 9       follows the row
    generate([[5, 9]], cache=cache, whole=True)    5 9             the row is rewound to 5
    generate("no", cache=cache, whole=True)        1 8             the row is rewound to its start
    generate("no", cache=model.new_cache())        1 8             an empty row
    generate(chat, cache=cache)                    as the ids that the chat template gives
    generate(cache=cache)                          5 6 7           nothing is fed
    """
    check_arguments(model, {"stream": stream})
    return _prepare(model, prompts, max_new_tokens, **options)(stream)


def stream(
    model: Model, prompts: Any = None, max_new_tokens: int | None = None, **options: Unpack[CallOptions]
) -> Stream[Result]:
    """`generate` as an iterator of events, sync or async; leaving the loop cancels it.

    Wrong arguments raise here. The model runs when the first event is asked for.

    >>> for event in model.stream("The sky is"):                      # doctest: +SKIP
    ...     print(event.text, end="")
    """
    return Stream(_prepare(model, prompts, max_new_tokens, **options))


def _prepare(
    model: Model,
    prompts: Any,
    max_new_tokens: int | None,
    *,
    attention_mask: Tensor | None = None,
    inputs_embeds: Tensor | Sequence[Tensor] | None = None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Tensor | None = None,
    chat_options: Mapping[str, Any] | None = None,
    cache: Cache | None = None,
    whole: bool | None = None,
    prefixes: PrefixStore | None = None,
    row_ids: Sequence[int] | Tensor | None = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Callable[[Callable[[Event], object] | None], Result]:
    """Checks everything that can be checked before the model runs. -> run(stream), which generates the result"""
    check_arguments(model, {name: value for name, value in locals().items() if name in CALL})
    given: dict[str, Any] = {**options}
    if max_new_tokens is not None:
        given["max_new_tokens"] = max_new_tokens
    settings = settings_of(model, given, also=OWN)
    # Reading the lengths of a cache that another thread extends would set wrong bounds on its clock.
    with nullcontext() if cache is None else cache.used_alone():
        prompt = prompt_of(
            model,
            prompts,
            attention_mask,
            inputs_embeds=inputs_embeds,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            settings=settings,
            chat_options=chat_options,
            held=() if cache is None else cache.clock.sync(),
            whole=whole,
        )
        call = Call(model, settings, prompt, row_ids)
        call.check(cache, whole, prefixes)

    def run(stream: Callable[[Event], object] | None) -> Result:
        call.stream, call.watch.progress = stream, progress
        with torch.no_grad(), nullcontext() if cache is None else cache.used_alone():
            return call.result(cache, whole, prefixes)

    return run
