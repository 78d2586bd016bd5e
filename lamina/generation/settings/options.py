"""The keyword arguments of `generate`, `stream` and `Chat`, with their types, for editors and type checkers.

`Settings` says what each setting means. A setting may be given in more forms than `Settings` keeps it in (a list or a
tensor instead of a tuple), and None turns it off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from torch import Tensor

if TYPE_CHECKING:
    from lamina.cache.cache import Cache
    from lamina.generation.prefix_store import PrefixStore
    from lamina.model import Model

Ids = int | Sequence[int] | Tensor
Stop = Callable[[int, list[int], str], bool]
Processor = Callable[..., Tensor]


class Options(TypedDict, total=False):
    """Every setting but `max_new_tokens`, which is an argument of its own."""

    max_length: int | None
    min_length: int | None
    min_new_tokens: int | None
    max_time: float | None
    beyond_context: bool | None
    stop_strings: str | Sequence[str] | None
    stop: Stop | Sequence[Stop] | None

    do_sample: bool | None
    num_beams: int | None
    num_return_sequences: int | None
    early_stopping: bool | Literal["never"] | None
    length_penalty: float | None
    seed: int | None
    penalty_alpha: float | None
    dola_layers: str | Sequence[int] | None

    assistant_model: Model | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    assistant_early_exit: int | None
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: str | None
    assistant_confidence_threshold: float | None
    target_lookbehind: int | None
    assistant_lookbehind: int | None

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_h: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None

    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]] | None
    suppress_tokens: Ids | None
    begin_suppress_tokens: Ids | None
    forced_bos_token_id: int | None
    forced_eos_token_id: Ids | None
    exponential_decay_length_penalty: tuple[int, float] | Sequence[float] | None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    guidance_scale: float | None
    negative_prompt: Any
    watermarking_config: Any
    grammar: Mapping[str, Any] | None
    token_healing: bool | None
    logits_processor: Processor | Sequence[Processor] | None

    bos_token_id: int | None
    eos_token_id: Ids | None
    pad_token_id: int | None
    decoder_start_token_id: Ids | None

    use_cache: bool | None
    prefill_chunk: int | None

    output_scores: bool | None
    output_logits: bool | None
    output_hidden_states: bool | None
    output_attentions: bool | None
    logprobs: int | None


class AllOptions(Options, total=False):
    """Every setting, for `Chat`."""

    max_new_tokens: int | None


class CallOptions(Options, total=False):
    """What `generate` and `stream` take by name: every setting, and what belongs to one call; see `generate`."""

    attention_mask: Tensor | None
    inputs_embeds: Tensor | Sequence[Tensor] | None
    decoder_input_ids: Any
    decoder_attention_mask: Tensor | None
    chat_options: Mapping[str, Any] | None
    cache: Cache | None
    whole: bool | None
    prefixes: PrefixStore | None
    row_ids: Sequence[int] | Tensor | None


CALL = tuple(name for name in CallOptions.__annotations__ if name not in Options.__annotations__)
"""The names of a call that are no settings."""
