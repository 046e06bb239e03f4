"""A machine that only consumes: a fresh environment with the core's packages and the wheel, no torch, no vLLM."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.kit.wheels import ROOT, build_wheel

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return the environment's directory of programs."""
    directory = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", directory / "env"], check=True)
    programs = directory / "env" / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
    wheel = build_wheel(directory / "wheel")
    lock = ROOT / "requirements" / "core.lock"
    subprocess.run([*pip, "--require-hashes", "-r", lock], check=True, capture_output=True)
    subprocess.run([*pip, wheel], check=True, capture_output=True)
    return programs


def run(bare, *command, code=0):
    """Run a program of the environment, away from the checkout; return what it wrote."""
    done = subprocess.run(
        [bare / command[0], *command[1:]],
        cwd=bare.parent,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def python(bare, source):
    return run(bare, "python", "-c", textwrap.dedent(source))


def test_it_has_no_engine(bare):
    output = python(
        bare,
        """
        import importlib.util
        print([n for n in ("torch", "vllm", "triton", "transformers") if importlib.util.find_spec(n)])
        """,
    )
    assert output == "[]\n"


def test_what_is_locked_is_all_that_is_needed(bare):
    assert "No broken requirements found" in run(bare, "python", "-m", "pip", "check")


def test_every_core_and_consumer_module_imports(bare):
    output = python(
        bare,
        """
        import importlib, pkgutil, capflow, capflow_consumers, capflow_dashboard
        for package in (capflow, capflow_consumers, capflow_dashboard):
            for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if found.name.endswith("__main__"):
                    continue
                try:
                    importlib.import_module(found.name)
                except ModuleNotFoundError as e:  # what an extra brings, and only where that is used
                    needs = {"nats.link": "nats", "dataset.torch_rows": "torch"}
                    assert needs.get(found.name.removeprefix("capflow_consumers.")) == e.name, (found.name, e.name)
        print("all")
        """,
    )
    assert output == "all\n"


def test_plugins_are_listed(bare):
    output = run(bare, "capflow", "plugins")
    for name in ("dashboard", "duckdb", "filesystem", "gate", "log"):
        assert name in output


def test_a_frame_goes_over_the_wire_and_back(bare):
    output = python(
        bare,
        """
        import numpy as np
        from capflow.capture.frame import Block, Frame, FrameHeader, Rank, RequestRows, Span
        from capflow.capture.site import Site
        rows = np.arange(8, dtype=np.float32)
        header = FrameHeader(engine="e", boot="b", rank=Rank(0, 0, 0), seq=1, step=1, time_ns=0, dtype="float32",
                             hidden_size=4, requests=(RequestRows("r", 2, 0, (5, 6)),),
                             blocks=(Block((Site(3, "post_block"),), 2, (Span(0, 0, 2, 0),)),))
        back = Frame.decode(*map(bytes, Frame.seal(header, rows).encode()))
        (chunk,) = back.chunks()
        print(chunk.request.id, chunk.sites[0], chunk.token_ids, chunk.rows.ravel().tolist() == rows.tolist())
        """,
    )
    assert output == "r post_block:3 (5, 6) True\n"


def test_a_hub_starts_answers_and_drains_on_ctrl_c(bare, tmp_path):
    address = f"ipc://{tmp_path}/hub.sock"
    hub = subprocess.Popen(
        [bare / "capflow", "run", "--consumer", "log", "--address", address],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert hub.stderr is not None
        assert "listening at" in hub.stderr.readline()
        assert "log" in run(bare, "capflow", "status", "--address", address)
        hub.send_signal(signal.SIGINT)
        left = hub.communicate(timeout=30)[1]
    finally:
        hub.kill()
        hub.wait()
    assert hub.returncode == 0, left
    assert "Traceback" not in left


@pytest.mark.parametrize("command", [("serve", "some-model"), ("run", "--model", "demo")])
def test_what_needs_an_engine_says_how_to_get_one(bare, tmp_path, command):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "b"}\n')
    more = () if command[0] == "serve" else ("--prompts", str(prompts), "--consumer", "log")
    output = run(bare, "capflow", *command, *more, code=2)
    (line,) = [line for line in output.splitlines() if line.startswith("capflow: ") and "listening" not in line]
    assert "vLLM is not installed" in line
    assert "pip install 'capflow[" in line


def test_the_library_says_so_too(bare):
    output = python(
        bare,
        """
        import capflow
        try:
            capflow.LLM
        except capflow.CapflowError as e:
            print(e)
        """,
    )
    assert "vLLM is not installed; pip install" in output


def test_doctor_calls_it_a_consumers_machine(bare):
    output = run(bare, "capflow", "doctor")
    assert "This machine can consume" in output
