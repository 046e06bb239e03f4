"""Completion, in real shells: commands, options, and `--consumer NAME:KEY=VALUE`."""

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.kit.servers import environment

LIMIT_S = 60
MODULES = {"torch", "vllm", "transformers", "zmq", "rich", "duckdb"}


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    """The environment of a shell that finds `capflow`."""
    home = tmp_path_factory.mktemp("home")
    program = home / "capflow"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m capflow "$@"\n')
    program.chmod(0o755)
    (home / "a-model").mkdir()
    path = f"{home}{os.pathsep}{os.environ['PATH']}"
    return environment(home, PATH=path, HOME=str(home), TERM="dumb", PS1="$ ", HISTFILE="")


def completions(variables, line):
    """Return what capflow answers to Bash."""
    asked = {**variables, "_CAPFLOW_COMPLETE": "bash_complete", "COMP_LINE": line}
    done = subprocess.run(["capflow"], env=asked, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stderr == ""
    return [answer.removeprefix("plain,") for answer in done.stdout.split()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("capflow re", ["record", "replay", "result"]),
        ("capflow --ver", ["--version"]),
        ("capflow run --metr", ["--metrics-address"]),
        ("capflow run --policy ", ["block", "drop", "spill"]),
        ("capflow spool dead ", ["drop", "list", "replay", "show"]),
        ("capflow plugins files", ["filesystem"]),
        ("capflow run --consumer f", ["filesystem:"]),
        ("capflow run --consumer lo", ["log"]),
        ("capflow run --consumer=lo", ["log"]),
        ("capflow run --consumer gate:m", ["gate:mode=", "gate:min=", "gate:max="]),
        ("capflow run --consumer log@two:ev", ["log@two:every=", "log@two:events="]),
        ("capflow run --consumer log:every=2,ev", ["log:every=2,events="]),
        ("capflow run --consumer log:every=2,spool_b", ["log:every=2,spool_bytes="]),
        ("capflow run --consumer gate:policy", []),
        ("capflow run --consumer nope:", []),
        ("capflow run --consumer log:every=", []),
        ("capflow record there --consumer lo", ["log"]),
        ("capflow replay there --consumer lo", ["log"]),
        ("capflow serve m --hel", ["--help"]),
        ("capflow serve m --consumer-", ["--consumer-config"]),
        ("capflow serve m --consumer log:ever", ["log:every="]),
        ("capflow serve a-mo", ["file,a-mo"]),
    ],
)
def test_the_answers(variables, line, expected):
    assert completions(variables, line) == expected


def test_a_plugin_that_cannot_be_loaded_leaves_the_others_to_the_user(variables, tmp_path):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[capflow]\nbroken = no_such_module\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), variables.get("PYTHONPATH")]))
    assert completions({**variables, "PYTHONPATH": path}, "capflow run --consumer ") == []


def test_an_answer_imports_nothing_heavy(variables):
    code = "import sys; from capflow.cli import main\n"
    code += "try: main()\nfinally: print(sorted({m.partition('.')[0] for m in sys.modules}), file=sys.stderr)"
    for line in ("capflow ", "capflow run --", "capflow run --consumer filesystem:"):
        asked = {**variables, "_CAPFLOW_COMPLETE": "bash_complete", "COMP_LINE": line}
        done = subprocess.run([sys.executable, "-c", code], env=asked, capture_output=True, text=True, check=True)
        imported = set(re.findall(r"'(\w+)'", done.stderr))
        assert imported & MODULES <= ({"zmq"} if "consumer" in line else set()), line
        assert done.stdout


class Shell:
    """An interactive shell in a terminal. `text` is what it wrote."""

    def __init__(self, command, variables, directory):
        self.process, self.end = pty.fork()
        if self.process == 0:
            os.chdir(directory)
            os.execvpe(command[0], command, variables)  # noqa: S606
        self.text = ""

    def types(self, keys, until):
        """Type keys, and wait until the text matches a pattern."""
        self.text = ""
        os.write(self.end, keys.encode())
        deadline = time.monotonic() + LIMIT_S
        while not re.search(until, self.text):
            assert time.monotonic() < deadline, self.text
            if select.select([self.end], [], [], 0.1)[0]:
                self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self.end, 65536).decode(errors="replace"))

    def close(self):
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.end)


@contextlib.contextmanager
def shell(variables, directory, *command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    with contextlib.closing(Shell(command, variables, directory)) as started:
        yield started


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("capflow pro\t", r"capflow probe "),
        ("capflow run --metr\t", r"--metrics-address "),
        ("capflow run --consumer filesy\t", r"filesystem:$"),
        ("capflow run --consumer filesystem:ro\t", r"filesystem:root=$"),
        ("capflow run --consumer filesystem:root=x,max\t", r"filesystem:root=x,max_rows=$"),
        ("capflow run --consumer=filesystem:ro\t", r"--consumer=filesystem:root=$"),
        ("capflow serve m --consumer filesystem@two:ro\t", r"filesystem@two:root=$"),
        ("capflow spool verify a-mo\t", r"verify a-model"),
    ],
)
def test_in_bash(variables, tmp_path, typed, completed):
    (tmp_path / "a-model").mkdir()
    with shell(variables, tmp_path, "bash", "--norc", "--noprofile", "-i") as bash:
        bash.types("source <(capflow completion bash); echo rea''dy\n", "ready")
        bash.types(typed, completed)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("capflow pro\t", r"capflow probe "),
        ("capflow run --metr\t", r"--metrics-address "),
        ("capflow run --consumer filesystem:ro\t", r"filesystem:root=$"),
        ("capflow run --consumer filesystem:root=x,max\t", r"filesystem:root=x,max_rows=$"),
    ],
)
def test_in_zsh(variables, tmp_path, typed, completed):
    with shell(variables, tmp_path, "zsh", "-f", "-i") as zsh:
        zsh.types("autoload -U compinit; compinit -u; source <(capflow completion zsh); echo rea''dy\n", "ready")
        zsh.types(typed, completed)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("capflow pro", ["probe"]),
        ("capflow run --metr", ["--metrics-address"]),
        ("capflow run --consumer filesystem:ro", ["filesystem:root="]),
        ("capflow run --consumer filesystem:root=x,max", ["filesystem:root=x,max_rows="]),
    ],
)
def test_in_fish(variables, tmp_path, line, expected):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    code = f"capflow completion fish | source; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "-c", code], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert [each.partition("\t")[0] for each in done.stdout.splitlines()] == expected
