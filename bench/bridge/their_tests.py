"""transformers' own cache tests over our cache: `python -m bench.bridge.their_tests CHECKOUT [MODEL …]`

Runs `tests/utils/test_cache_utils.py` and the cache tests of the generation mixin, for the models below, from a
checkout of transformers of the installed version: once as they are, and once with our class in place of DynamicCache
and StaticCache (substitute.py). A test that fails only over our cache must be among `EXCEPTIONS`, and each of
those must fail; otherwise the command fails. The tests need parameterized and timeout-decorator; those that need the
network are left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import transformers

MODELS = (
    "llama", "mistral", "gemma2", "gemma3", "mixtral", "gpt_oss", "qwen3_next", "lfm2", "falcon_h1", "jamba", "zamba2",
    "bamba", "mamba", "mamba2", "deepseek_v3", "bart", "t5", "whisper", "llava",
)  # fmt: skip
WORDS = (
    "test_cache_utils", "cache", "past_key_values", "continue", "assisted", "prompt_lookup", "beam", "greedy_generate",
    "sample_generate", "inputs_embeds", "left_padding", "recurrent_layers", "logits_to_keep",
)  # fmt: skip
STORED_ALONE = "expects the whole capacity, empty slots included; our `update` returns the tokens that are stored"
EXCEPTIONS = {
    "test_static_cache_mha_mqa_gqa": STORED_ALONE,
    "test_hybrid_cache": STORED_ALONE,
    "test_hybrid_chunked_cache": STORED_ALONE,
    "test_hybrid_chunked_cache_extra_cases": STORED_ALONE,
    "test_static_cache_no_recompile_with_smaller_length": (
        "compiles `generate`; our lengths are integers of the host, so `is_compileable` is False"
    ),
    "test_export_preserves_sliding_cache_behavior": (
        "gives torch.export a DynamicCache as an argument; a whole model is exported with `lamina.export`"
    ),
}
"""Name of a test -> why it cannot hold for our cache."""


def outcomes(checkout: Path, models: list[str], ours: bool) -> dict[str, tuple[str, str]]:
    """Test -> how it ended ("passed", "failure", "error" or "skipped"), and the first line of what it said."""
    files = ["tests/utils/test_cache_utils.py", *(f"tests/models/{one}/test_modeling_{one}.py" for one in models)]
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command += ["-p", "bench.bridge.substitute"] * ours
        command += [f"--junitxml={report}", "-k", f"({' or '.join(WORDS)}) and not Integration", *files]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if not report.exists():
            sys.exit(f"pytest made no report in {checkout}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return {
            f"{case.get('classname')}::{case.get('name')}": _outcome(case)
            for case in ElementTree.parse(report).getroot().iter("testcase")
        }


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            return child.tag, (child.get("message") or "").split("\n")[0]
    return "passed", ""


def table() -> str:
    """The exceptions, as in docs/coming-from-transformers.md."""
    return "\n".join(["| test | why |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in EXCEPTIONS.items())])


def name_of(test: str) -> str:
    return test.split("::")[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("models", nargs="*", help="; ".join(MODELS))
    arguments = parser.parse_args()
    models = arguments.models or list(MODELS)
    theirs, ours = (outcomes(arguments.checkout, models, own) for own in (False, True))
    bad = ("failure", "error")
    differ = {
        test: said for test, (how, said) in ours.items() if how in bad and theirs.get(test, ("", ""))[0] not in bad
    }
    lost = [
        test
        for test, (how, _) in theirs.items()
        if how == "passed" and ours.get(test, ("gone",))[0] in ("skipped", "gone")
    ]
    broken = [test for test, (how, _) in theirs.items() if how in bad]
    unexpected = {test: said for test, said in differ.items() if name_of(test) not in EXCEPTIONS}
    passing = [test for test, (how, _) in ours.items() if how == "passed" and name_of(test) in EXCEPTIONS]

    print(f"transformers {transformers.__version__}, {len(models)} models and test_cache_utils.py\n")
    for whose, found in (("over its own caches", theirs), ("over lamina.bridge.Cache", ours)):
        counts = Counter(how for how, _ in found.values())
        print(f"{whose}: {', '.join(f'{count} {how}' for how, count in counts.most_common())}")
    print(f"\nExceptions, {len(differ) - len(unexpected)} tests:\n{table()}\n")
    for test in broken:
        print(f"fails over its own cache too: {test}: {theirs[test][1]}")
    for test, said in unexpected.items():
        print(f"FAILED: {test}: {said}")
    for test in passing:
        print(f"PASSED, take it off the list: {test}")
    for test in lost:
        print(f"NOT RUN over our cache: {test}")
    if unexpected or passing or lost:
        sys.exit(1)


if __name__ == "__main__":
    main()
