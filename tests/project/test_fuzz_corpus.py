"""The fuzzer: what once did harm does none any more, and nothing else does for some seconds."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.kit.sources import ROOT

SECONDS = 16  # of CPU time; as much again is for starting the targets
TARGETS = 16 if importlib.util.find_spec("vllm") else 13


def fuzz(*arguments):
    """Run the fuzzer; return its exit code and what it printed."""
    command = [sys.executable, "-m", "tests.fuzz", *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return ended.returncode, ended.stdout


@pytest.mark.long
def test_neither_what_is_kept_nor_anything_new_does_harm():
    """Each target reads its part of the corpus first."""
    code, output = fuzz("--seconds", SECONDS)
    assert code == 0, output
    assert output.count(" inputs, ") == TARGETS


def test_an_input_that_does_harm_is_kept_and_named(tmp_path):
    """A reader that takes what it should refuse, in the place of the dashboard's."""
    script = (
        "import sys; from pathlib import Path; import tests.fuzz.__main__ as fuzz\n"
        "fuzz.CORPUS = Path(sys.argv[1]); fuzz.TARGETS['page'].read = lambda self, data: {}[data[:1]]\n"
        "sys.argv = ['fuzz', '--child', sys.argv[1], '--target', 'page', '--seed', '1']; fuzz.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert "KeyError" in ended.stderr
    assert (tmp_path / "last-input").read_bytes() == b'{"seen":7,"frame_ms":12.5}'
