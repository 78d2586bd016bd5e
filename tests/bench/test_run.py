from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config

from lamina.bench import BenchSettings, ModelShape, run
from lamina.bench.first_token import first_token
from lamina.bench.measure import DeviceRates
from lamina.bench.prefill import Prompts
from lamina.bench.report import BenchReport
from lamina.cli.bench import bench, numbers
from lamina.errors import InputError
from tests.bench.small import small

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.bench.runner.limits", lambda device, dtype: DeviceRates(1e10, "sum", 1e10, 1e10, 1e11))
    monkeypatch.setattr("lamina.bench.runner.RUN_SECONDS", 0.0)
    monkeypatch.setattr("lamina.bench.runner.RUNS", 2)


def settings(name: str = "qwen3-next", **changes: Any) -> BenchSettings:
    values = dict(
        shape=ModelShape("tiny", small(name), "a note"), device=CPU, dtype=torch.float32, rows=(1, 3), contexts=(8, 20),
        prefill=(Prompts.of("16"),), first_token=False,
    )  # fmt: skip
    return BenchSettings(**values | changes)  # type: ignore[arg-type]


def test_a_run_measures_every_size_of_every_subject_and_reports_it(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    s = settings(against="transformers")
    results = run(s, lambda *now: told.append(now))
    sizes = [(one.subject, one.rows, one.context) for one in results.decoded]
    assert sizes == [
        (subject, rows, context) for rows in (1, 3) for context in (8, 20) for subject in ("lamina", "transformers")
    ]
    assert results.skipped == []
    assert all(0 < one.fastest <= one.seconds <= one.slowest for one in results.decoded)
    assert {one.subject for one in results.prefilled} == {"lamina", "transformers"}
    assert told[-1][1:] == (10, 11)

    report = BenchReport(s, results, date(2026, 1, 2))
    files = report.write(tmp_path)
    assert files[0].name.startswith("2026-01-02-") and files[0].name.endswith("-tiny.json")
    data = json.loads(files[0].read_text())
    assert data["decode"][0]["share"] == pytest.approx(results.share(results.decoded[0]))
    assert data["decode"][0]["share_by_torch"] >= data["decode"][0]["share"]  # of a bandwidth that is not higher
    assert data["versions"]["torch"] == torch.__version__
    text = files[1].read_text()
    assert data["command"] in text and "| rows | context | subject |" in text and "a note" in text
    report.show()


def test_codecs_are_decoded_beside_the_plain_cache_and_their_bytes_are_fewer() -> None:
    s = settings("llama-3.1-8b", codecs=("int8", "int4"), rows=(2,), contexts=(20,), prefill=())
    plain, eight, four = run(s).decoded
    assert [one.subject for one in (plain, eight, four)] == ["lamina", "lamina, int8", "lamina, int4"]
    assert plain.moved.tokens > eight.moved.tokens > four.moved.tokens
    assert "--codec int8,int4" in BenchReport(s, run(s)).command
    with pytest.raises(InputError, match="there is no codec 'int9'"):
        settings(codecs=("int9",))


def test_pages_are_decoded_beside_memory_of_its_own() -> None:
    s = settings("llama-3.1-8b", page=16, rows=(2,), contexts=(20,), prefill=())
    plain, paged = run(s).decoded
    assert (plain.subject, paged.subject) == ("lamina", "lamina, pages of 16") and plain.moved == paged.moved
    assert "--page 16" in BenchReport(s, run(s)).command
    with pytest.raises(InputError, match="page=0"):
        settings(page=0)


def test_a_plot_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    s = settings("llama-3.1-8b", contexts=(8, 16), rows=(1,), prefill=())
    files = BenchReport(s, run(s)).write(tmp_path)
    assert files[-1].suffix == ".png" and files[-1].stat().st_size > 1000


def test_experts_count_as_they_were_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    one = settings(rows=(1,), contexts=(8,), prefill=())
    three = run(one).decoded[0].moved.weights
    monkeypatch.setattr("lamina.bench.subjects.Lamina.experts_visited", lambda self: 8.0)
    every = run(one).decoded[0].moved.weights
    assert every - three == pytest.approx(4 * 5 * 3 * 32 * 16 * 4)  # layers × experts more × numbers of one


def test_what_has_no_time_or_no_room_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    late = run(settings("llama-3.1-8b", seconds=0.0, rows=(1,), contexts=(8,)))
    assert late.decoded == late.prefilled == []
    assert late.skipped == [
        "lamina, prefill of 16: the 0 seconds were over",
        "lamina, 1 row at context 8: the 0 seconds were over",
    ]
    monkeypatch.setattr("lamina.bench.runner.free_memory", lambda device: 2**30 + 20_000)
    tight = run(settings("llama-3.1-8b", contexts=(8, 500), rows=(1,), prefill=()))
    assert [one.context for one in tight.decoded] == [8]
    assert tight.skipped[0].startswith("lamina, 1 row at context 500: it needs")


def test_what_a_peer_cannot_do_is_skipped_and_what_lamina_cannot_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such cache\nat all")

    monkeypatch.setattr("lamina.bench.peers.Dynamic.open", fail)
    only_ours = run(settings(against="transformers", rows=(1,), contexts=(8,), prefill=()))
    assert only_ours.skipped == ["transformers, 1 row at context 8: ValueError: no such cache"]
    monkeypatch.setattr("lamina.bench.subjects.Lamina.open", fail)
    with pytest.raises(ValueError, match="no such cache"):
        run(settings(rows=(1,), contexts=(8,), prefill=()))


def test_settings_that_cannot_be_are_told() -> None:
    with pytest.raises(InputError, match="against='vllm' is not known"):
        settings(against="vllm")
    with pytest.raises(InputError, match="compiled is a way to run the peer"):
        settings(compiled=True)
    with pytest.raises(InputError, match="must be 1 or more"):
        settings(rows=(0,))
    with pytest.raises(InputError, match="rows 'many' must be whole numbers"):
        numbers("many", "rows")


def test_the_command_prints_tables_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(small("falcon-h1-7b")))
    shape = str(tmp_path / "mine.json")
    bench(shape=shape, rows="1", context="8", prefill="8", device="cpu", first_token=False, out=tmp_path)
    out = capsys.readouterr().out
    assert "Decode" in out and "share" in out and "wrote" in out
    assert len(list(tmp_path.glob("*-mine.md"))) == 1


def test_the_first_token_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(small("llama-3.1-8b")))
    seen = first_token(str(tmp_path / "mine.json"), "float32", "cpu", "lamina", timeout=120)
    assert 0 < seen.ready < seen.first < seen.tenth
    assert seen.subject == "lamina"


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"nothing is neither a folder with config.json"):
        first_token("nothing", "float32", "cpu", "lamina", timeout=120)


def test_a_decoder_with_an_encoder_is_run_over_random_keys_and_values_of_its_source() -> None:
    config = T5Config(d_model=16, d_kv=4, num_heads=4, d_ff=24, num_layers=2, vocab_size=67).to_dict()
    s = settings(shape=ModelShape("tiny", config, source=30), rows=(2,), contexts=(8,), against="transformers")
    results = run(s)
    one = next(one for one in results.decoded if one.subject == "lamina")
    cross = 2 * 2 * 2 * 4 * 4 * 30 * 4  # layers, rows, keys and values, heads, width, positions, float32
    assert one.moved.tokens >= cross and not results.prefilled
    assert results.skipped[0] == "first token and prefill: decode steps alone are measured with an encoder"
    longer = run(settings(shape=s.shape, rows=(2,), contexts=(8,), encoder_positions=60)).decoded[0]
    assert longer.moved.tokens == one.moved.tokens + cross
    assert "30 encoder positions a row" in BenchReport(s, results).facts()[0]
    assert "--source 60" in BenchReport(settings(shape=s.shape, encoder_positions=60), results).command
