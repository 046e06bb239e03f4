"""The loop of work on capflow: what `make` and CI run, and that CONTRIBUTING says so."""

import ast
import collections
import itertools
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from tests.conftest import slow_tests
from tests.kit.sources import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def recipe(target):
    """Return the commands of a target."""
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]


def functions(path):
    """Return the tests of a file, as pytest names them."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= {node.name} if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else set()
        names |= {
            f"{node.name}::{each.name}"
            for each in ast.walk(node)
            if isinstance(node, ast.ClassDef) and isinstance(each, ast.FunctionDef)
        }
    return names


@pytest.mark.parametrize("line", sorted(slow_tests()))
def test_a_slow_test_exists(line):
    file, _, name = line.partition("::")
    assert (ROOT / file).is_file()
    assert not name or name in functions(ROOT / file)


def test_every_test_runs_somewhere():
    """`make test` and `make proof` share the tests; only `make check` leaves slow ones out."""
    lanes = re.search("^LANES := (.*)", MAKEFILE, re.MULTILINE)[1].split()
    assert "$(LANES)" in recipe("test")
    runs = [
        run for lane in lanes for run in re.findall(r'\$\(LANE\) "(.*?)" ?([^;&|\n]*?)(?: 2>|[;&|\n]|$)', recipe(lane))
    ]
    assert [(selected, folders.strip()) for selected, folders in runs] == [
        ("engine and not long", "--ignore=tests/rows"),
        ("not (engine or browser or long)", "tests/engine"),
        ("not (engine or long)", "$(WAITING)"),
        ("engine and not long", "$(FIRST_ROWS)"),
        ("browser and not (engine or long)", "$(WAITING:%=--ignore=%)"),
        ("engine and not long", "tests/rows $(FIRST_ROWS:%=--ignore=%)"),
        ("not (browser or engine or long)", "$(WAITING:%=--ignore=%) --ignore=tests/engine"),
    ]
    assert "$(PROOFS)" in recipe("proof")
    proofs = re.search("^PROOFS := (.*)", MAKEFILE, re.MULTILINE)[1].split()
    assert [re.findall(r"\$\(LANE\) long (.*?) 2>", recipe(each)) for each in proofs] == [
        ["tests/rows tests/engine"],
        ["--ignore=tests/rows --ignore=tests/engine"],
    ]
    assert re.search('^QUICK := .* "not \\(engine or browser or long or slow\\)" ', MAKEFILE, re.MULTILINE)
    quick = [re.findall(r"\$\(QUICK\) (.*)", recipe(part)) for part in re.findall(r"check-[\w-]+", recipe("check"))]
    assert quick == [[], ["$(WAITING)"], ["$(WAITING:%=--ignore=%)"]]


@pytest.mark.parametrize("failing", ["none", "lint"])
def test_ci_lints_before_it_tests(tmp_path, failing):
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n[ "$1" != {failing} ]\n')
    make.chmod(0o755)
    done = subprocess.run([ROOT / ".ci" / "run"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    calls = ["--jobs env system", "lint", "test"]
    assert (tmp_path / "calls").read_text().splitlines() == (calls if failing == "none" else calls[:2])
    assert (done.returncode == 0) == (failing == "none")


def test_one_test_is_named():
    command = ["make", "--no-print-directory", "-o", "env", "test-one"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no T given; expected a test" in done.stderr


def test_a_commit_is_checked_by_the_tools_of_the_environment():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        python, *arguments = shlex.split(hook["entry"])
        assert python == ".venv/bin/python"
        subprocess.run([sys.executable, *arguments, __file__], cwd=ROOT, check=True)


@pytest.mark.parametrize("target", ["check", "test-one", "format", "test", "docs", "proof"])
def test_the_contributors_page_has_the_loop(target):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `make {target}\b", page, re.MULTILINE)


def test_no_two_test_files_have_one_name():
    """pytest imports them by their names alone."""
    names = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_test_sleeps_without_a_reason(path):
    """A test waits for a condition. Where a sleep is the stimulus itself, a comment above it says so."""
    lines = ["", *path.read_text(encoding="utf-8").splitlines()]
    for before, line in itertools.pairwise(lines):
        if re.search(r"\b(time|asyncio)\.sleep\(", line):
            assert before.strip().startswith("#"), line
