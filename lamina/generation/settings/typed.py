"""The types of all settings, for editors. Written by `python docs/setting_types.py`; do not edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from torch import Tensor

if TYPE_CHECKING:
    from lamina.model import Model

Ids = tuple[int, ...]
GivenIds = int | Sequence[int] | Tensor
Stop = Callable[[int, list[int], str], bool]
Processor = Callable[..., Tensor]


@dataclass(frozen=True)
class SettingFields:
    """The fields of `Settings`: every setting with its stored type, default and meaning."""

    # -- length --------------------------------------------------------------------------------------------------------
    max_new_tokens: int | None = None
    """Maximum number of new tokens of a row; 20 if max_length is not given either."""
    max_length: int | None = None
    """Maximum number of tokens of a row, prompt and new."""
    max_time: float | None = None
    """Seconds after which every row ends with its next token."""
    beyond_context: bool = False
    """Rows may exceed the context that the model was trained for (`model.context`)."""
    stop_strings: tuple[str, ...] = ()
    """A row ends when its new text contains one of these."""
    stop: tuple[Stop, ...] = ()
    """stop(row, new tokens, new text) -> True ends the row."""
    min_length: int = 0
    """A row may end by eos from this many tokens on, prompt and new."""
    min_new_tokens: int | None = None
    """A row may end by eos from this many new tokens on."""
    # -- search --------------------------------------------------------------------------------------------------------
    do_sample: bool = False
    """Draw tokens, of the 50 best unless top_k says otherwise; False takes the best one."""
    num_beams: int = 1
    """Beam search: sequences followed for each prompt; 1: no beam search."""
    num_return_sequences: int = 1
    """Sequences returned for each prompt."""
    early_stopping: bool | Literal["never"] = False
    """Beam search: end as soon as num_beams sequences have ended; "never": when no other can win."""
    length_penalty: float = 1.0
    """Beam search: scores are divided by length to this power."""
    seed: int | None = None
    """Seed of the draws, below 2**64; None: a new one for every call."""
    penalty_alpha: float | None = None
    """Contrastive search: weight of the penalty for similarity to earlier tokens."""
    dola_layers: str | Ids | None = None
    """DoLa: layers to contrast with, "low", "high" or their numbers."""
    # -- drafts --------------------------------------------------------------------------------------------------------
    assistant_model: Model | None = None
    """A smaller model that drafts tokens, which this one verifies."""
    prompt_lookup_num_tokens: int | None = None
    """Prompt lookup: draft this many tokens by finding the last ones earlier in the sequence."""
    max_matching_ngram_size: int = 2
    """Prompt lookup: the longest run of last tokens that is looked up."""
    assistant_early_exit: int | None = None
    """Draft with this many first layers of the model itself."""
    num_assistant_tokens: int = 20
    """Length of a draft."""
    num_assistant_tokens_schedule: str = "constant"
    """Draft length: "constant"; "heuristic" and "heuristic_transient" let it follow acceptance."""
    assistant_confidence_threshold: float = 0.4
    """A draft ends at a token whose probability is below this."""
    target_lookbehind: int = 10
    """Assistant with another tokenizer: last tokens of the model that are tokenized again with new text."""
    assistant_lookbehind: int = 10
    """Assistant with another tokenizer: tokens that the assistant can replace, besides its draft."""
    # -- sampling ------------------------------------------------------------------------------------------------------
    temperature: float = 1.0
    """Divides the scores: below 1 sharpens the distribution, above 1 flattens it, 0 is greedy."""
    top_h: float | None = None
    """Keep the best tokens up to this share of the entropy."""
    top_k: int = 50
    """Keep this many best tokens (50 as in transformers); 0 keeps all. Contrastive search: candidates."""
    top_p: float = 1.0
    """Keep the best tokens whose probabilities sum to this."""
    min_p: float | None = None
    """Keep tokens with at least this share of the best token's probability."""
    typical_p: float = 1.0
    """Keep the most typical tokens whose probabilities sum to this."""
    epsilon_cutoff: float = 0.0
    """Keep tokens with at least this probability."""
    eta_cutoff: float = 0.0
    """As epsilon_cutoff, with a cutoff that falls as the entropy rises."""
    # -- scores --------------------------------------------------------------------------------------------------------
    guidance_scale: float | None = None
    """Classifier-free guidance: above 1 moves away from the negative prompt; 1 changes nothing."""
    negative_prompt: Any = None
    """What guidance moves away from, in any form of prompt; None: the last token of the prompt."""
    logits_processor: tuple[Processor, ...] = ()
    """Your own processors, (scores [B, V], history) -> scores [B, V]; they run before the sampling filters."""
    token_healing: bool = False
    """The last token of the prompt may be replaced by a longer one."""
    sequence_bias: Mapping[Ids, float] | None = None
    """{(id, …): bias}: added to the score of the id that would complete the sequence."""
    encoder_repetition_penalty: float = 1.0
    """Above 1: tokens of the source (without an encoder, the prompt) are more likely."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that occurred are less likely."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's score for each of its occurrences among the new tokens."""
    presence_penalty: float = 0.0
    """Subtracted once from the score of every token that occurred among the new tokens."""
    no_repeat_ngram_size: int = 0
    """No run of this many tokens occurs twice in a row."""
    encoder_no_repeat_ngram_size: int = 0
    """No run of this many tokens of the source (without an encoder, the prompt) occurs again."""
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None
    """(row, tokens) -> the ids that may come next."""
    grammar: Any = None
    """New text follows {"json": schema}, {"regex": text}, {"lark": text} or {"choice": [text, …]}."""
    bad_words_ids: tuple[Ids, ...] | None = None
    """Sequences of ids that never occur."""
    forced_bos_token_id: int | None = None
    """The first new token after a decoder's start token."""
    forced_eos_token_id: Ids | None = None
    """The last token of a row that reaches its maximum length; one of these ids."""
    remove_invalid_values: bool = False
    """NaN and infinite scores become finite."""
    exponential_decay_length_penalty: tuple[int, float] | None = None
    """(from which new token, growth): end tokens become more likely with every token after that."""
    suppress_tokens: Ids | None = None
    """Ids that are never chosen."""
    begin_suppress_tokens: Ids | None = None
    """Ids that are not chosen as the first new token."""
    watermarking_config: Any = None
    """Green-list watermark: a mapping of greenlist_ratio, bias, hashing_key, seeding_scheme, context_width."""
    renormalize_logits: bool = False
    """Scores become log-probabilities after all processors."""
    # -- token ids -----------------------------------------------------------------------------------------------------
    bos_token_id: int | None = None
    """First token of a row without a prompt."""
    eos_token_id: Ids = ()
    """Ids that end a row."""
    pad_token_id: int = 0
    """Fills up shorter rows of padded results."""
    decoder_start_token_id: int | Ids | None = None
    """First token of a decoder that reads a source; several: one for each row."""
    # -- execution -----------------------------------------------------------------------------------------------------
    use_cache: bool = True
    """False: every pass computes the whole sequence."""
    prefill_chunk: int | None = None
    """Maximum number of prompt tokens of a row in one pass; None: as many as fit into memory."""
    # -- output --------------------------------------------------------------------------------------------------------
    output_scores: bool = False
    """Return the processed scores of every token."""
    output_logits: bool = False
    """Return the model's logits of every token, before processors."""
    output_hidden_states: bool = False
    """Return the output of every layer."""
    output_attentions: bool = False
    """Return the attention weights of every layer."""
    logprobs: int | None = None
    """Return the log-probability of each chosen token and of this many best ones; None: none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""


class Options(TypedDict, total=False):
    """Every setting but `max_new_tokens`, which is an argument of its own, with the types that callers may pass."""

    # -- length --------------------------------------------------------------------------------------------------------
    max_length: int | None
    max_time: float | None
    beyond_context: bool | None
    stop_strings: str | Sequence[str] | None
    stop: Stop | Sequence[Stop] | None
    min_length: int | None
    min_new_tokens: int | None
    # -- search --------------------------------------------------------------------------------------------------------
    do_sample: bool | None
    num_beams: int | None
    num_return_sequences: int | None
    early_stopping: bool | Literal["never"] | None
    length_penalty: float | None
    seed: int | None
    penalty_alpha: float | None
    dola_layers: str | Sequence[int] | None
    # -- drafts --------------------------------------------------------------------------------------------------------
    assistant_model: Model | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    assistant_early_exit: int | None
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: str | None
    assistant_confidence_threshold: float | None
    target_lookbehind: int | None
    assistant_lookbehind: int | None
    # -- sampling ------------------------------------------------------------------------------------------------------
    temperature: float | None
    top_h: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    # -- scores --------------------------------------------------------------------------------------------------------
    guidance_scale: float | None
    negative_prompt: Any
    logits_processor: Processor | Sequence[Processor] | None
    token_healing: bool | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]] | None
    encoder_repetition_penalty: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None
    grammar: Mapping[str, Any] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: GivenIds | None
    remove_invalid_values: bool | None
    exponential_decay_length_penalty: tuple[int, float] | Sequence[float] | None
    suppress_tokens: GivenIds | None
    begin_suppress_tokens: GivenIds | None
    watermarking_config: Any
    renormalize_logits: bool | None
    # -- token ids -----------------------------------------------------------------------------------------------------
    bos_token_id: int | None
    eos_token_id: GivenIds | None
    pad_token_id: int | None
    decoder_start_token_id: GivenIds | None
    # -- execution -----------------------------------------------------------------------------------------------------
    use_cache: bool | None
    prefill_chunk: int | None
    # -- output --------------------------------------------------------------------------------------------------------
    output_scores: bool | None
    output_logits: bool | None
    output_hidden_states: bool | None
    output_attentions: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
