"""What kernels do not serve is told before the first token, by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.window import Full, Sliding
from lamina.cache.codec.formats import Field, FieldFormat, Fields, Float8, Grouped
from lamina.cache.spec import Attention, Latent
from lamina.errors import InputError
from lamina.kernels import eligibility as eligible
from lamina.kernels.attention import decode as attend
from lamina.kernels.attention import decode_fused as token
from lamina.kernels.attention import quantized as coded
from lamina.kernels.eligibility import head_bytes, why_no_attention, why_no_device, why_no_format
from lamina.kernels.limits import CARDS
from lamina.kernels.quant.encode import Side

BF16, F32 = torch.bfloat16, torch.float32


class Ternary(FieldFormat):
    """A format of one's own."""

    def quantize(self, x: Tensor) -> Fields:
        return {}

    def dequantize(self, parts: Fields) -> Tensor:
        return torch.empty(0)

    def error_bound(self, x: Tensor) -> Tensor:
        return x


class Finer(Float8):
    """One that only looks like another."""

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self.name = "finer"


FIELD = Field(64, BF16)


def test_a_format_that_kernels_do_not_know_is_refused_by_its_name() -> None:
    for chosen, name in ((Ternary(FIELD), "Ternary"), (Finer(FIELD), "finer"), (Grouped(FIELD, 3), "3 bits")):
        reason = why_no_format(chosen)
        assert reason is not None and f"no kernel reads the format '{name}'" in reason
        with pytest.raises(InputError, match=f"no kernel reads the format '{name}'"):
            Side.of(chosen, 64)


def test_formats_that_kernels_know_are_what_they_were() -> None:
    assert Side.of(None, 64) == Side("plain", 64)
    assert Side.of(Float8(FIELD), 64) == Side("fp8", 64)
    for bits in (8, 6, 5, 4):
        assert why_no_format(Grouped(FIELD, bits)) is None
        assert Side.of(Grouped(FIELD, bits), 64) == Side(bits, 64)


def test_heads_beyond_what_kernels_take_are_told_with_their_size_and_the_limit() -> None:
    def why(key: int, value: int, dtype: torch.dtype = F32, codec: bool = False) -> str | None:
        formats: dict[str, FieldFormat] = {"k": Float8(Field(key, dtype))} if codec else {}
        return why_no_attention(Attention(2, key, value, Full()), formats, dtype)

    assert why(256, 256) is None and why(512, 512, BF16) is None and why(256, 192, BF16, codec=True) is None
    assert why(320, 256) == (
        "heads of 320 and 256 values; the attention kernels take keys and values of up to 256 in float32"
    )
    assert "up to 512 in bfloat16" in str(why(640, 640, BF16))
    assert "up to 256 when quantized" in str(why(320, 128, BF16, codec=True))


def test_latents_and_formats_of_a_spec_are_asked_too() -> None:
    assert why_no_attention(Latent(512, 64)) is None
    assert "rank 1024" in str(why_no_attention(Latent(1024, 64)))
    assert "3 values" in str(why_no_attention(Latent(512, 3)))
    assert "window Sliding" in str(why_no_attention(Latent(512, 64, Sliding(8))))
    assert "Ternary" in str(why_no_attention(Attention(2, 64, 64), {"v": Ternary(FIELD)}))


def test_what_is_told_before_is_what_kernels_would_raise() -> None:
    assert max(attend.SHAPES) == max(token.SHAPES) == eligible.MOST_BYTES
    assert max(columns for _, columns in coded.SHAPES) == eligible.MOST_CODED
    assert head_bytes(256, 256, 4) == head_bytes(512, 512, 2) == eligible.MOST_BYTES
    with pytest.raises(InputError, match=r"heads of 320 and 320 values; .* up to 256 in float32"):
        attend.plan_for(320, 320, F32, 4, CARDS[90])


@pytest.mark.parametrize(
    ("device", "name"), [("mps", "an Apple GPU"), ("xpu", "an Intel GPU"), ("cpu", "the CPU"), ("meta", "on meta;")]
)
def test_devices_that_are_no_nvidia_gpu_are_named(device: str, name: str) -> None:
    reason = why_no_device(torch.device(device))
    assert reason is not None and name in reason and "need an NVIDIA GPU of sm_80 or later" in reason


def test_an_amd_gpu_is_named_though_pytorch_calls_it_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "an AMD GPU (ROCm 6.4)" in str(why_no_device(torch.device("cuda", 0)))


def test_older_nvidia_gpus_are_named_and_those_from_ampere_on_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {0: ("Tesla T4", 7, 5), 1: ("Quadro RTX 8000", 7, 5), 2: ("NVIDIA A100", 8, 0), 3: ("RTX 5090", 12, 0)}

    def properties(index: int) -> SimpleNamespace:
        name, major, minor = cards[index]
        return SimpleNamespace(name=name, major=major, minor=minor)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    eligible._why_no_gpu.cache_clear()
    try:
        assert str(why_no_device(torch.device("cuda", 0))).startswith("the Tesla T4 is sm_75; the kernels need")
        assert str(why_no_device(torch.device("cuda"))).startswith("the Quadro RTX 8000 is sm_75")
        assert why_no_device(torch.device("cuda", 2)) is None and why_no_device(torch.device("cuda", 3)) is None
    finally:
        eligible._why_no_gpu.cache_clear()


def test_why_not_asks_for_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.why_not(torch.zeros(1)) is None  # interpreted
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert "on cpu (the CPU)" in str(kernels.why_not(torch.zeros(1)))
    assert "on meta" in str(kernels.why_not(torch.zeros(1, device="meta")))
