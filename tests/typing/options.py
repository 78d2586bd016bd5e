"""What a type checker says about options of `generate`. mypy reads this file, and `warn_unused_ignores` makes sure that
each line marked as an error is one. Nothing here is run."""

from __future__ import annotations

import torch
from torch import Tensor

import lamina
from lamina.generation import Chat, Event, History, Result, Settings, Stream, generate, stream
from lamina.generation.settings.options import AllOptions
from lamina.model import Model


def as_options(settings: Settings) -> AllOptions:
    """Every setting, as `Settings` keeps it, may be passed as an option."""
    return AllOptions(
        max_new_tokens=settings.max_new_tokens,
        max_length=settings.max_length,
        min_length=settings.min_length,
        min_new_tokens=settings.min_new_tokens,
        max_time=settings.max_time,
        beyond_context=settings.beyond_context,
        stop_strings=settings.stop_strings,
        stop=settings.stop,
        do_sample=settings.do_sample,
        num_beams=settings.num_beams,
        num_return_sequences=settings.num_return_sequences,
        early_stopping=settings.early_stopping,
        length_penalty=settings.length_penalty,
        seed=settings.seed,
        penalty_alpha=settings.penalty_alpha,
        dola_layers=settings.dola_layers,
        assistant_model=settings.assistant_model,
        prompt_lookup_num_tokens=settings.prompt_lookup_num_tokens,
        max_matching_ngram_size=settings.max_matching_ngram_size,
        assistant_early_exit=settings.assistant_early_exit,
        num_assistant_tokens=settings.num_assistant_tokens,
        num_assistant_tokens_schedule=settings.num_assistant_tokens_schedule,
        assistant_confidence_threshold=settings.assistant_confidence_threshold,
        target_lookbehind=settings.target_lookbehind,
        assistant_lookbehind=settings.assistant_lookbehind,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        top_h=settings.top_h,
        typical_p=settings.typical_p,
        epsilon_cutoff=settings.epsilon_cutoff,
        eta_cutoff=settings.eta_cutoff,
        repetition_penalty=settings.repetition_penalty,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        encoder_repetition_penalty=settings.encoder_repetition_penalty,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        encoder_no_repeat_ngram_size=settings.encoder_no_repeat_ngram_size,
        bad_words_ids=settings.bad_words_ids,
        sequence_bias=settings.sequence_bias,
        suppress_tokens=settings.suppress_tokens,
        begin_suppress_tokens=settings.begin_suppress_tokens,
        forced_bos_token_id=settings.forced_bos_token_id,
        forced_eos_token_id=settings.forced_eos_token_id,
        exponential_decay_length_penalty=settings.exponential_decay_length_penalty,
        prefix_allowed_tokens_fn=settings.prefix_allowed_tokens_fn,
        remove_invalid_values=settings.remove_invalid_values,
        renormalize_logits=settings.renormalize_logits,
        guidance_scale=settings.guidance_scale,
        negative_prompt=settings.negative_prompt,
        watermarking_config=settings.watermarking_config,
        grammar=settings.grammar,
        token_healing=settings.token_healing,
        logits_processor=settings.logits_processor,
        bos_token_id=settings.bos_token_id,
        eos_token_id=settings.eos_token_id,
        pad_token_id=settings.pad_token_id,
        decoder_start_token_id=settings.decoder_start_token_id,
        use_cache=settings.use_cache,
        prefill_chunk=settings.prefill_chunk,
        output_scores=settings.output_scores,
        output_logits=settings.output_logits,
        output_hidden_states=settings.output_hidden_states,
        output_attentions=settings.output_attentions,
        logprobs=settings.logprobs,
    )


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
    print(events, again, chat)


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
