"""Writes the table of model families into README.md, from lamina/models: `python -m docs.families`

What the layers of a family remember is read from the specs of a small model of it, built without weights.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import T5Config, WhisperConfig

from docs.tree import first_line
from lamina.attention.window import Chunked, Sliding
from lamina.cache.spec import Attention, Convolution, Cross, Latent, Recurrent, Spec
from lamina.loading import on_meta
from lamina.models import FAMILIES
from tests.families.cases import FIRST, cases

README = Path(__file__).resolve().parent.parent / "README.md"
PLACE = re.compile(r"(<!-- families: python -m docs.families -->\n).*?(<!-- end -->)", re.S)


def remembers(spec: Spec) -> str:
    """One thing that a layer remembers, in words."""
    match spec:
        case Attention(window=Sliding()):
            return "a sliding window of keys and values"
        case Attention(window=Chunked()):
            return "the current chunk of keys and values"
        case Attention():
            return "all keys and values"
        case Latent():
            return "one latent per token (MLA)"
        case Convolution():
            return "the last inputs of a convolution"
        case Recurrent(rule=rule):
            return f"a recurrent state ({type(rule).__name__})"
        case Cross():
            return "the encoder's keys and values"
    return type(spec).__name__


def table() -> str:
    """One line for each family."""
    configs = {family: cases(family)[name]().to_dict() for family, name in FIRST}
    configs["t5"] = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=67).to_dict()
    configs["whisper"] = WhisperConfig(encoder_layers=1, decoder_layers=1).to_dict()
    types: dict[str, list[str]] = {}
    for model_type, place in FAMILIES.items():
        types.setdefault(place.split(":")[0], []).append(model_type)
    lines = ["| family | `model_type` | its layers remember |", "|---|---|---|"]
    for module, names in types.items():
        model = on_meta(configs[module], torch.float32)
        kept = dict.fromkeys(remembers(spec) for entry in model.specs for spec in entry.values())
        path = Path("lamina") / "models" / f"{module}.py"
        title = re.split(r"[:,]", first_line(path))[0]
        shown = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| [{title}]({path}) | {shown} | {'; '.join(kept)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The README with the table as it should be."""
    return PLACE.sub(lambda found: found[1] + table() + found[2], README.read_text())


if __name__ == "__main__":
    README.write_text(page())
