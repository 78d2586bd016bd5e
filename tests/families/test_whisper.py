"""Whisper: transformers' states, logits and transcriptions on random checkpoints, from a waveform."""

from __future__ import annotations

import copy
import functools
import random
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

import lamina
from lamina.audio import Transcription
from lamina.cache import Source
from lamina.errors import InputError
from lamina.generation.prompt import from_padded
from lamina.models.whisper import Whisper
from tests.families.encoder_decoder_cases import WHISPER_SIZES
from tests.families.harness import TOLERANCE, random_cuts, random_ids, relative, run_in_pieces, run_ragged

LENGTH, VOCAB, POSITIONS = 40, 160, 50  # a window is 1 s: 100 frames, 50 positions

CASES: dict[str, dict[str, Any]] = {
    "english": dict(),
    "multilingual": dict(multilingual=True, encoder_layers=1, decoder_layers=3, activation_function="gelu_new"),
    "128 mels, own head, deep encoder": dict(
        num_mel_bins=128, tie_word_embeddings=False, encoder_layers=3, decoder_layers=1, decoder_attention_heads=4,
        activation_function="relu",
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)
FIRST, MANY = "english", "multilingual"


@functools.cache
def pair(name: str) -> tuple[Any, Whisper]:
    """A random model of transformers in float32, and ours loaded from what it saved."""
    torch.manual_seed(0)
    settings = WHISPER_SIZES | CASES[name]
    multilingual = settings.pop("multilingual", False)
    theirs = WhisperForConditionalGeneration(WhisperConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    own = theirs.generation_config
    own.suppress_tokens, own.no_timestamps_token_id, own.prev_sot_token_id = [1, 2, 91, 98, 99, 100], 100, 98
    own.max_initial_timestamp_index, own.is_multilingual = 10, multilingual
    if multilingual:
        own.lang_to_id = {"<|en|>": 92, "<|de|>": 93, "<|fr|>": 94}
        own.task_to_id = {"translate": 95, "transcribe": 96}
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        extractor(theirs).save_pretrained(folder)
        ours = lamina.load(folder, device="cpu")
    assert isinstance(ours, Whisper)
    return theirs, ours


def extractor(theirs: Any) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=theirs.config.num_mel_bins, chunk_length=1)


def random_features(theirs: Any, frames: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(theirs.config.num_mel_bins, count, generator=generator) for count in frames]


@torch.no_grad()
def encoded(theirs: Any, features: Tensor) -> Tensor:
    """One row's encoder states. features [mels, F] -> [positions, width]

    transformers encodes whole windows only: its window is made as long as the row.
    """
    positions = (features.shape[1] + 1) // 2
    if features.shape[1] % 2:  # the second convolution reads a zero behind an odd number of frames, as the first does
        padded = torch.nn.functional.pad(features, (0, 1))
        return odd_states(theirs, padded, positions)
    return shortened(theirs, positions)(features[None]).last_hidden_state[0]


def shortened(theirs: Any, positions: int) -> Any:
    encoder = copy.deepcopy(theirs.model.encoder)
    encoder.config.max_source_positions = positions
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(
        theirs.model.encoder.embed_positions.weight[:positions]
    )
    return encoder


def odd_states(theirs: Any, padded: Tensor, positions: int) -> Tensor:
    """The first convolution's output at the padding frame is zeroed, which stands for the second one's own padding."""
    encoder = shortened(theirs, positions)

    def zero_last(module: Any, given: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[..., -1] = 0  # gelu(0) is 0
        return out

    encoder.conv1.register_forward_hook(zero_last)
    return encoder(padded[None]).last_hidden_state[0]


@torch.no_grad()
def truth(theirs: Any, features: Tensor, target: Tensor) -> Tensor:
    """One row in one uncached pass. features [mels, F], target [T] -> [T, vocab]"""
    states = encoded(theirs, features)[None]
    return theirs(encoder_outputs=(states,), decoder_input_ids=target[None], use_cache=False).logits[0]


def random_rows(lengths: list[int], seed: int = 5) -> list[Tensor]:
    return [random_ids(1, length, VOCAB, seed=seed + r)[0] for r, length in enumerate(lengths)]


def encode_rows(model: Whisper, rows: list[Tensor]) -> Source:
    """Rows of different lengths, padded with something that must not be read."""
    frames = [row.shape[1] for row in rows]
    features = torch.full((len(rows), model.mels, max(frames)), 7.0)
    for features_row, row in zip(features, rows, strict=True):
        features_row[:, : row.shape[1]] = row
    return model.encode(features=features, counts=frames)


def check(theirs: Any, found: Tensor | None, sources: list[Tensor], targets: list[Tensor]) -> None:
    assert found is not None and len(found) == len(sources) == len(targets)
    for logits, source, target in zip(found, sources, targets, strict=True):
        assert relative(logits[: len(target)], truth(theirs, source, target)) < TOLERANCE


# -- logits ------------------------------------------------------------------------------------------------------------


@every_case
def test_the_encoder_gives_the_same_states_for_windows_and_for_rows_of_any_length(name: str) -> None:
    theirs, ours = pair(name)
    rows = random_features(theirs, [100, 2, 37, 60])
    source = encode_rows(ours, rows)
    assert source.lengths.tolist() == [50, 1, 19, 30]
    for row, states, length in zip(rows, source.states, source.lengths, strict=True):
        assert relative(states[:length], encoded(theirs, row)) < TOLERANCE
    with torch.no_grad():
        expected = theirs.model.encoder(rows[0][None]).last_hidden_state
    assert relative(ours.encode(features=rows[0][None]).states, expected) < TOLERANCE


@every_case
def test_one_pass_and_random_cuts_give_the_same_logits(name: str) -> None:
    theirs, ours = pair(name)
    sources, targets = random_features(theirs, [100, 100]), random_rows([LENGTH, LENGTH])
    source = ours.encode(features=torch.stack(sources))
    check(theirs, ours(torch.stack(targets), source=source), sources, targets)
    expected = torch.stack([truth(theirs, *row) for row in zip(sources, targets, strict=True)])
    for seed in range(5):
        rng = random.Random(seed)
        cache = ours.new_cache(2, capacity=rng.choice([None, LENGTH]), slack=rng.choice([0, 2]), source=source)
        found = run_in_pieces(ours, torch.stack(targets), cache.poison(), random_cuts(LENGTH, rng))
        assert relative(found, expected) < TOLERANCE, seed


@every_case
@pytest.mark.parametrize("rows", [1, 4])
def test_ragged_rows_with_ragged_sources_equal_themselves_alone(name: str, rows: int) -> None:
    theirs, ours = pair(name)
    rng = random.Random(rows)
    sources = random_features(theirs, [rng.randint(1, 100) for _ in range(rows)])
    targets = random_rows([1, *(rng.randint(1, LENGTH) for _ in range(rows - 1))])
    cache = ours.new_cache(rows, source=encode_rows(ours, sources))
    for source, target, logits in zip(sources, targets, run_ragged(ours, targets, cache, rng), strict=True):
        assert relative(logits, truth(theirs, source, target)) < TOLERANCE


@every_case
def test_left_padded_prompts_with_their_mask_equal_each_row_alone(name: str) -> None:
    theirs, ours = pair(name)
    sources, ids = random_features(theirs, [100, 20, 51]), random_ids(3, 21, VOCAB)
    mask = torch.ones_like(ids)
    for row, padding in enumerate([0, 4, 20]):
        mask[row, :padding] = 0
    prompt = from_padded(ids, mask)
    found = ours(prompt.ids, counts=prompt.counts, cache=ours.new_cache(3, source=encode_rows(ours, sources)))
    check(theirs, found, sources, [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)])


@every_case
def test_greedy_generation_over_a_source_in_the_cache_gives_the_same_tokens(name: str) -> None:
    theirs, ours = pair(name)
    features, prompts = torch.stack(random_features(theirs, [100, 100])), [[91, 5], [91]]
    cache = ours.new_cache(2, source=ours.encode(features=features))
    result = ours.generate(
        cache=cache, decoder_input_ids=prompts, max_new_tokens=9, eos_token_id=[], suppress_tokens=[],
        begin_suppress_tokens=[],
    )  # fmt: skip
    for row, (prompt, tokens) in enumerate(zip(prompts, result.tokens, strict=True)):
        ids = torch.tensor(prompt)
        for token in tokens:
            assert token == int(truth(theirs, features[row], ids)[-1].argmax())
            ids = torch.cat([ids, torch.tensor([token])])


def test_a_row_ends_at_the_last_learned_position() -> None:
    _, ours = pair(FIRST)
    cache = ours.new_cache(1, source=ours.encode(features=torch.randn(1, 80, 100)))
    result = ours.generate(cache=cache, decoder_input_ids=[[91]], max_new_tokens=200, eos_token_id=[])
    assert result.reasons == ["context"] and len(result.tokens[0]) == 63


def test_verify_finds_nothing_wrong() -> None:
    report = lamina.verify(pair(FIRST)[1], length=12, tries=1)
    assert report.ok, str(report)


def test_quantized_caches_find_the_mean_keys_of_random_audio() -> None:
    theirs, ours = pair(FIRST)
    sources, targets = random_features(theirs, [100, 30]), random_rows([12, 12])
    found = ours(torch.stack(targets), cache=ours.new_cache(2, source=encode_rows(ours, sources), codec="int8"))
    assert found is not None
    for logits, source, target in zip(found, sources, targets, strict=True):
        assert relative(logits, truth(theirs, source, target)) < 5e-2


# -- from a waveform ---------------------------------------------------------------------------------------------------


def waves(seconds: list[float], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(int(16000 * s), generator=generator) * torch.linspace(0, 1, int(16000 * s)) for s in seconds]


def in_transformers(theirs: Any, wave: Tensor, long: bool = False, **options: Any) -> Any:
    extract = extractor(theirs)
    how: dict[str, Any] = dict(truncation=False, padding="longest", return_attention_mask=True) if long else {}
    given = extract(wave.numpy(), sampling_rate=16000, return_tensors="pt", **how)
    return theirs.generate(**given, **options)


def segments_of(made: Any) -> list[list[int]]:
    return [segment["tokens"].tolist() for segment in made["segments"][0]]


LANGUAGE: list[tuple[str, dict[str, Any]]] = [
    (FIRST, {}),
    (MANY, dict(language="de", task="translate")),
    (MANY, dict(language="english")),
    (MANY, dict(task="transcribe")),
    ("128 mels, own head, deep encoder", {}),
]


@pytest.mark.parametrize(("name", "options"), LANGUAGE)
def test_a_window_without_timestamps_has_the_tokens_of_transformers(name: str, options: dict[str, Any]) -> None:
    theirs, ours = pair(name)
    (wave,) = waves([0.7])
    made = in_transformers(theirs, wave, max_new_tokens=20, force_unique_generate_call=True, **options)[0].tolist()
    found = ours.transcribe(wave, rate=16000, max_new_tokens=20, **options)
    assert isinstance(found, Transcription)
    begin = made.index(100) + 1  # after <|notimestamps|>
    assert [*found.tokens, 90][: len(made) - begin] == made[begin:]
    assert [(one.start, one.end) for one in found.segments] == [(0.0, 0.7)] and found.duration == 0.7
    if "language" not in options and name == MANY:
        token = theirs.generation_config.lang_to_id[f"<|{found.language}|>"]
        assert made[1] == token
    else:
        assert found.language == {"de": "de", "english": "en", None: None}[options.get("language")]


@pytest.mark.parametrize(("name", "options"), LANGUAGE)
def test_a_window_with_timestamps_has_the_segments_of_transformers(name: str, options: dict[str, Any]) -> None:
    theirs, ours = pair(name)
    (wave,) = waves([1.0], seed=1)
    made = in_transformers(theirs, wave, max_new_tokens=20, return_timestamps=True, return_segments=True, **options)
    found = ours.transcribe(wave, rate=16000, max_new_tokens=20, timestamps=True, **options)
    assert isinstance(found, Transcription)
    assert [one.tokens for one in found.segments] == segments_of(made)
    for one, other in zip(found.segments, made["segments"][0], strict=True):
        assert (one.start, one.end) == pytest.approx((float(other["start"]), float(other["end"])), abs=0.021)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (MANY, {}),
        (FIRST, dict(condition_on_prev_tokens=True)),
        (FIRST, dict(prompt=[5, 6, 7])),
        (MANY, dict(prompt=[5, 6, 7], condition_on_prev_tokens=True)),
        (FIRST, dict(logprob_threshold=-1.0, no_speech_threshold=0.005)),
        (MANY, dict(logprob_threshold=-1.0, no_speech_threshold=0.005)),
    ],
    ids=["plain", "conditioned", "prompt", "both", "no speech, english", "no speech"],
)
def test_long_audio_goes_on_where_the_timestamps_of_a_window_say(name: str, options: dict[str, Any]) -> None:
    theirs, ours = pair(name)
    (wave,) = waves([3.7], seed=2)
    named: dict[str, Any] = dict(language="fr", task="transcribe") if name == MANY else {}
    same = dict(options)
    if "prompt" in same:
        same["prompt_ids"] = torch.tensor([98, *same.pop("prompt")])
    if "logprob_threshold" in same:
        same["temperature"] = (0.0,)  # without one, transformers compares None with a number
    made = in_transformers(
        theirs, wave, long=True, max_new_tokens=15, return_timestamps=True, return_segments=True, **named, **same
    )
    found = ours.transcribe(wave, rate=16000, max_new_tokens=15, **named, **options)
    assert isinstance(found, Transcription)
    assert [one.tokens for one in found.segments] == segments_of(made)


def test_each_recording_of_a_batch_is_transcribed_as_it_would_be_alone() -> None:
    _, ours = pair(MANY)
    recordings = waves([2.2, 0.4, 1.3, 0.01])
    alone = [ours.transcribe(one, rate=16000, max_new_tokens=8) for one in recordings]
    assert ours.transcribe(recordings, rate=16000, max_new_tokens=8, rows=3) == alone
    mixed = ours.transcribe(
        [one.numpy() for one in recordings], rate=[16000] * 4, max_new_tokens=8, timestamps="segment"
    )
    assert isinstance(mixed, list) and mixed[0] == alone[0] and mixed[1] != alone[1]
    languages = ours.transcribe(recordings[:2], rate=16000, max_new_tokens=5, language=["French", "<|de|>"])
    assert isinstance(languages, list) and [one.language for one in languages] == ["fr", "de"]


def test_a_window_that_repeats_itself_or_is_unlikely_is_sampled_at_the_next_temperature() -> None:
    _, ours = pair(FIRST)
    (wave,) = waves([0.9])
    settings: dict[str, Any] = dict(rate=16000, max_new_tokens=12, seed=1)
    plain = ours.transcribe(wave, temperature=(0.0, 0.7), **settings)
    assert isinstance(plain, Transcription) and plain.segments[0].temperature == 0
    for threshold in (dict(logprob_threshold=0.0), dict(compression_ratio_threshold=0.1)):
        found = ours.transcribe(wave, temperature=(0.0, 0.7), **threshold, **settings)
        assert isinstance(found, Transcription) and found.segments[0].temperature == 0.7
        assert found.tokens != plain.tokens
    scored = ours.transcribe(wave, logprob_threshold=-99.0, num_beams=2, **settings)
    assert isinstance(scored, Transcription) and scored.segments[0].logprob is not None


def test_older_checkpoints_say_language_and_task_as_forced_ids() -> None:
    _, ours = pair(MANY)
    (wave,) = waves([0.5])
    before = ours.generation_defaults
    try:
        ours.generation_defaults = {**before, "forced_decoder_ids": [[1, 94], [2, 95]]}
        forced = ours.transcribe(wave, rate=16000, max_new_tokens=8)
    finally:
        ours.generation_defaults = before
    assert forced == ours.transcribe(wave, rate=16000, max_new_tokens=8, language="fr", task="translate")


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (FIRST, dict(language="de"), "language='de': this model knows one language only"),
        (FIRST, dict(task="translate"), "task='translate': this model knows one task only"),
        (MANY, dict(task="sing"), "task='sing': it must be one of 'transcribe', 'translate'"),
        (MANY, dict(language="klingon"), "language='klingon' is not known to this model; known: de, en, fr"),
        (MANY, dict(language="es"), "language='es' is not known to this model"),
        (MANY, dict(language=["de", "en"]), "2 languages were given for 1 recordings"),
        (MANY, dict(language=3), "language=3: it must be a name or a code"),
        (FIRST, dict(timestamps="word"), "timestamps='word': it must be False, True or \"segment\""),
        (FIRST, dict(no_speech_threshold=0.6), "give logprob_threshold too"),
        (FIRST, dict(temperature=-1), "temperature=-1: it must be a number, at least 0"),
        (FIRST, dict(temperature=()), "temperature is empty"),
        (FIRST, dict(prompt="names"), "no tokenizer: give the prompt as ids"),
        (FIRST, dict(rows=0), "rows=0"),
        (FIRST, dict(do_sample=True), "do_sample is not a parameter of transcribe: give temperature"),
        (FIRST, dict(cache=None), "cache is not a parameter of transcribe: call model.encode and model.generate"),
        (FIRST, dict(use_cache=False), "use_cache is not a parameter of transcribe: windows are always"),
        (FIRST, dict(beams=4), "there is no parameter 'beams'; the nearest known one is 'num_beams'"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        pair(name)[1].transcribe(torch.zeros(1600), rate=16000, **options)


def test_wrong_sources_are_refused() -> None:
    _, ours = pair(FIRST)
    for given in (lambda: ours.encode([[1, 2]]), lambda: ours.generate("hello"), lambda: ours.generate([[1, 2]])):
        with pytest.raises(InputError, match=r"audio, not ids|no tokenizer"):
            given()
    with pytest.raises(InputError, match=r"features must be \[B, 80, frames\], not \[1, 128, 100\]"):
        ours.encode(features=torch.zeros(1, 128, 100))
    with pytest.raises(InputError, match="the source has 51 positions, and the encoder has 50"):
        ours.encode(features=torch.zeros(1, 80, 102))
    for audio, said in (([], "there are no recordings"), ([0.1, 0.2], "a list is several recordings")):
        with pytest.raises(InputError, match=said):
            ours.transcribe(audio, rate=16000)


def test_options_that_are_not_implemented_are_named() -> None:
    config = pair(FIRST)[0].config.to_dict()
    with pytest.raises(InputError, match="scale_embedding=True in the configuration is not supported"):
        Whisper.build(lamina.config.Config(config | {"scale_embedding": True}))
    with pytest.raises(InputError, match="encoder_attention_heads=5 in the configuration does not divide d_model=32"):
        Whisper.build(lamina.config.Config(config | {"encoder_attention_heads": 5}))
    with pytest.raises(InputError, match="activation_function='mish' in the configuration is not supported"):
        Whisper.build(lamina.config.Config(config | {"activation_function": "mish"}))


def test_another_spectrogram_than_the_one_that_is_computed_is_refused() -> None:
    _, ours = pair(FIRST)
    before = ours.preprocessor_config
    assert before["feature_size"] == 80 and before["hop_length"] == 160
    try:
        for name, value in (("hop_length", 80), ("dither", 1e-4), ("feature_size", 128)):
            ours.preprocessor_config = {**before, name: value}
            with pytest.raises(InputError, match=f"{name}={value} in preprocessor_config.json is not supported"):
                ours.transcribe(torch.zeros(1600), rate=16000)
    finally:
        ours.preprocessor_config = before


def test_the_languages_are_those_of_transformers() -> None:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES as theirs
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    from lamina.audio.languages import CODES, LANGUAGES

    assert theirs == LANGUAGES
    assert TO_LANGUAGE_CODE == CODES
