"""How near decoding comes to the limit of memory: what must move, what was measured, and peers beside it.

random_model.py  a model of a known shape (checkpoint/shapes.py) with random weights, on its device
flops.py         what a prefill has to compute
measure.py       bandwidths, matrix rate, timing, memory
decode.py        the decode steps that are timed
subjects.py      what is measured: Lamina, and its peers from peers.py
first_token.py   from the start of a process to its first token
runner.py        a whole run, in a bounded time
cpu_table.py     decoding on a CPU beside transformers and llama.cpp; native_read.py: the bandwidth there
llama_cpp.py     llama.cpp in a process of another environment; llama_cpp_child.py: what runs there
cpu_report.py    the CPU table as Markdown and JSON
report.py        table, JSON, Markdown; plot.py: the picture

The bytes that a decode step has to move, and caches of any length without a prefill, are in lamina/planning.
"""

from lamina.bench.random_model import random_model
from lamina.bench.runner import BenchSettings, run
from lamina.checkpoint.shapes import SHAPES, ModelShape, find_shape
from lamina.planning.bytes import decode_bytes

__all__ = ["SHAPES", "BenchSettings", "ModelShape", "decode_bytes", "find_shape", "random_model", "run"]
