"""Notices: what was to be expected is quiet, what went wrong is not, and each is told once."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from lamina.notices import notice


def test_expected_facts_are_info_and_failures_are_warnings_each_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lamina")
    for _ in range(2):
        notice("decoding by plain passes, since this is a test")
        notice("decoding by plain passes, since a launch failed in a test", unexpected=True)
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "lamina: decoding by plain passes, since this is a test"),
        ("WARNING", "lamina: decoding by plain passes, since a launch failed in a test"),
    ]


def test_generating_on_a_cpu_prints_nothing() -> None:
    script = "from docs.own_model import Mine; Mine().eval().generate([[1, 2]], max_new_tokens=2)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
