"""Which specs, formats and devices the kernels support, decided before the first token.

Every function returns the reason why not, in words, or None if supported. This module does not import Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.cache.codec.formats import FieldFormat
from lamina.cache.spec import Attention, Cross, IndexKeys, Latent, Tokens

MOST_BYTES = 2048  # per token and head: key and value, each padded to a power of two
MOST_CODED = 256  # values of a quantized head
MOST_RANK = 512  # of a latent: a program holds the weighted sums of all its queries in registers
MOST_INDEX = 256  # values of an indexer's key
LAYOUTS = (8, 6, 5, 4, "fp8")  # of codes: see `FieldFormat.kernel_layout`
OLDEST = (8, 0)  # compute capability: has cp.async, and bfloat16 in matrix units
VENDORS = {"xpu": "an Intel GPU", "mps": "an Apple GPU", "hpu": "an Intel Gaudi", "npu": "an NPU", "cpu": "the CPU"}


def why_no_device(device: torch.device) -> str | None:
    """Why kernels cannot run on this device.

    >>> why_no_device(torch.device("mps"))
    'the tensors are on mps (an Apple GPU); the kernels need an NVIDIA GPU of sm_80 or later'
    """
    need = "the kernels need an NVIDIA GPU of sm_80 or later"
    if device.type != "cuda":
        what = f" ({VENDORS[device.type]})" if device.type in VENDORS else ""
        return f"the tensors are on {device.type}{what}; {need}"
    if torch.version.hip is not None:
        return f"the tensors are on an AMD GPU (ROCm {torch.version.hip}); {need}"
    return _why_no_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _why_no_gpu(index: int) -> str | None:
    has = torch.cuda.get_device_properties(index)
    if (has.major, has.minor) >= OLDEST:
        return None
    return f"the {has.name} is sm_{has.major}{has.minor}; the kernels need an NVIDIA GPU of sm_80 or later"


def why_no_format(chosen: FieldFormat | None) -> str | None:
    """Why no kernel reads and writes fields in this format, such as one from outside the package; None: unquantized."""
    if chosen is None or chosen.kernel_layout in LAYOUTS:
        return None
    return f"no kernel reads the format {chosen.name!r}; there are kernels for 8, 6, 5 and 4 bits, fp8 and plain"


def why_no_attention(
    spec: Attention | Latent | Cross,
    formats: Mapping[str, FieldFormat] | None = None,
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """Why no kernel of a captured step attends over entries of this spec, with fields in these formats.

    formats   of the fields that a codec quantizes, as in `Coding.formats`
    dtype     of the model; if not known float32, whose heads need the most room

    >>> why_no_attention(Attention(kv_heads=2, key_dim=128, value_dim=128)) is None
    True
    >>> why_no_attention(Attention(kv_heads=2, key_dim=320, value_dim=320))
    'heads of 320 and 320 values; the attention kernels take keys and values of up to 256 in float32'
    """
    formats = formats or {}
    if reason := _why_no_formats(formats):
        return reason
    if not isinstance(spec, Cross) and (reason := _why_no_window(spec.window)):
        return reason
    if isinstance(spec, Latent):
        return _why_no_latent(spec)
    return why_no_heads(spec.key_dim, spec.value_dim, dtype, coded=bool(formats))


def _why_no_formats(formats: Mapping[str, FieldFormat] | None) -> str | None:
    return next((reason for one in (formats or {}).values() if (reason := why_no_format(one))), None)


def _why_no_window(window: Window) -> str | None:
    if isinstance(window, Full | Sliding | Chunked):
        return None
    return f"no kernel for the window {window}; there are kernels for Full, Sliding and Chunked"


def why_no_vectors(spec: Tokens, formats: Mapping[str, FieldFormat] | None = None) -> str | None:
    """Why no kernel of a captured step reads back token vectors of this spec, with fields in these formats."""
    return _why_no_formats(formats) or _why_no_window(spec.window)


def why_no_index(spec: IndexKeys, formats: Mapping[str, FieldFormat] | None = None) -> str | None:
    """Why no kernel of a captured step selects tokens by keys of this spec, with fields in these formats."""
    reason = _why_no_formats(formats)
    if reason is None and spec.dim > MOST_INDEX:
        return f"indexer keys of {spec.dim} values; the kernels that select tokens take up to {MOST_INDEX}"
    return reason


def why_no_heads(key_dim: int, value_dim: int, dtype: torch.dtype, *, coded: bool = False) -> str | None:
    """Why no attention kernel takes heads of these sizes."""
    most = MOST_CODED if coded else MOST_BYTES // (2 * dtype.itemsize)
    if max(key_dim, value_dim) <= most or (not coded and head_bytes(key_dim, value_dim, dtype.itemsize) <= MOST_BYTES):
        return None
    how = "when quantized" if coded else f"in {str(dtype).removeprefix('torch.')}"
    takes = f"the attention kernels take keys and values of up to {most} {how}"
    return f"heads of {key_dim} and {value_dim} values; {takes}"


def head_bytes(key_dim: int, value_dim: int, itemsize: int) -> int:
    """Bytes of one token's key and value in one head, each padded to a power of two.

    >>> head_bytes(96, 128, 2)
    512
    """
    return (_padded(key_dim) + _padded(value_dim)) * itemsize


def _padded(dim: int) -> int:
    return 1 << (dim - 1).bit_length()


def _why_no_latent(spec: Latent) -> str | None:
    if spec.rank > MOST_RANK:
        return f"a latent of rank {spec.rank}; the kernels of latent attention take ranks of up to {MOST_RANK}"
    if spec.rope_dim < 2 or spec.rope_dim % 2:
        return f"a rotary key of {spec.rope_dim} values; the kernels of latent attention take an even number from 2 on"
    if not isinstance(spec.window, Full):
        return f"latents with the window {spec.window}; the kernels of latent attention take Full"
    return None
