"""How near native products come to the bandwidth of memory: `python -m bench.native_products [--rows 1]`

Prints microseconds, GB/s of weight bytes and the share of the read bandwidth, by format and shape. The weights of one
measurement are copies that together exceed the last cache; each figure is the best of several runs.
"""

from __future__ import annotations

import argparse
import ctypes
import os

import torch

from lamina.bench.cpu.native_read import BYTES, WINDOW, fewest_seconds, native_read_bandwidth
from lamina.native.products import FORMATS, Product, products, quantize

SHAPES = [(3072, 576), (49152, 576), (14336, 4096)]


def measure(
    format: str, shape: tuple[int, int], rows: int, activations: str, memory: torch.Tensor, threads: int
) -> float:
    """Seconds per product, whose weights are read from memory."""
    out, inputs = shape
    library = products()
    size = out * library.lamina_row_bytes(FORMATS[format], inputs)
    copies = memory.numel() // size  # of which one run reads a window
    window = min(copies, max(1, WINDOW // size)) if rows <= 16 else 1
    x, y = torch.randn(rows, inputs), torch.empty(rows, out)
    codes, xs, sums = quantize(x)
    scales = torch.full((out, inputs // 32), 0.01, dtype=torch.float16)
    base = Product(
        format=FORMATS[format], activations=int(activations == "int8"), out=out, in_=inputs, rows=rows,
        group=inputs if format == "fp8" else 32, scales=scales.data_ptr(), scale_type=1,
        x=x.data_ptr(), x_stride=inputs, qx=codes.data_ptr(), qx_scales=xs.data_ptr(),
        qx_sums=sums.data_ptr(), y=y.data_ptr(), y_stride=out,
    )  # fmt: skip
    weights = []
    for i in range(copies):
        base.codes = memory.data_ptr() + i * size
        weights.append(Product.from_buffer_copy(base))
    if wrong := library.lamina_product_check(ctypes.byref(weights[0])):
        raise SystemExit(f"{format} {shape}: {wrong.decode()}")

    def work(repeat: int, i: int) -> None:
        for k in range(window):
            weight = weights[(repeat * window + k) % copies]
            library.lamina_product(ctypes.byref(weight), out * i // threads, out * (i + 1) // threads)

    return fewest_seconds(work, threads, 4 if rows > 16 else 24) / window


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--activations", choices=["int8", "float32"], default="int8", help="of packed formats")
    arguments = parser.parse_args()
    # Bytes that no format reads as a NaN or a subnormal scale.
    memory = torch.randint(0x20, 0x3B, (BYTES,), dtype=torch.uint8)
    read = native_read_bandwidth(memory, arguments.threads) / 1e9
    isa = products().lamina_isa().decode()
    print(f"{isa}, {arguments.threads} threads, {arguments.rows} rows; read {read:.1f} GB/s")
    print("| format | activations | shape | µs | GB/s | share of read | GFLOP/s |\n|---|---|---|---|---|---|---|")
    for format in arguments.formats:
        activations = arguments.activations if FORMATS[format] > 3 else "float32"
        for shape in SHAPES:
            size = shape[0] * products().lamina_row_bytes(FORMATS[format], shape[1])
            if size > BYTES or (format.endswith(("_K", "_XS")) and shape[1] % 256):
                continue
            seconds = measure(format, shape, arguments.rows, activations, memory, arguments.threads)
            moved = size + (shape[0] * shape[1] // 16 if format in ("int8", "int4") else 0)
            rate = 2 * arguments.rows * shape[0] * shape[1] / seconds / 1e9
            speed = moved / seconds / 1e9
            figures = f"{seconds * 1e6:.0f} | {speed:.1f} | {100 * speed / read:.0f} % | {rate:.0f}"
            print(f"| {format} | {activations} | {shape[0]} × {shape[1]} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
