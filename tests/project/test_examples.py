"""The packages under examples/, installed as anybody would, run by a real hub and a real engine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import capflow
from capflow.capture.frame import Frame
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow.transport.client import Client
from tests.kit.engines import GREEDY, LAYERS, WIDTH, engine, prompts
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import address, worker_link
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

__all__ = ["address"]

SITE = Site(1, "post_block")
PACKAGES = ["capflow-reward", "capflow-sae"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the directory that both packages are installed in."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    packages = [ROOT / "examples" / name for name in PACKAGES]
    subprocess.run([*command, "--target", target, *packages], check=True, timeout=300)
    return target


@pytest.fixture
def environment(installed):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAPFLOW_")}
    return kept | {"PYTHONPATH": str(installed)}


def test_their_own_tests_pass(environment):
    tests = [ROOT / "examples" / name / "tests" for name in PACKAGES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode", "importlib", *tests]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_they_are_plugins_like_any(environment):
    command = [sys.executable, "-m", "capflow", "plugins", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    plugins = {plugin["name"]: plugin for plugin in json.loads(done.stdout)}
    assert {"reward", "sae"} <= set(plugins)
    assert {option["name"] for option in plugins["sae"]["options"] if option["required"]} == {"out", "site"}


class Sparse:
    """Rows that are sums of `active` of `features` known directions, and a mean that is not 0."""

    def __init__(self, hidden, features, active, seed=0):
        self.random = np.random.default_rng(seed)
        directions = self.random.standard_normal((features, hidden))
        self.directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
        self.active = active

    def rows(self, count):
        features = len(self.directions)
        chosen = self.random.random((count, features)).argsort(1)[:, : self.active]
        strength = np.zeros((count, features))
        np.put_along_axis(strength, chosen, self.random.uniform(0.5, 1.5, (count, self.active)), 1)
        return (strength @ self.directions + 3.0).astype(np.float32)


def test_an_autoencoder_learns_the_dictionary_behind_the_rows_that_pass(environment, address, tmp_path):
    hidden, features, active, steps, batch = 24, 32, 2, 400, 128
    data = Sparse(hidden, features, active)
    options = f"out={tmp_path},site={SITE},features={2 * features},active={active},batch={batch},buffer_rows=2048"
    command = [sys.executable, "-m", "capflow", "run", "--address", address, "--drain-s", "60"]
    hub = subprocess.Popen([*command, "--consumer", f"sae:{options},learning_rate=0.004"], env=environment)
    try:
        eventually(Path(address.removeprefix("ipc://")).exists, 120)
        hello = make_hello(model=make_model(4, hidden))
        with worker_link(address, hello) as link, Client(address) as client:

            def learnt(request, rows):
                """Send the hub a request with these rows; return the progress of the training and the skipped rows."""
                frame = make_frame([(request, 1, 0, len(rows))], [SITE], hidden=hidden)
                frame = Frame.seal(frame.header, rows.reshape(-1).view(np.uint8))
                assert link.send(frame.header, frame.payload) is None
                end = make_frame([], hidden=hidden, finished=[make_finished(request, 1, len(rows))])
                assert link.send(end.header, end.payload) is None
                result = client.results([request], timeout=60)[request]["sae"]
                assert result.status == "ok", result.error
                counts = client.status()["consumers"]["sae"]["counts"]
                losses.append(result.payload["loss"])
                return result.payload["steps"], counts.get("rows_skipped", 0)

            losses = []  # the share of the variance that is not explained, None before the first step
            sent = requests = done = 0
            while done < steps:
                done, skipped = learnt(f"r{requests}", data.rows(1 + 4 * batch))
                requests += 1
                sent += 4 * batch  # first positions are left out
            burst = data.rows(1 + 4096)  # twice what the buffer holds, at once
            burst[5] = np.nan
            _, skipped = learnt("burst", burst)
            assert skipped >= 4095 - 2048
            assert client.status()["consumers"]["sae"]["counts"]["rows_not_finite"] == 1
    finally:
        hub.send_signal(signal.SIGINT)
        assert hub.wait(60) == 0
    with safe_open(tmp_path / "sae.safetensors", "pt") as file:
        decoder = file.get_tensor("decoder").numpy()
        about = json.loads(file.metadata()["sae"])
        tensors = {name: file.get_tensor(name).numpy() for name in ("encoder", "bias", "scale")}
    assert 0 <= (sent + 4095 - skipped) - about["steps"] * batch < batch, "each row is learnt from once, or was skipped"
    cosines = (data.directions @ decoder.T).max(1)
    assert (cosines > 0.9).mean() >= 0.9, np.sort(cosines)
    fresh = data.rows(2000) / tensors["scale"]
    activations = torch.from_numpy(np.maximum((fresh - tensors["bias"]) @ tensors["encoder"].T, 0))
    largest, places = activations.topk(active)
    kept = torch.zeros_like(activations).scatter_(1, places, largest).numpy()
    unexplained = np.square(fresh - kept @ decoder - tensors["bias"]).mean() / np.square(fresh - fresh.mean(0)).mean()
    assert unexplained < next(loss for loss in losses if loss is not None) / 5
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.engine
def test_each_request_has_its_reward(installed, tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    probe = Probe.make(Site(LAYERS - 2, "post_block"), np.random.default_rng(5).standard_normal(WIDTH), 0.25)
    probe.save(tmp_path / "kind.safetensors")
    consumers = [f"reward:probe={tmp_path / 'kind.safetensors'}", f"filesystem:root={tmp_path / 'rows'}"]
    lengths, tokens = (5, 1, 40, 17), (6, 12, 1, 30)
    with engine(tiny, consumers=consumers) as llm:
        params = [
            capflow.sampling_params(id=f"r{n}", **(GREEDY | {"max_tokens": count})) for n, count in enumerate(tokens)
        ]
        outputs = llm.generate(prompts(lengths), params, use_tqdm=False)
        several = capflow.sampling_params(id="n", n=3, max_tokens=9, temperature=1.0, ignore_eos=True, detokenize=False)
        (samples,) = llm.generate(prompts([7]), several, use_tqdm=False)
    rows = capflow.open(tmp_path / "rows")

    def expected(request):
        captured = rows[request][probe.site]
        generated = np.asarray(captured.rows)[captured.positions >= rows[request].prompt_length].astype(np.float64)
        return {"reward": float((generated @ probe.weight[0] + 0.25).mean()), "tokens": len(generated)}

    for number, (output, count) in enumerate(zip(outputs, tokens, strict=True)):
        result = output.capture_results["reward"]
        if count == 1:  # the one token was never an input
            assert (result.status, result.payload) == ("error", {})
            continue
        assert result.status == "ok"
        assert result.payload == pytest.approx(expected(f"r{number}"), rel=1e-5)
        assert result.payload["tokens"] == count - 1
    result = samples.capture_results["reward"]
    assert sorted(result.payload) == ["n#0", "n#1", "n#2"]
    for name, payload in result.payload.items():
        assert payload == pytest.approx(expected(name), rel=1e-5)
    assert len({payload["reward"] for payload in result.payload.values()}) == 3
