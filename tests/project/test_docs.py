"""The documentation: every runnable snippet runs, every named thing exists, and every link has a target.

The words after the language of a fenced block say how it is used: `file=PATH` writes it to a file, `test` runs it,
`engine` runs it on a real model, `needs:NAME` is not run here. The blocks of a page run in order in one directory, with
an environment of their own, so that `pip install -e .` on a page is harmless.
"""

import os
import re
import shlex
import site
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from capflow import limits
from capflow.cli import COMMANDS
from capflow.hub.hub import Hub
from capflow_engine.compat.versions import record
from tests.kit.sources import ROOT
from tests.matrix.run import requirement, table

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_BY_OTHERS = {
    "data.md": "consumers/dataset/test_reader.py",
    "grpc.md": "engine/serve/test_rpc.py",
    "nats.md": "consumers/nats/test_nats.py",
    "querying.md": "consumers/duckdb/test_duckdb.py",
}
PLAIN_LANGUAGES = {"text", "json", "sql", "console", "mermaid", "toml"}
_FENCE = re.compile(r"^```(?P<info>\S[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block. mark: what its info string says after the language."""

    language: str
    mark: str
    body: str


def blocks(page):
    blocks = []
    for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
        language, _, mark = match["info"].partition(" ")
        blocks.append(Block(language, mark.strip(), match["body"]))
    return blocks


def pages_with(*marks):
    return [page for page in PAGES if page.name not in RUN_BY_OTHERS and any(b.mark in marks for b in blocks(page))]


class Bench:
    """A directory to run a page's blocks in, with an environment that has all of ours and may be installed into."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "page"
        self.directory.mkdir()
        environment = directory / "env"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        programs = environment / "bin"
        (packages,) = environment.glob("lib/python*/site-packages")
        ours = site.getsitepackages()[0]
        (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        for name, module in (("pip", "pip"), ("capflow", "capflow")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{programs}/python" -m {module} "$@"\n')
            program.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this as: no isolation
            "PIP_QUIET": "1",
            "COLUMNS": "160",
            "XDG_RUNTIME_DIR": str(directory),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }

    def run(self, block: Block) -> str:
        """Write or run a block; return what it printed."""
        if block.mark.startswith("file="):
            path = self.directory / block.mark.removeprefix("file=")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
            return ""
        if block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.body]
        else:
            script = self.directory / "snippet.py"  # a file, so that vLLM's engine process can import it
            script.write_text(block.body, encoding="utf-8")
            command = ["python", script.name]
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, f"{block.body}\n---\n{done.stdout}"
        return done.stdout


def run_page(page, tmp_path, marks):
    bench = Bench(tmp_path)
    return "".join(bench.run(block) for block in blocks(page) if block.mark in marks or block.mark.startswith("file="))


@pytest.mark.parametrize("page", pages_with("test"), ids=lambda page: page.stem)
def test_snippets_run(page, tmp_path):
    output = run_page(page, tmp_path, {"test"})
    if page.stem == "tutorial":
        assert "loudest" in output
        assert "25 passed" in output
    if page.stem == "security":
        assert "key ann: got the right to read, expected the right to steer" in output
        assert "does not allow this key; on its machine: capflow keys allow" in output


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.long] * (p.stem != "README")) for p in pages_with("engine")],
    ids=lambda page: page.stem,
)
def test_snippets_that_need_a_model_run(page, tmp_path):
    output = run_page(page, tmp_path, {"test", "engine"} if page.stem == "tutorial" else {"engine"})
    expected = {
        "README": ["ok", "(13, 640)"],
        "first-capture": ["checksums all right", "fox (15, 640) bfloat16", "ok", "Site(layer=17, hook='post_block')"],
        "first-steering": ["\n0.0 ", "\n-2.0 ", "\n2.0 ", "vLLM -2.0 ", "vLLM +0.0 ", "vLLM +2.0 "],
        "hooks": ["capture.hooks"],
        "install": ["A small capture … works: "],
        "lenses": ["post_block:17  ' the' 0.1", "rank 3 0.08", "leads_from", "17 [' dog', "],
        "saes": ["\n6000.0 ", "\n{'set': 9000.0} ", "{'post_block:9': 2}"],
        "steerable": [
            "plain: ",
            "glad: ",
            "sad: ",
            "none 0.0 ",
            "glad 2.0 ",
            "glad -2.0 ",
            "positive     2  16",
            "  perplexity     bad",
        ],
        "steering": ["+0.0 ", "+2.0 ", "-2.0 ", "patched 0.0:", "patched 1.0:  Paris", "asyncio: "],
        "sweeps": ["364 runs", "<SweepResult: 1 pair, 24 patches, denoise, noise"],
        "tutorial": ['"request": "fox"', '"position": '],
    }
    for words in expected[page.stem]:
        assert words in output
    if page.stem == "steering":
        answers = [line for line in output.splitlines() if re.match(r"[+-]\d\.0 ", line)]
        assert len({line[4:] for line in answers}) == 3, "each scale answers differently"
        assert "patched 0.0:  Paris" not in output
        assert re.search(r"2\s+requests\s+steered", output)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_what_becomes_of_it(page):
    if page.name in RUN_BY_OTHERS:
        assert page.name in (ROOT / "tests" / RUN_BY_OTHERS[page.name]).read_text(encoding="utf-8")
        return
    for block in blocks(page):
        runs = block.mark in ("test", "engine") or block.mark.startswith(("file=", "needs:"))
        assert runs or block.language in PLAIN_LANGUAGES, f"{page.name}: ```{block.language} {block.mark}"
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page)), (
        "a fence is not closed, or has no language"
    )


def headings(page):
    """Return what a link to each heading of a page ends with."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            there = page.parent / name if name else page
            assert there.is_file(), target
            assert not heading or heading in headings(there), target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert all(f"({page.name})" in index for page in PAGES if page.parent.name == "docs" and page.name != "index.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_and_options_that_are_named_exist(page):
    import click

    from capflow.cli import cli

    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for words in re.findall(r"(?:^|`|\s)capflow (\w+)([^`\n]*)", text):
        if words[0] in COMMANDS and words[0] != "serve":  # which takes vLLM's options too
            command = cli.get_command(click.Context(cli), words[0])
            names = iter(words[1].split())
            while isinstance(command, click.Group):
                command = command.commands[next(names)]
            have = {option for parameter in command.params for option in parameter.opts}
            used = {
                word.partition("=")[0]
                for word in shlex.split(words[1].replace("'", ""), comments=True)
                if word.startswith("--")
            }
            assert used <= have, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_make_targets_that_are_named_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)`", page.read_text(encoding="utf-8")):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_files_that_are_named_exist(page):
    named = re.findall(
        r"`((?:capflow|consumers|dashboard|engine_ext|examples|requirements|tests)/[\w./-]*)`",
        page.read_text(encoding="utf-8"),
    )
    assert all((ROOT / name).exists() for name in named), named


def test_operations_names_every_counter():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    hub = Hub("ipc:///tmp/never-started.sock", [])
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    assert all(f"`{key}`" in table for key in hub.status())


def test_operations_names_every_command():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert all(re.search(rf"`(capflow )?{name}\b", text) for name in COMMANDS)


def test_the_install_page_names_every_extra():
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert [extra for extra in extras if f"`{extra}`" not in text] == []


def test_backpressure_names_every_reason_for_which_rows_are_lost():
    """Each reason stands in the code as a string of its own."""
    text = (ROOT / "docs" / "backpressure.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)` \| (?:worker|hub)", text, re.MULTILINE))
    code = "".join(
        (ROOT / name).read_text(encoding="utf-8")
        for name in (
            "capflow/transport/links/worker.py",
            "capflow/hub/lanes/durable.py",
            "capflow/transport/outbox.py",
            "capflow/buffers/spool/spool.py",
            "capflow/hub/lanes/lane.py",
            "capflow/hub/lanes/memory.py",
            "capflow/hub/requests/index.py",
            "capflow/hub/watch.py",
            "capflow/replay/player.py",
            "engine_ext/capflow_engine/worker/outlets.py",
            "engine_ext/capflow_engine/worker/worker.py",
        )
    )
    assert named == {reason for reason in named if f'"{reason}"' in code}
    returned = set(
        re.findall(r'return "(\w+)"|return None, "(\w+)"|_lose\(delivery, "(\w+)"\)|dropped\["(\w+)"\]', code)
    )
    used = {reason for groups in returned for reason in groups if reason} | {"queue_full", "hub_gone"}
    assert used <= named


def test_wire_names_every_message_and_every_key_of_a_frame():
    import msgspec

    from capflow.capture.frame import Finished, FrameHeader, RequestRows
    from capflow.protocol import message

    text = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
    tags = {"frame"} | {kind.__struct_config__.tag for kind in message.Message.__args__}
    assert tags == set(re.findall(r"^\| `(\w+)` \| (?:peer|hub|worker|both|client|scheduler)", text, re.MULTILINE))
    for kind in (FrameHeader, RequestRows, Finished):
        assert all(f"`{field.name}" in text for field in msgspec.structs.fields(kind)), kind
    assert f"{limits.HEADER_BYTES_MAX // limits.MIB} MiB for any other message" in text
    assert f"{limits.FRAME_HEADER_BYTES_MAX // limits.MIB} MiB for a frame's header" in text
    assert f"{limits.FINISHED_PER_FRAME_MAX} `finished`" in text
    assert f"{limits.SPANS_PER_FRAME_MAX:,} spans" in text
    assert f"{limits.TOKENS_PER_FRAME_MAX:,} token ids" in text
    assert f"{limits.REQUESTS_PER_FRAME_MAX:,} requests" in text


def test_compatibility_names_the_versions_that_are_accepted():
    versions = record.tested()
    assert {version for version, tested in versions.items() if not tested.right} == set()
    low, below = record.bounds(versions)
    text = f"{low[0]}.{low[1]} to {below[0]}.{below[1] - 1}"
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert f"| vLLM | {text} |" in page
    assert table(versions) in page
    assert f"vLLM {text}" in (ROOT / "README.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert f"vllm{requirement(versions)}" in extras["vllm"]
    (cpu,) = (one.removeprefix("vllm-cpu==") for one in extras["cpu"] if one.startswith("vllm"))
    assert cpu in versions


def test_each_minor_version_between_the_bounds_was_tested():
    low, below = record.bounds(record.tested())
    assert low[0] == below[0]
    assert {record.parts(version)[:2] for version in record.tested()} == {
        (low[0], minor) for minor in range(low[1], below[1])
    }
