"""`capflow plugin new`: its plugin is installed, tested, listed and run as it is; what exists is left unchanged."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from capflow.testing import MemoryHub
from tests.kit.recordings import record, run


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Write a plugin and install it into a new environment; return both directories and a function that runs Python."""
    base = tmp_path_factory.mktemp("kit")
    environment = base / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")] or site.getsitepackages()
    (packages / "ours.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
    # Without directories inside the packages: setuptools adds its own copies of other packages to the path.
    roots = [path for path in sys.path if not path.startswith(tuple(ours))]

    def python(*words, cwd=base):
        return subprocess.run(
            [environment / "bin" / "python", "-m", *map(str, words)],
            cwd=cwd,
            env=os.environ | {"COLUMNS": "160", "PYTHONPATH": os.pathsep.join(roots)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    done = python("capflow", "plugin", "new", "token-norms")
    assert done.returncode == 0, done.stderr
    assert "capflow-token-norms/capflow_token_norms.py" in done.stdout
    words = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "--target", packages)
    done = python("pip", "install", *words, base / "capflow-token-norms")
    assert done.returncode == 0, done.stderr
    return base, python


def test_its_own_tests_pass(installed):
    base, python = installed
    done = python("pytest", "-q", "-p", "no:cacheprovider", cwd=base / "capflow-token-norms")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "25 passed" in done.stdout


def test_capflow_lists_it_with_its_options(installed):
    _, python = installed
    listed = {plugin["name"]: plugin for plugin in json.loads(python("capflow", "plugins", "--json").stdout)}
    assert listed["token-norms"]["module"] == "capflow_token_norms"
    assert [option["name"] for option in listed["token-norms"]["options"][:2]] == ["path", "site"]


def test_a_replay_runs_it(installed, tmp_path):
    _, python = installed
    with MemoryHub(record(tmp_path / "rec")) as hub:
        engine = hub.engine()
        engine.step([("r1", 4, 0, 4)])
        engine.finish("r1")
    out = tmp_path / "out.jsonl"
    done = python("capflow", "replay", tmp_path / "rec", "--consumer", f"token-norms:path={out}")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(out.read_text())["norms"]) == 4


def test_its_name_is_taken_then(installed):
    _, python = installed
    done = python("capflow", "plugin", "new", "token-norms")
    assert done.returncode == 2
    assert "expected one that no installed plugin has" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Loudest", "NAME: got Loudest, expected at most 40 lower-case letters"),
        ("../up", "NAME: got ../up, expected"),
        ("a b", "NAME: got a b"),
        ("é", "NAME: got é"),
        ("", "NAME: got '', expected"),
        ("-x", "-x"),
        ("x" * 41, "expected at most 40"),
        ("class", "expected a name that Python does not use"),
        ("filesystem", "expected one that no installed plugin has"),
        ("consumers", "expected one whose module, capflow_consumers, is not installed"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    assert run(["plugin", "new", name]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["directory", "full", "file", "link"])
def test_what_is_there_is_not_touched(tmp_path, monkeypatch, capsys, there):
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "capflow-mine"
    if there == "file":
        target.write_text("mine")
    elif there == "link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
        if there == "full":
            (target / "pyproject.toml").write_text("mine")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert run(["plugin", "new", "mine"]) == 2
    assert "got something that is there, expected nothing" in capsys.readouterr().err
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    if there == "full":
        assert (target / "pyproject.toml").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_named(capsys):
    assert run(["plugin", "new", "mine", "--directory", "/proc/mine"]) == 2
    assert "/proc/mine: got" in capsys.readouterr().err


def test_a_directory_may_be_named(tmp_path):
    with tempfile.TemporaryDirectory() as base:
        assert run(["plugin", "new", "mine", "--directory", f"{base}/here"]) == 0
        assert sorted(path.name for path in Path(base, "here").iterdir()) == [
            "README.md",
            "capflow_mine.py",
            "pyproject.toml",
            "test_capflow_mine.py",
        ]
