"""The native products against PyTorch and `gguf`, for every format, path and kind of activations."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from lamina.errors import InputError
from lamina.native.products import dequantize, describe, multiply, products, quantize
from tests.native.weights import all_weights, gguf_weight

CASES = all_weights()
PACKED = [name for name in CASES if not name.startswith(("float", "bfloat", "fp8"))]
ROWS = [1, 2, 7, 19, 39]  # one by one, a few, and many with rows left over
PATHS = [path for path in ("reference", "avx2", "avx512", "neon") if products().lamina_set_isa(path.encode()) == 0]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = products().lamina_isa()
    assert products().lamina_set_isa(request.param.encode()) == 0
    yield request.param
    products().lamina_set_isa(before)


def activations(rows: int, inputs: int) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))


def rounding(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What float32 sums may differ by: a few units of the sum of the terms' magnitudes."""
    return 2e-6 * (x.abs() @ values.abs().T) + 1e-7


@pytest.mark.parametrize("name", CASES)
def test_the_reference_decodes_what_gguf_and_pytorch_decode(name: str) -> None:
    weight, values, _ = CASES[name]
    torch.testing.assert_close(dequantize(weight), values, rtol=1e-6, atol=1e-6 * float(values.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_float32_activations_equal_the_dequantized_product_within_rounding(name: str, path: str) -> None:
    weight, values, _ = CASES[name]
    for rows in ROWS:
        x = activations(rows, values.shape[1])
        y = multiply(weight, x, "float32")
        assert ((y - x @ values.T).abs() <= rounding(values, x)).all(), rows


@pytest.mark.parametrize("name", PACKED)
def test_int8_activations_equal_the_product_with_the_rounded_activations(name: str, path: str) -> None:
    weight, values, _ = CASES[name]
    for rows in ROWS:
        x = activations(rows, values.shape[1])
        codes, scales, _ = quantize(x)
        rounded = codes.float() * scales.repeat_interleave(32, 1)
        y = multiply(weight, x, "int8")
        # codes are summed with an offset of up to 128, so rounding is relative to more than the values' magnitudes
        assert ((y - rounded @ values.T).abs() <= 8 * rounding(values, rounded)).all(), rows
        assert ((y - x @ values.T).abs() <= (x - rounded).abs() @ values.abs().T + 8 * rounding(values, x)).all(), rows


def test_quantize_rounds_to_127_steps_and_sums(path: str) -> None:
    x = activations(3, 96) * torch.tensor([[1e-3], [1.0], [1e4]])
    x[1, 32:64] = 0
    codes, scales, sums = quantize(x)
    groups = x.view(3, 3, 32)
    torch.testing.assert_close(scales, groups.abs().amax(-1) / 127)
    assert ((codes.view(3, 3, 32) * scales[..., None] - groups).abs() <= scales[..., None] * 0.5001).all()
    assert torch.equal(sums, codes.view(3, 6, 16).int().sum(-1).int())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_makes_its_product_nan(bad: float, path: str) -> None:
    weight, values, _ = CASES["Q4_1"]
    x = activations(2, values.shape[1])
    x[1, 40] = bad
    y = multiply(weight, x)
    assert y[0].isfinite().all() and y[1].isnan().all()


def test_threads_compute_disjoint_ranges(path: str) -> None:
    weight, _, keep = gguf_weight("Q4_0", 37, 64)
    x = activations(3, 64)
    assert torch.equal(multiply(weight, x, threads=3), multiply(weight, x)), keep


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 9}, "format"),
        ({"in_": 500}, "in: not a multiple"),
        ({"group": 48}, "group: no multiple of 32"),
        ({"scales": None}, "scales: null"),
        ({"scale_type": 7}, "scale_type"),
        ({"codes": None}, "codes or y: null"),
    ],
)
def test_a_product_that_cannot_be_computed_is_refused(change: dict[str, int | None], text: str) -> None:
    weight = type(CASES["int8"][0]).from_buffer_copy(CASES["int8"][0])
    for name, value in change.items():
        setattr(weight, name, value)
    with pytest.raises(InputError, match=text):
        multiply(weight, activations(1, 512))


def test_int8_activations_of_plain_weights_are_refused() -> None:
    codes = torch.zeros(4, 32)
    with pytest.raises(InputError, match="need float32"):
        multiply(describe("float32", (4, 32), codes), activations(1, 32))


def test_a_path_that_the_machine_does_not_have_is_refused() -> None:
    before = products().lamina_isa()
    assert products().lamina_set_isa(ctypes.c_char_p(b"altivec")) == -1
    assert products().lamina_isa() == before


@pytest.mark.parametrize(
    ("wanted", "text"), [("reference", ""), ("altivec", "LAMINA_ISA=altivec is not among the paths")]
)
def test_the_environment_selects_the_path(wanted: str, text: str) -> None:
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]);"
        "library.lamina_isa.restype = ctypes.c_char_p; print(library.lamina_isa())"
    )
    command = [sys.executable, "-c", code, products()._name]
    run = subprocess.run(command, env={"LAMINA_ISA": wanted}, capture_output=True, text=True, check=True)
    assert text in run.stderr and bool(run.stderr) == bool(text)
    assert (run.stdout.strip() == "b'reference'") == (wanted == "reference" or PATHS == ["reference"])
