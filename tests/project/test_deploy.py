"""The files of examples/deploy: each command is one that runs, and Kubernetes would take the manifests."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from capflow.cli.engine.run import run
from capflow.serve_options import engine_options
from capflow.transport.client import Client
from capflow_engine.hubs import hubs_at
from tests.kit.servers import environment
from tests.kit.sources import ROOT

DEPLOY = ROOT / "examples" / "deploy"
MANIFESTS = [
    document for name in ("hubs.yaml", "engine.yaml") for document in yaml.safe_load_all((DEPLOY / name).read_text())
]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PODS = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in MANIFESTS if "template" in one["spec"]}
COMMANDS = {
    **{f"pod {name}": pod["containers"][0]["command"] for name, pod in PODS.items()},
    **{f"compose {name}": service["command"] for name, service in COMPOSE["services"].items()},
}
ENVIRONMENTS = {
    **{
        f"pod {name}": {one["name"]: one["value"] for one in pod["containers"][0]["env"] if "value" in one}
        for name, pod in PODS.items()
    },
    **{f"compose {name}": service["environment"] for name, service in COMPOSE["services"].items()},
}


def capflow(*arguments, home):
    return subprocess.run(
        [sys.executable, "-m", "capflow", *arguments], env=home, capture_output=True, text=True, check=True, timeout=60
    )


@pytest.fixture
def made(tmp_path):
    """The keys, as the page makes them; return the hub's public key."""
    homes = {name: environment(tmp_path / name, XDG_CONFIG_HOME=str(tmp_path / name)) for name in ("hub", "engine")}
    public = capflow("keys", "new", "hub", home=homes["hub"]).stdout.strip()
    engine = capflow("keys", "new", "engine", home=homes["engine"]).stdout.strip()
    capflow("keys", "allow", engine, "--name", "engine", "--rights", "capture,read", home=homes["hub"])
    return public


def installed(pod, secret, directory):
    """Run the init container of a pod on the files of a secret; return where the keys are."""
    script = pod["initContainers"][0]["command"][2]
    script = script.replace("/secret", str(secret)).replace("/keys", str(directory))
    subprocess.run(["sh", "-c", script], check=True)
    return directory / "own"


@pytest.mark.parametrize("name", ["pod hub", "compose hub-0"])
def test_a_hub_starts_as_the_files_say_and_admits_the_engines_key(made, tmp_path, name):
    public = made
    secret = tmp_path / "hub" / "capflow" / "keys"
    # A mounted secret can be read by its group.
    mounted = shutil.copytree(secret, tmp_path / "mounted")
    for path in mounted.iterdir():
        path.chmod(0o640)
    keys = secret if name.startswith("compose") else installed(PODS["hub"], mounted, tmp_path / "keys")
    # Port 0: one that is free.
    places = {"0.0.0.0:7000": "127.0.0.1:0", "0.0.0.0:9400": "127.0.0.1:0"}
    places |= {"/keys/own": str(keys), "/keys": str(keys), "/state": str(tmp_path / "state")}
    command = [_replaced(word, places) for word in COMMANDS[name]]
    home = {variable: _replaced(value, places) for variable, value in ENVIRONMENTS[name].items()}
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        env=environment(tmp_path / "home", **home),
        stderr=subprocess.PIPE,
        text=True,
    ) as hub:
        try:
            listening = re.search(r"listening at (tcp://[\w@.]+:\d+)", hub.stderr.readline())
            assert listening is not None
            assert f"//{public}@" in listening[1]
            key = tmp_path / "engine" / "capflow" / "keys" / "engine.key"
            with Client(listening[1], 20, key=str(key)) as client:
                assert list(client.status()["consumers"]) == ["filesystem"]
        finally:
            hub.terminate()
            hub.communicate(timeout=60)
        assert hub.returncode in (0, 143)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_one_of_the_command(name):
    program, command, *arguments = COMMANDS[name]
    assert program == "capflow"
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    if command == "run":
        assert set(options) <= {flag for option in run.params for flag in option.opts}
    else:
        assert command == "serve"
        _, vllms = engine_options().parse_known_args(arguments)
        assert [word.partition("=")[0] for word in vllms if word.startswith("--")] == ["--host", "--port"]


IMAGES = dict(
    re.findall(r"AS (\w+)\n.*?pip install \S+ '/src\[(.*?)\]'", (DEPLOY / "Dockerfile").read_text(), re.DOTALL)
)
"""The extras of each image."""


def test_each_image_is_built_from_the_checkout():
    """The `capflow` of PyPI is another project."""
    text = (DEPLOY / "Dockerfile").read_text()
    assert len(re.findall("pip install", text)) == len(IMAGES) == 2
    builds = {service["build"]["target"]: service["build"] for service in COMPOSE["services"].values()}
    assert builds.keys() == IMAGES.keys()
    for build in builds.values():
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]) == DEPLOY / "Dockerfile"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_image_has_what_its_command_needs(name):
    words = COMMANDS[name]
    given = IMAGES["hub" if words[1] == "run" else "engine"].split(",")
    needed = {"metrics": "--metrics-address", "files": "--consumer=filesystem", "grpc": "--grpc-port"}
    assert {extra for extra, option in needed.items() if any(word.startswith(option) for word in words)} <= {*given}


@pytest.mark.parametrize("name", ["pod engine", "compose engine"])
def test_the_hubs_of_an_engine_are_services(made, tmp_path, name):
    public = made
    key = tmp_path / "engine" / "capflow" / "keys" / "engine.key"
    words = [re.sub(r"\$\(HUB\)|\$\{HUB[^}]*\}", public, word) for word in COMMANDS[name]]
    given, _ = engine_options().parse_known_args(words[2:])
    hubs = hubs_at(given.hub, str(key), spares=given.spare_hub)
    names = [re.search("@(.*):7000", hub.address)[1] for hub in hubs]
    assert len(names) == len(given.hub) + 1
    if name == "compose engine":
        assert names == [service for service in COMPOSE["services"] if service.startswith("hub-")]
        return
    (hub,) = (one for one in MANIFESTS if one["kind"] == "StatefulSet")
    (service,) = (
        one for one in MANIFESTS if one["metadata"]["name"] == hub["spec"]["serviceName"] and "clusterIP" in one["spec"]
    )
    assert names == [
        f"{hub['metadata']['name']}-{n}.{service['metadata']['name']}" for n in range(hub["spec"]["replicas"] + 1)
    ]
    assert service["spec"]["selector"] == hub["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("name", sorted(PODS))
def test_a_pod_has_every_volume_port_and_second_that_it_names(name):
    pod = PODS[name]
    claims = [one["metadata"]["name"] for one in _set_of(name).get("volumeClaimTemplates", ())]
    volumes = {*claims, *(volume["name"] for volume in pod["volumes"])}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    (main,) = pod["containers"]
    ports = {port["name"] for port in main["ports"]}
    assert {main[probe]["httpGet"]["port"] for probe in main if probe.endswith("Probe")} <= ports
    ends = [word for word in main["command"] if re.match("--(handover-s|drain-s|shutdown)", word)]
    assert ends
    assert pod["terminationGracePeriodSeconds"] > sum(float(word.partition("=")[2]) for word in ends)


@pytest.mark.long
@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_kubernetes_takes_the_manifests(version):
    import kubernetes_validate

    for document in MANIFESTS:
        kubernetes_validate.validate(document, version, strict=True)
    wrong = copy.deepcopy(MANIFESTS[-1])
    wrong["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def _set_of(name):
    (spec,) = (one["spec"] for one in MANIFESTS if one["metadata"]["name"] == name and "template" in one["spec"])
    return spec


def _replaced(word, places):
    for place, local in places.items():
        # Each place once: a replacement may hold another place.
        if place in word:
            return word.replace(place, local)
    return word
