"""A process that ends while streams are open: it exits with its own code and prints nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import logging, os, sys, threading, time
import lamina.kernels.workspace  # once here, or by every child at its first step
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
from lamina import Chat
from lamina.checkpoint import Tokenizer
from lamina.config import Config
from lamina.models.llama import Llama

logging.disable()  # of the notice that there is no GPU
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Backend(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
model = Llama.build(Config({
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, "model_type": "llama",
}))
for parameter in model.parameters():
    parameter.normal_(std=0.3)
model.tokenizer = Tokenizer(backend, templates={"default": "{{ messages[-1].content }}"})
MANY = {"max_new_tokens": 900}

def one_event():
    global kept
    kept = model.stream("the thing", **MANY)
    next(kept)

def left_by_exit():
    for n, _ in enumerate(model.stream("the thing", **MANY)):
        if n == 3:
            sys.exit(7)

def full_buffer():
    global kept
    kept = model.stream("the thing", **MANY)
    next(kept)
    while len(kept._channel.events) < 64:
        time.sleep(0.001)

def dropped():
    stream = model.stream("the thing", **MANY)
    next(stream)

def chat():
    global kept
    kept = Chat(model, **MANY).stream("the thing")
    next(kept)

def two_in_a_thread():
    def read():
        streams = [model.stream(text, **MANY) for text in ("the thing", "they think")]
        kept.extend(streams)
        for stream in streams:
            next(stream)
    global kept
    kept = []
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()

def failing():
    global kept
    kept = model.stream("the thing", **MANY)
    next(kept)
    raise SystemExit(3)

for way in (one_event, left_by_exit, full_buffer, dropped, chat, two_in_a_thread, failing):
    child = os.fork()
    if child == 0:
        way()
        sys.exit(0)
    print(way.__name__, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_process_ends_cleanly_while_streams_are_open() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    ended = dict(line.split() for line in done.stdout.splitlines())
    assert ended == {
        "one_event": "0", "left_by_exit": "7", "full_buffer": "0", "dropped": "0", "chat": "0",
        "two_in_a_thread": "0", "failing": "3",
    }  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
