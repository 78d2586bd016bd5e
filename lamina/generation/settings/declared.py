"""Settings that need no processor: lengths, search strategies, drafts, token ids, execution and output.

Settings that change scores are declared beside their processors in `lamina.sampling`. `typed.py` is written from both,
by `python docs/setting_types.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.cache.spec import is_model
from lamina.sampling.kinds import (
    Custom,
    Flag,
    Functions,
    Number,
    OneOf,
    Texts,
    TokenId,
    TokenIds,
    Whole,
    Wrong,
    read_ids,
)
from lamina.sampling.setting import NOT_GIVEN, Need, Setting, register

LARGEST_SEED = 2**64 - 1
DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


def _has_draft(values: Mapping[str, Any]) -> bool:
    return any(values[name] is not None for name in DRAFTS)


BEAMS = Need("num_beams", lambda values: values["num_beams"] > 1, "add num_beams=4 or more")
DRAFT = Need("a draft", _has_draft, f"add {', '.join(DRAFTS[:-1])} or {DRAFTS[-1]}")
LOOKUP = Need(
    "prompt lookup",
    lambda values: values["prompt_lookup_num_tokens"] is not None,
    "add prompt_lookup_num_tokens=10",
)
ASSISTANT = Need(
    "an assistant",
    lambda values: values["assistant_model"] is not None,
    "add assistant_model, a model with another tokenizer",
)


def _read_model(value: Any) -> Any:
    if not is_model(value):
        raise Wrong(f"a model, as lamina.load gives one, not a {type(value).__name__}")
    return value


def _read_layers(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value in ("low", "high"):
        return value
    return read_ids(value, '"low", "high" or a list of layer numbers')


SETTINGS = (
    # -- length --------------------------------------------------------------------------------------------------------
    Setting(
        "max_new_tokens", Whole(1), default=None, group="length",
        meaning="Maximum number of new tokens of a row; 20 if max_length is not given either.",
    ),
    Setting(
        "max_length", Whole(1), default=None, group="length", instead_of="max_new_tokens",
        meaning="Maximum number of tokens of a row, prompt and new.",
    ),
    Setting(
        "max_time", Number(0, above=True), default=None, group="length",
        meaning="Seconds after which every row ends with its next token.",
    ),
    Setting(
        "beyond_context", Flag(), default=False, group="length",
        meaning="Rows may exceed the context that the model was trained for (`model.context`).",
    ),
    Setting(
        "stop_strings", Texts(), default=(), group="length", needs_tokenizer=True,
        meaning="A row ends when its new text contains one of these.",
    ),
    Setting(
        "stop", Functions("Stop"), default=(), group="length",
        meaning="stop(row, new tokens, new text) -> True ends the row.",
    ),
    # -- search --------------------------------------------------------------------------------------------------------
    Setting(
        "do_sample", Flag(), default=False, group="search",
        meaning="Draw tokens, of the 50 best unless top_k says otherwise; False takes the best one.",
    ),
    Setting(
        "num_beams", Whole(1, 1024), default=1, group="search", strategy="beams",
        meaning="Beam search: sequences followed for each prompt; 1: no beam search.",
    ),
    Setting(
        "num_return_sequences", Whole(1, 100_000), default=1, group="search",
        meaning="Sequences returned for each prompt.",
    ),
    Setting(
        "early_stopping", OneOf((False, True, "never"), 'bool | Literal["never"]'), default=False, group="search",
        needs=BEAMS,
        meaning='Beam search: end as soon as num_beams sequences have ended; "never": when no other can win.',
    ),
    Setting(
        "length_penalty", Number(-50, 50), default=1.0, group="search", needs=BEAMS,
        meaning="Beam search: scores are divided by length to this power.",
    ),
    Setting(
        "seed", Whole(0, LARGEST_SEED), default=None, group="search",
        meaning="Seed of the draws, below 2**64; None: a new one for every call.",
    ),
    Setting(
        "penalty_alpha", Number(0, 1), default=None, group="search", strategy="contrastive",
        meaning="Contrastive search: weight of the penalty for similarity to earlier tokens.",
    ),
    Setting(
        "dola_layers", Custom("str | Ids", "str | Sequence[int]", _read_layers), default=None, group="search",
        strategy="dola",
        meaning='DoLa: layers to contrast with, "low", "high" or their numbers.',
    ),
    # -- drafts --------------------------------------------------------------------------------------------------------
    Setting(
        "assistant_model", Custom("Model", "Model", _read_model), default=None, group="drafts", strategy="assisted",
        meaning="A smaller model that drafts tokens, which this one verifies.",
    ),
    Setting(
        "prompt_lookup_num_tokens", Whole(1, 1024), default=None, group="drafts", strategy="assisted",
        meaning="Prompt lookup: draft this many tokens by finding the last ones earlier in the sequence.",
    ),
    Setting(
        "max_matching_ngram_size", Whole(1, 16), default=2, group="drafts", needs=LOOKUP,
        meaning="Prompt lookup: the longest run of last tokens that is looked up.",
    ),
    Setting(
        "assistant_early_exit", Whole(1), default=None, group="drafts", strategy="assisted",
        meaning="Draft with this many first layers of the model itself.",
    ),
    Setting(
        "num_assistant_tokens", Whole(1, 1024), default=20, group="drafts", needs=DRAFT,
        meaning="Length of a draft.",
    ),
    Setting(
        "num_assistant_tokens_schedule", OneOf(("constant", "heuristic", "heuristic_transient"), "str"),
        default="constant", group="drafts", needs=DRAFT,
        meaning='Draft length: "constant"; "heuristic" and "heuristic_transient" let it follow acceptance.',
    ),
    Setting(
        "assistant_confidence_threshold", Number(0, 1), default=0.4, group="drafts", needs=DRAFT,
        meaning="A draft ends at a token whose probability is below this.",
    ),
    Setting(
        "target_lookbehind", Whole(0, 1024), default=10, group="drafts", needs=ASSISTANT,
        meaning="Assistant with another tokenizer: last tokens of the model that are tokenized again with new text.",
    ),
    Setting(
        "assistant_lookbehind", Whole(0, 1024), default=10, group="drafts", needs=ASSISTANT,
        meaning="Assistant with another tokenizer: tokens that the assistant can replace, besides its draft.",
    ),
    # -- scores --------------------------------------------------------------------------------------------------------
    Setting(
        "token_healing", Flag(), default=False, group="scores", needs_tokenizer=True,
        meaning="The last token of the prompt may be replaced by a longer one.",
    ),
    # -- token ids -----------------------------------------------------------------------------------------------------
    Setting(
        "bos_token_id", TokenId(), default=None, group="token ids",
        meaning="First token of a row without a prompt.",
    ),
    Setting(
        "eos_token_id", TokenIds(), default=(), group="token ids",
        meaning="Ids that end a row.",
    ),
    Setting(
        "pad_token_id", Whole(-1), default=0, off=NOT_GIVEN, group="token ids",
        meaning="Fills up shorter rows of padded results.",
    ),
    Setting(
        "decoder_start_token_id", TokenIds(single=True), default=None, group="token ids",
        meaning="First token of a decoder that reads a source; several: one for each row.",
    ),
    # -- execution -----------------------------------------------------------------------------------------------------
    Setting(
        "use_cache", Flag(), default=True, group="execution",
        meaning="False: every pass computes the whole sequence.",
    ),
    Setting(
        "prefill_chunk", Whole(1), default=None, group="execution", aliases=("prefill_chunk_size",),
        meaning="Maximum number of prompt tokens of a row in one pass; None: as many as fit into memory.",
    ),
    # -- output --------------------------------------------------------------------------------------------------------
    Setting(
        "output_scores", Flag(), default=False, group="output",
        meaning="Return the processed scores of every token.",
    ),
    Setting(
        "output_logits", Flag(), default=False, group="output",
        meaning="Return the model's logits of every token, before processors.",
    ),
    Setting(
        "output_hidden_states", Flag(), default=False, group="output",
        meaning="Return the output of every layer.",
    ),
    Setting(
        "output_attentions", Flag(), default=False, group="output",
        meaning="Return the attention weights of every layer.",
    ),
    Setting(
        "logprobs", Whole(0), default=None, group="output",
        meaning="Return the log-probability of each chosen token and of this many best ones; None: none.",
    ),
    Setting(
        "prompt_logprobs", Whole(0), default=None, group="output",
        meaning="The same for the tokens of the prompt.",
    ),
)  # fmt: skip

for _setting in SETTINGS:
    register(_setting)
