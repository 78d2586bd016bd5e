"""Exports small models of families, and writes the table of docs/export.md: `python -m docs.export_table [FAMILY …]`

Without a name the table is written anew from docs/export_families.json; with names (or `all`) those families are run
first. A run exports a random model with two rows and compares greedy tokens of the program with those of eager passes:
prompts of different lengths, and three times as many tokens as the largest ring has slots. `--target onnx` or
`--target aotinductor` runs another target than pt2.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import torch

import lamina
from docs.tiny_models import build
from lamina import Program
from lamina.exporting.export import TARGETS
from tests.families.cases import CASES
from tests.families.encoder_decoder_cases import FAMILIES as ENCODER_DECODERS
from tests.families.harness import loaded

DOCS = Path(__file__).resolve().parent
PAGE, FOUND = DOCS / "export.md", DOCS / "export_families.json"
PLACE = re.compile(r"(<!-- families: python -m docs.export_table -->\n).*?(<!-- end -->)", re.S)
PROMPTS, CAPACITY = [[5, 9, 7, 3, 8, 6, 4, 11, 12, 13, 14], [10, 3, 17]], 96
SAME = "same tokens"


def run(family: str, target: str) -> str:
    """SAME, or why the family is not exported, or where its tokens differ."""
    torch.manual_seed(0)
    config = next(iter((CASES | ENCODER_DECODERS)[family].values()))
    try:
        model = loaded(build(config()))
        capacity = min(CAPACITY, model.max_positions or CAPACITY)
        with tempfile.TemporaryDirectory() as folder:
            made = lamina.export(model, 2, capacity, target=target, to=Path(folder) / "model", chunk=8)
            if made.manifest.source is not None and made.manifest.source["kind"] == "features":
                return "exported; tokens were not compared, since its source is audio"
            ring = max((slots for slots, _ in made.manifest.rings), default=8)
            count = min(3 * ring, capacity - max(map(len, PROMPTS)))
            found = Program.load(Path(folder) / "model").generate(PROMPTS, count).tokens
        expected = model.generate(PROMPTS, max_new_tokens=count).tokens
    except Exception as error:
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:100]}"
    return SAME if found == expected else "other tokens"


def table(found: dict[str, dict[str, str]]) -> str:
    """One line for each family that was run."""
    lines = ["| family | " + " | ".join(TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    for family, by in sorted(found.items()):
        cells = [by.get(target, "not run").replace("|", "/") for target in TARGETS]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(found: dict[str, dict[str, str]]) -> str:
    """docs/export.md with this table."""
    return PLACE.sub(lambda match: match[1] + table(found) + match[2], PAGE.read_text())


def main() -> None:
    words, target = sys.argv[1:], "pt2"
    if "--target" in words:
        at = words.index("--target")
        target = words[at + 1]
        del words[at : at + 2]
    found: dict[str, dict[str, str]] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for family in [*CASES, *ENCODER_DECODERS] if words == ["all"] else words:
        result = run(family, target)
        found = json.loads(FOUND.read_text()) if FOUND.exists() else {}  # another run may have added to it
        found.setdefault(family, {})[target] = result
        print(f"{family}: {result}", flush=True)
        FOUND.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        torch.compiler.reset()
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
