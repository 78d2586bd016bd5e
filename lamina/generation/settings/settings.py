"""Settings: every parameter of `generate` in one frozen object, under the names that users know.

What the caller passes beats the checkpoint's generation_config.json, which beats the defaults below. validate.py says
what each may be, conflicts.py what contradicts what: the caller's values must all mean something together, and values
of the file that do not apply to what the caller asked for are not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from lamina.cache.spec import is_model
from lamina.config import config_of
from lamina.errors import InputError
from lamina.generation.settings import conflicts, validate
from lamina.generation.settings.conflicts import Origins
from lamina.generation.settings.validate import Values
from lamina.sampling.forcing import NEW_TOKENS

if TYPE_CHECKING:
    from lamina.model import Model

Ids = tuple[int, ...]
Strategy = Literal["plain", "beams", "assisted", "contrastive", "dola"]


@dataclass(frozen=True, repr=False)
class Settings:
    """Made by `settings_of`, which checks; a field that does not apply has its default.

    The defaults are those of transformers. So sampling draws from the 50 best tokens: `top_k=0` draws from all.

    >>> Settings(do_sample=True, top_p=0.9)
    Settings(do_sample=True, top_p=0.9)
    """

    # how long
    max_new_tokens: int | None = None  # new tokens of a row, at most
    max_length: int | None = None  # tokens of a row, prompt and new, at most
    min_length: int = 0  # tokens of a row, prompt and new, before it may end by eos
    min_new_tokens: int | None = None  # new tokens of a row before it may end by eos
    max_time: float | None = None  # seconds after which every row ends with its next token
    beyond_context: bool = False  # rows may get longer than the model was made for (`model.context`)
    stop_strings: tuple[str, ...] = ()  # a row ends when its new text holds one of these
    stop: tuple[Callable[[int, list[int], str], bool], ...] = ()  # stop(row, new tokens, new text) -> whether it ends

    # which token
    do_sample: bool = False  # draw tokens, of the 50 best unless top_k says otherwise; False: the best one is taken
    num_beams: int = 1  # sequences that beam search follows for each prompt; 1: no beam search
    num_return_sequences: int = 1  # sequences returned for each prompt
    early_stopping: bool | Literal["never"] = False  # beams: end at enough finished ones; "never": when none can win
    length_penalty: float = 1.0  # beams: scores are divided by length to this power
    seed: int | None = None  # of the draws, below 2**64; None: another one every time
    penalty_alpha: float | None = None  # contrastive search: weight of being unlike what came before
    dola_layers: str | Ids | None = None  # DoLa: layers to contrast with, "low", "high" or their numbers

    # drafts
    assistant_model: Model | None = None  # a smaller model whose drafts this one checks
    prompt_lookup_num_tokens: int | None = None  # drafts are this many tokens found again in the sequence itself
    max_matching_ngram_size: int = 2  # prompt lookup: the longest run of last tokens that is looked up
    assistant_early_exit: int | None = None  # drafts come from the first so many layers of the model itself
    num_assistant_tokens: int = 20  # length of a draft
    num_assistant_tokens_schedule: str = "constant"  # or "heuristic", "heuristic_transient": follows acceptance
    assistant_confidence_threshold: float = 0.4  # a draft ends where its model is less sure than this
    target_lookbehind: int = 10  # other tokenizer: the model's last tokens that are tokenized again with new text
    assistant_lookbehind: int = 10  # other tokenizer: tokens that the assistant can replace, beside its guesses

    # what sampling cuts away
    temperature: float = 1.0  # scores are divided by it: below 1 sharper, above 1 flatter, 0: do_sample=False
    top_k: int = 50  # only so many of the best tokens (50 as in transformers); 0: all; contrastive search: candidates
    top_p: float = 1.0  # only the best tokens that together have this probability
    min_p: float | None = None  # only tokens at least this share as probable as the best one
    top_h: float | None = None  # only the best tokens up to this share of the entropy
    typical_p: float = 1.0  # only the most typical tokens that together have this probability
    epsilon_cutoff: float = 0.0  # only tokens at least this probable
    eta_cutoff: float = 0.0  # the same, with a bound that falls with the entropy

    # what else changes scores
    repetition_penalty: float = 1.0  # above 1: tokens that occurred are less likely
    presence_penalty: float = 0.0  # taken off the score of every token that occurred
    frequency_penalty: float = 0.0  # taken off as often as the token occurred
    encoder_repetition_penalty: float = 1.0  # above 1: tokens of the source (or the prompt) are more likely
    no_repeat_ngram_size: int = 0  # no run of so many tokens occurs twice
    encoder_no_repeat_ngram_size: int = 0  # no run of so many tokens of the source occurs
    bad_words_ids: tuple[Ids, ...] | None = None  # sequences that never occur
    sequence_bias: Mapping[Ids, float] | None = None  # added to the score of a sequence's last token
    suppress_tokens: Ids | None = None  # ids that are never taken
    begin_suppress_tokens: Ids | None = None  # ids that are not taken first
    forced_bos_token_id: int | None = None  # the first new token
    forced_eos_token_id: Ids | None = None  # the last token of a row that reaches its greatest length
    exponential_decay_length_penalty: tuple[int, float] | None = None  # (from which new token, growth): eos more likely
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None  # (row, tokens) -> ids that may come
    remove_invalid_values: bool = False  # NaN and infinite scores become finite
    renormalize_logits: bool = False  # scores are log-probabilities again after everything
    guidance_scale: float | None = None  # above 1: away from what the negative prompt would give
    negative_prompt: Any = None  # what guidance leads away from, in any form of prompt; None: the prompt's last token
    watermarking_config: Any = None  # a green-list watermark: greenlist_ratio, bias, hashing_key, …
    grammar: Any = None  # what the text must obey: a JSON schema, a regular expression or a grammar
    token_healing: bool = False  # the prompt's last token may become a longer one
    logits_processor: tuple[Callable[..., Tensor], ...] = ()  # the caller's own, (scores, history) -> scores

    # ids
    bos_token_id: int | None = None  # what a row without a prompt starts with
    eos_token_id: Ids = ()  # ids that end a row
    pad_token_id: int = 0  # fills rows up in padded results
    decoder_start_token_id: int | Ids | None = None  # what a decoder with a source starts with; several: one a row

    # how it is run
    use_cache: bool = True  # False: every pass runs the whole sequence
    prefill_chunk: int | None = None  # tokens of a prompt fed in one pass, at most

    # what is returned
    output_scores: bool = False  # the processed scores of every step
    output_logits: bool = False  # the scores as the model gave them
    output_hidden_states: bool = False  # what every layer gave
    output_attentions: bool = False  # what every layer looked at
    logprobs: int | None = None  # log-probabilities of the chosen token and of so many best ones; None: none

    def describe(self) -> str:
        """What differs from the defaults, as it would be passed.

        >>> Settings(num_beams=4, eos_token_id=(2,)).describe()
        'num_beams=4, eos_token_id=(2,)'
        """
        return ", ".join(
            f"{name}={_shown(value)}" for name, value in vars(self).items() if not conflicts.same(value, DEFAULTS[name])
        )

    def __repr__(self) -> str:
        return f"Settings({self.describe()})"

    @property
    def strategy(self) -> Strategy:
        """How tokens are searched for; all but contrastive search work with and without sampling."""
        found = [name for name, _ in conflicts.strategies(vars(self))]
        return found[0] if found else "plain"  # type: ignore[return-value]

    def most_new(self, prompt: int) -> int:
        """How many new tokens a row with a prompt of so many tokens may get.

        >>> Settings(max_length=10).most_new(7), Settings().most_new(7)
        (3, 20)
        """
        if self.max_length is None:
            return NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens
        if prompt >= self.max_length:
            raise InputError(
                f"max_length={self.max_length} leaves no room after a prompt of {prompt} tokens: "
                "give a larger one, or max_new_tokens"
            )
        return self.max_length - prompt

    def least_new(self, prompt: int) -> int:
        """How many new tokens that row gets before it may end by eos."""
        least = max(self.min_length - prompt, 0) if self.min_new_tokens is None else self.min_new_tokens
        if least > (most := self.most_new(prompt)):
            raise InputError(
                f"a prompt of {prompt} tokens must get {least} new ones (min_length={self.min_length}, "
                f"min_new_tokens={self.min_new_tokens}) and may get {most} (max_length={self.max_length}, "
                f"max_new_tokens={self.max_new_tokens})"
            )
        return least


DEFAULTS: Values = {field.name: field.default for field in dataclasses.fields(Settings)}
FLAGS = frozenset(field.name for field in dataclasses.fields(Settings) if field.type == "bool")


def settings_of(model: Model, given: Mapping[str, Any], also: Iterable[str] = ()) -> Settings:
    """The settings of one call: defaults < `model.generation_defaults` < given.

    A value of None that is given turns a setting off, whatever the file says. `also` are names that the caller of this
    function knows besides, for the advice about unknown ones.

    >>> settings_of(model, {"do_sample": True, "top_p": 0.9})       # doctest: +SKIP
    Settings(do_sample=True, top_p=0.9, eos_token_id=(2,))
    """
    stored = validate.from_file(model.generation_defaults, DEFAULTS)
    asked = validate.from_caller(given, DEFAULTS, also)
    chosen, origins = dict(DEFAULTS), Origins({})
    for found, origin in ((stored, "file"), (asked, "caller")):
        for name, value in found.items():
            if origin == "file" and name in asked:
                continue  # the caller's value counts, so the file's may be anything
            chosen[name] = validate.tidy(name, value, FLAGS, from_file=origin == "file")
            origins[name] = origin
    validate.check_ids({name: chosen[name] for name in asked}, model.vocab)
    conflicts.settle(chosen, origins, DEFAULTS)
    _check_assistant(chosen["assistant_model"])
    _need_tokenizer(model, chosen)
    _fill_in_ids(model, chosen, origins)
    return Settings(**chosen)


def _check_assistant(assistant: Any) -> None:
    if assistant is not None and not is_model(assistant):
        raise InputError(
            f"assistant_model={validate.short(assistant)}: it must be a model, as lamina.load gives one, not a "
            f"{type(assistant).__name__}"
        )


def _need_tokenizer(model: Model, chosen: Values) -> None:
    for name in ("stop_strings", "token_healing", "grammar"):
        if chosen[name] and model.tokenizer is None:
            raise InputError(f"{name} works on text, and this checkpoint has no tokenizer: leave it out, or end by ids")


def _fill_in_ids(model: Model, chosen: Values, origins: Origins) -> None:
    """Special ids that neither the caller nor the file gives are the checkpoint's."""
    tokenizer = model.tokenizer
    if "eos_token_id" not in origins:
        chosen["eos_token_id"] = model.eos_ids
    if "bos_token_id" not in origins:
        bos = config_of(model).get("bos_token_id")
        chosen["bos_token_id"] = tokenizer.bos_id if bos is None and tokenizer is not None else bos
    if "pad_token_id" not in origins:
        pad = config_of(model).get("pad_token_id")
        if pad is None and tokenizer is not None and "pad_token" in tokenizer.special_tokens:
            pad = tokenizer.backend.token_to_id(tokenizer.special_tokens["pad_token"])
        chosen["pad_token_id"] = next((one for one in (pad, *chosen["eos_token_id"]) if one is not None), 0)
    if model.start_ids:
        if chosen["decoder_start_token_id"] is None:
            chosen["decoder_start_token_id"] = model.start_ids[0]
    elif origins.get("decoder_start_token_id") == "caller" and chosen["decoder_start_token_id"] is not None:
        raise InputError(
            f"decoder_start_token_id={chosen['decoder_start_token_id']} is for models that read a source, and "
            f"{type(model).__name__} does not: begin the prompt with that id instead"
        )
    else:
        chosen["decoder_start_token_id"] = None


def _shown(value: Any) -> str:
    """A value in one line: of a model only its kind."""
    return type(value).__name__ if isinstance(value, nn.Module) else repr(value)
