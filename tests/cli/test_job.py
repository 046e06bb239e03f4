"""The model job's options on the command line: invalid ones are refused in one line, before anything starts."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from capflow.cli.engine.job import parse_pairs
from capflow.cli.engine.prompts import Prompt, read_prompts
from capflow.errors import UsageError
from tests.kit.dashboards import Pageless


@pytest.fixture
def prompts(tmp_path):
    def write(text):
        path = tmp_path / "prompts.jsonl"
        path.write_text(text)
        return path

    return write


LONG = pytest.mark.long
GOOD = '{"id": "a", "prompt": "x"}\n'


def test_prompts_are_read_with_blank_lines_passed_over(prompts):
    path = prompts(GOOD + "\n" + '{"id": "b", "prompt": "y", "max_tokens": 7}\n')
    assert read_prompts(path) == [Prompt("a", "x", line=1), Prompt("b", "y", 7, line=3)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "nonsense\n", "line 2"),
        (GOOD + '{"id": "b"}\n', "line 2"),
        (GOOD + '{"id": "b", "prompt": ""}\n', "line 2"),
        (GOOD + '{"id": "", "prompt": "x"}\n', "line 2"),
        (GOOD + '{"id": "b", "prompt": "x", "colour": 1}\n', "colour"),
        (GOOD + '{"id": "b", "prompt": "x", "max_tokens": 0}\n', "line 2, max_tokens"),
        (GOOD + GOOD, "line 2, id"),
        (GOOD + '{"id": "b", "prompt": "x", "capture": {"hooks": {"nowhere": [0]}}}\n', "line 2, capture.hooks: got"),
        (GOOD + '{"id": "b", "prompt": "x", "capture": 7}\n', "line 2, capture: got 7"),
        (GOOD + '{"id": "b", "prompt": "x", "line": 3}\n', "line 2, line: unknown: expected one of id, prompt, "),
        (GOOD + '{"id": "b", "prompt": "x", "steering": {}}\n', "line 2, steering: unknown: expected one of id, "),
        (GOOD + '["b", "x"]\n', "line 2: got"),
        (GOOD + '{"id": "b", "prompt": "x", "steering_vector": {}}\n', "line 2, steering_vector: unknown"),
        (
            GOOD + '{"id": "b", "prompt": "x", "steering_vectors": {"post_mlp": {"3": [1, "x"]}}}\n',
            r"line 2, steering_vectors\.post_block\.3: got 'x' at index 1, expected a number",
        ),
        (
            GOOD + '{"id": "b", "prompt": "x", "steering_clamps": {"post_block": {"3": {"value": 0}}}}\n',
            r"line 2, steering_clamps\.post_block\.3\.vector: missing",
        ),
        (
            GOOD + '{"id": "b", "prompt": "x", "steering_patches": {"post_block": 3}}\n',
            r"line 2, steering_patches\.post_block: got 3, expected a mapping of layer to patch",
        ),
        (GOOD + '{"id": "b", "prompt": "x", "steering_scale": 2}\n', "line 2, steering_scale: given without a name"),
        (
            GOOD + '{"id": "b", "prompt": "x", "steering_name": "a", "steering_module_ref": ["a", 1]}\n',
            "line 2, steering_module_ref: given beside steering_name",
        ),
        (GOOD + '{"id": "b", "prompt": "x", "capture": ' + "[" * 5000 + "]" * 5000 + "}\n", "line 2: got"),
        ("\n", "no prompts"),
    ],
)
def test_a_bad_prompts_file_names_its_line(prompts, text, words):
    with pytest.raises(UsageError, match=words) as caught:
        read_prompts(prompts(text))
    assert "\n" not in str(caught.value)


def test_pairs_are_json_where_they_can_be():
    assert parse_pairs(("a=1", "b=true", "c=x", 'd={"e": 2}'), "--engine-arg") == {
        "a": 1,
        "b": True,
        "c": "x",
        "d": {"e": 2},
    }
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_pairs(("a",), "--engine-arg")


def run(tmp_path, *arguments):
    command = [sys.executable, "-m", "capflow", "run", "--address", f"ipc://{tmp_path}/hub.sock", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "demo", "--prompts", "{tmp}/none.jsonl", "--consumer", "log"), "none.jsonl"),
        (("--model", "{tmp}/nowhere", "--prompts", "{prompts}", "--consumer", "log"), "--model"),
        (("--model", "demo", "--prompts", "{prompts}", "--consumer", "log", "--engine-arg", "x"), "--engine-arg"),
        (("--model", "demo", "--consumer", "log"), "no --prompts"),
        (("--consumer", "log", "--steering", "glad.json"), "--steering: got no --model"),
        (("--consumer", "log", "--steering-modules", "glad=glad.json"), "--steering-modules: got no --model"),
    ],
)
def test_a_wrong_job_is_refused_before_anything_starts(tmp_path, prompts, arguments, words):
    path = prompts(GOOD)
    done = run(tmp_path, *(a.format(tmp=tmp_path, prompts=path) for a in arguments))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("capflow: ")
    assert words in line


@pytest.mark.engine
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--consumer", "filesystem:root={tmp}/rows,layers=99"), "layer 99"),
        pytest.param(("--consumer", "filesystem:root={tmp}/rows,hooks=mlp_in"), "--sites mlp_in", marks=LONG),
        pytest.param(("--consumer", "log", "--sites", "post_block:77"), "post_block:77", marks=LONG),
        pytest.param(("--consumer", "log", "--engine-arg", "colour=red"), "colour", marks=LONG),
        pytest.param(
            ("--consumer", "log", "--engine-arg", "additional_config=5"),
            "--engine-arg additional_config: got 5, expected a JSON object",
            marks=LONG,
        ),
        pytest.param(
            ("--consumer", "log", "--policy", "spill", "--spool-dir", "/dev/null/spool"),
            "--spool-dir: got /dev/null",
            marks=LONG,
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused_before_it_is_loaded(tmp_path, prompts, arguments, words):
    from tests.kit.engines import save_tiny, save_words

    model = tmp_path / "model"
    save_tiny(model)
    save_words(model)
    path = prompts(GOOD)
    done = run(tmp_path, "--model", str(model), "--prompts", str(path), *(a.format(tmp=tmp_path) for a in arguments))
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("capflow: ")
    assert words in last
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "rows").glob("[!.]*"))


@pytest.mark.long
@pytest.mark.engine
def test_the_consumers_of_a_job_stay_until_a_signal_when_they_are_to(tiny_with_words, tmp_path, prompts):
    path = prompts('{"id": "a", "prompt": "w5 w6 w7 w8"}\n')
    command = [sys.executable, "-m", "capflow", "run", "--model", tiny_with_words, "--prompts", path, "--stay"]
    command += ["--address", f"ipc://{tmp_path}/hub.sock", "--max-tokens", "3", "--consumer", "dashboard:port=0"]
    command += ["--engine-arg", "enforce_eager=true"]
    tmp_path.chmod(0o700)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        lines = []
        while "the consumers run until Ctrl-C" not in "".join(lines[-1:]):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        lines.append(process.stderr.readline())
        link_file = re.search(r"the link is in (\S+)", lines[-1])[1]
        link = re.search(r'href="([^"]+)"', Path(link_file).read_text())[1]
        with Pageless(SimpleNamespace(link=link, address=link.partition("#")[0])) as page:
            page.until(lambda p: p.requests and p.requests[1]["status"] == "length")
            page.until(lambda p: p.engines and p.engines[0]["gone"])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "1 requests" in errors or "1 prompts" in errors
