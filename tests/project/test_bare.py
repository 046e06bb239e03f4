"""Fresh environments with the wheel and without the checkout: machines that only consume, and one with an engine."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request

import pytest

import capflow
from tests.kit.wheels import ROOT, build_wheel

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def environment(directory):
    """Make an environment; return its directory of programs and the start of its `pip install`."""
    subprocess.run([sys.executable, "-m", "venv", directory / "env"], check=True)
    programs = directory / "env" / "bin"
    return programs, [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile"]


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Return the programs of an environment with the core alone, as it is locked."""
    programs, install = environment(tmp_path_factory.mktemp("bare"))
    lock = ROOT / "requirements" / "core.lock"
    subprocess.run([*install, "--no-deps", "--require-hashes", "-r", lock], check=True, capture_output=True)
    subprocess.run([*install, "--no-deps", wheel], check=True, capture_output=True)
    return programs


@pytest.fixture(scope="module")
def with_dashboard(wheel, tmp_path_factory):
    """Return the programs of an environment in which pip installed the extra `dashboard`, and what that asks for."""
    directory = tmp_path_factory.mktemp("dashboard")
    programs, install = environment(directory)
    # pip takes no constraints with hashes where a package without one is installed beside them.
    pins = re.sub(r" --hash=\S+", "", (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8"))
    (directory / "pins.txt").write_text(pins, encoding="utf-8")
    command = [*install, "--constraint", directory / "pins.txt", f"{wheel}[dashboard]"]
    subprocess.run(command, check=True, capture_output=True)
    return programs


def run(bare, *command, code=0, timeout=60):
    """Run a program of the environment, away from the checkout; return what it wrote."""
    done = subprocess.run(
        [bare / command[0], *command[1:]],
        cwd=bare.parent,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def python(bare, source):
    return run(bare, "python", "-c", textwrap.dedent(source))


def test_it_has_no_engine(bare):
    engines = python(
        bare,
        """
        import importlib.util
        print([n for n in ("torch", "vllm", "triton", "transformers") if importlib.util.find_spec(n)])
        """,
    )
    assert engines == "[]\n"


def test_it_runs_what_was_installed(bare):
    assert run(bare, "capflow", "--version") == f"capflow {capflow.__version__}\n"
    place = python(bare, "import capflow; print(capflow.__file__)")
    assert place.startswith(f"{bare.parent}/lib/")


def test_the_lock_has_all_packages_that_are_needed(bare):
    assert "No broken requirements found" in run(bare, "python", "-m", "pip", "check")


def test_every_core_and_consumer_module_imports(bare):
    output = python(
        bare,
        """
        import importlib.metadata, pkgutil, capflow, capflow_consumers, capflow_dashboard
        from capflow.errors import UsageError
        from capflow.extras import EXTRAS
        of_extras, without = set().union(*(each.values() for each in EXTRAS.values())), set()
        for package in (capflow, capflow_consumers, capflow_dashboard):
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if module.name.endswith("__main__"):
                    continue
                try:
                    importlib.import_module(module.name)
                except ModuleNotFoundError as e:  # an extra brings it, and it is imported only where that is used
                    assert e.name.partition(".")[0] in of_extras, (module.name, e.name)
                    without.add(module.name)
                except UsageError as e:
                    assert "capflow[torch]" in str(e), (module.name, e)
        for entry_point in importlib.metadata.entry_points(group="capflow"):
            assert entry_point.value not in without, entry_point
        assert not [name for name in without if name.startswith("capflow.") and "monitor" not in name], without
        print("all")
        """,
    )
    assert output == "all\n"


def test_every_public_name_imports_or_names_its_extra(bare):
    output = python(
        bare,
        """
        import capflow, capflow.testing, capflow_models
        for module in (capflow, capflow.testing, capflow_models):
            for name in module.__all__:
                try:
                    getattr(module, name)
                except capflow.CapflowError as e:
                    print(name, e)
        """,
    )
    engine = "missing package vllm; pip install 'capflow[vllm]' (GPU) or 'capflow[cpu]'"
    assert dict(line.split(" ", 1) for line in output.splitlines()) == {
        "LLM": f"an engine: {engine}",
        "AsyncLLM": f"an engine: {engine}",
        "ActivationCache": f"an engine: {engine}",
        "cache": f"an engine: {engine}",
        "sampling_params": f"an engine: {engine}",
        "VLLMSteerableModel": f"an engine: {engine}",
        "TorchRows": "capflow.TorchRows: missing package torch; pip install 'capflow[torch]'",
        "TransformersSteerableModel": "capflow_models.TransformersSteerableModel: missing packages torch, "
        "transformers; pip install 'capflow[vllm]' (GPU) or 'capflow[cpu]'",
    }


def test_plugins_are_listed_with_the_packages_that_they_lack(bare):
    output = run(bare, "capflow", "plugins")
    for name in ("dashboard", "duckdb", "filesystem", "gate", "log", "nats", "record"):
        assert name in output
    lacking = {"duckdb": "duckdb, pyarrow", "dashboard": "websockets", "nats": "cryptography, nats-py"}
    for extra, packages in lacking.items():
        assert f"missing: {packages}; pip install 'capflow[{extra}]'" in " ".join(output.split())


PROMPTS = ("--prompts", "prompts.jsonl")
NEEDS = [
    (("run", "--consumer", "duckdb:path=x.duckdb"), "the duckdb consumer", "duckdb, pyarrow", "duckdb"),
    (("run", "--consumer", "dashboard"), "the dashboard consumer", "websockets", "dashboard"),
    (("run", "--consumer", "nats:servers=x"), "the nats consumer", "cryptography, nats-py", "nats"),
    (
        ("run", "--consumer", "filesystem@x:root=x,layout=sharded"),
        "consumers.filesystem@x.layout=sharded",
        "isal, pyarrow",
        "files",
    ),
    (("replay", "rows", "--consumer", "duckdb:path=x.duckdb"), "the duckdb consumer", "duckdb, pyarrow", "duckdb"),
    (("run", "--consumer", "log", "--metrics-address", "0"), "--metrics-address", "prometheus_client", "metrics"),
    (("query", "FROM tokens"), "capflow query", "duckdb, pyarrow", "duckdb"),
    (("inspect", "rows", "--png", "x.png"), "--png", "matplotlib", "plot"),
    (("export", "rows", "x", "--to", "saelens"), "--to saelens", "datasets", "saelens"),
    (
        ("probe", "fit", "rows", "--labels", "rows", "--site", "post_block:0", "--out", "x"),
        "capflow probe fit",
        "scikit-learn",
        "probe",
    ),
    (("probe", "eval", "rows", "--labels", "rows", "x"), "capflow probe eval", "scikit-learn", "probe"),
    (("serve", "some-model"), "capflow serve", "vllm, torch, transformers", "vllm"),
    (("sites", "some-model"), "capflow sites", "vllm, torch, transformers", "vllm"),
    (("doctor", "--steering", "some-model"), "--steering", "vllm, torch, transformers", "vllm"),
    (("run", "--model", "demo", *PROMPTS, "--consumer", "log"), "--model", "vllm, torch, transformers", "vllm"),
    (("rollouts", "--model", "x", *PROMPTS, "--out", "x.jsonl"), "--backend vllm", "vllm, torch", "vllm"),
    (("vectors", "fit", "--model", "x", "--pairs", "x", "--out", "x"), "--backend vllm", "vllm, torch", "vllm"),
]


@pytest.mark.parametrize(
    ("command", "subject", "packages", "extra"), NEEDS, ids=[" ".join(need[0][:3]) for need in NEEDS]
)
def test_a_missing_extra_is_one_line_that_names_it(bare, command, subject, packages, extra):
    (bare.parent / "rows").mkdir(exist_ok=True)
    (bare.parent / "prompts.jsonl").write_text('{"id": "a", "prompt": "b"}\n')
    noun = "packages" if "," in packages else "package"
    install = f"pip install 'capflow[{extra}]'" + (" (GPU) or 'capflow[cpu]'" if extra == "vllm" else "")
    assert run(bare, "capflow", *command, code=2) == f"capflow: {subject}: missing {noun} {packages}; {install}\n"


def test_rows_are_written_and_read_with_the_core_alone(bare):
    output = python(
        bare,
        """
        import tempfile, capflow
        from capflow.testing import MemoryHub
        root = tempfile.mkdtemp() + "/rows"
        with MemoryHub(capflow.configure("filesystem", {"root": root}, capflow.load_plugins())) as hub:
            engine = hub.engine()
            engine.step([("r1", 4, 0, 4)])
            engine.finish("r1")
        print(len(capflow.open(root)["r1"]["post_block:0"].rows))
        """,
    )
    assert output == "4\n"


@pytest.mark.parametrize("command", ["inspect", "run"])
def test_a_shard_names_the_extra_that_reads_it(bare, tmp_path, command):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "shard~1.parquet").touch()
    options = (str(tmp_path / "rows"),) if command == "inspect" else ("--consumer", f"filesystem:root={tmp_path}/rows")
    output = run(bare, "capflow", command, *options, code=2)
    shard = f"shard {tmp_path}/rows/shard~1.parquet"
    assert output == f"capflow: {shard}: missing packages isal, pyarrow; pip install 'capflow[files]'\n"


def test_a_plugin_is_written_from_the_template_of_the_wheel(bare, tmp_path):
    output = run(bare, "capflow", "plugin", "new", "loudest", "--directory", str(tmp_path / "loudest"))
    for name in ("pyproject.toml", "README.md", "capflow_loudest.py", "test_capflow_loudest.py"):
        assert f"{tmp_path}/loudest/{name}\n" in output
        assert (tmp_path / "loudest" / name).stat().st_size > 0


def test_the_dashboard_serves_its_page_and_scripts(with_dashboard, tmp_path):
    assert "No broken requirements found" in run(with_dashboard, "python", "-m", "pip", "check")
    hub = subprocess.Popen(
        [
            with_dashboard / "capflow",
            "run",
            "--consumer",
            "dashboard:port=0",
            "--address",
            f"ipc://{tmp_path}/hub.sock",
        ],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert hub.stderr is not None
        address = next(m[1] for line in hub.stderr if (m := re.search(r"(http://\S+/), the link is in", line)))
        for url, start in (
            (address, b"<!doctype html>"),
            (f"{address}app.js", b""),
            (f"{address}style.css", b""),
            (f"{address}vendor/lit-html/lit-html.js", b"/**"),
        ):
            with urllib.request.urlopen(url, timeout=10) as response:
                body = response.read()
            assert body.startswith(start), url
            assert len(body) > 100
        hub.send_signal(signal.SIGINT)
        left = hub.communicate(timeout=30)[1]
    finally:
        hub.kill()
        hub.wait()
    assert hub.returncode == 0, left


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


def test_doctor_calls_it_a_consumers_machine(bare):
    output = run(bare, "capflow", "doctor")
    assert "This machine can consume" in output
    assert "missing: duckdb, pyarrow; pip install 'capflow[duckdb]'" in output


@pytest.fixture(scope="module")
def with_engine(wheel, tmp_path_factory):
    """Return the programs of an environment in which pip installed the extra `cpu`, as the page on it says."""
    programs, install = environment(tmp_path_factory.mktemp("engine"))
    subprocess.run([*install, f"{wheel}[cpu]"], check=True, capture_output=True)
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (remedy,) = re.findall("`(pip uninstall [^`]*)`", page)
    subprocess.run([programs / "python", "-m", *remedy.split(), "--yes"], check=True, capture_output=True)
    return programs


ENGINE = """
import tempfile
import numpy as np
import torch
import transformers
import capflow

if __name__ == "__main__":
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    torch.manual_seed(0)
    root = tempfile.mkdtemp()
    transformers.LlamaForCausalLM(config).save_pretrained(f"{root}/model")
    consumers = [f"filesystem:root={root}/rows,capture=requests"]
    sites = ["post_block:0", "pre_attn:1"]
    arguments = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
    vector = np.zeros(64, np.float32)
    vector[5] = 3.0

    def params(id, **more):
        capture = {"hooks": {"pre_attn": [1]}}
        return capflow.sampling_params(
            id=id, capture=capture, max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False, **more
        )

    with capflow.LLM(f"{root}/model", consumers=consumers, sites=sites, **arguments) as llm:
        steered = params("steered", steering_vectors={"post_block": {0: vector}})
        llm.generate([{"prompt_token_ids": [1, 2, 3, 4, 5]}] * 3, [params("plain"), steered, params("again")])
    data = capflow.open(f"{root}/rows")
    rows = {id: np.asarray(data[id]["pre_attn:1"].rows) for id in ("plain", "steered", "again")}
    moved = (rows["steered"] - rows["plain"])[:5]  # the prompt is the same
    assert np.abs(np.delete(moved, 5, 1)).max() < 1e-5
    print(
        f"rows {list(rows['plain'].shape)} {data['steered'].status}, moved by {moved[:, 5].mean():.1f}, "
        f"plain again {np.abs(rows['again'] - rows['plain']).max():.1f}"
    )
"""


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_an_engine_captures_and_steers(with_engine):
    assert "A small capture … works: 24 rows" in run(with_engine, "capflow", "doctor", timeout=400)
    (with_engine.parent / "engine.py").write_text(ENGINE)
    output = run(with_engine, "python", "engine.py", timeout=400)
    assert "rows [8, 64] ok, moved by 3.0, plain again 0.0" in output.splitlines()
