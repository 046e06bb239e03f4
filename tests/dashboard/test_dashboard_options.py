"""The dashboard's options, its token and its link."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from capflow.capture.frame import Dropped
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.plugins.configure import configure, load_plugins
from capflow.probes.probe import Probe
from capflow_dashboard import limits
from capflow_dashboard.access import TOKEN_VARIABLE
from capflow_dashboard.consumer import Dashboard, DashboardConfig
from tests.kit.checked import checked
from tests.kit.dashboards import context, open_dashboard, served_near
from tests.kit.frames import make_model


def done(request, *, dropped=()):
    return RequestDone("engine-1", request, "stop", 4, 6, 24, 24, tuple(dropped))


def test_the_plugin_brings_it_and_its_options_are_as_described():
    plugins = load_plugins()
    made = configure("dashboard", {"port": "0", "layers": "0+2", "probes": ""}, plugins)
    assert isinstance(made.consumer, Dashboard)
    assert made.policy.value == "skip"
    assert made.queue_bytes_max == limits.QUEUE_BYTES
    assert made.consumer.spec().hooks == {"post_block": [0, 2]}
    assert configure("dashboard", {"port": "0", "layers": "3"}, plugins).consumer.spec().hooks == {"post_block": [3]}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("host", "0.0.0.0", "host: got 0.0.0.0, expected one of 127.0.0.1, ::1, localhost; reach it from elsewhere"),
        ("host", "192.168.1.2", "host: got 192.168.1.2, expected"),
        ("lens", "none.safetensors", "lens: none.safetensors: got no such file, expected a lens file"),
        ("port", 70_000, "port: got 70000, expected 0..65535; remove it"),
        ("port", -1, "port: got -1, expected 0..65535"),
        ("requests_max", 0, "requests_max: got 0, expected 1..65536"),
        ("tokens_max", 15, "tokens_max: got 15, expected 16..131072"),
        ("token_file", "nowhere", "token_file: got nowhere: No such file or directory, expected a file with a token"),
        ("token_file", "/dev/null", "token_file: got /dev/null: Not a regular file, expected a file with a token"),
        ("hook", "nowhere", "hooks: got nowhere, expected a hook"),
        ("positions", "some", "positions: got some, expected one of"),
        ("layers", "most", 'layers: got most, expected "all", layer numbers'),
    ],
)
def test_options_are_checked(option, value, message):
    with pytest.raises(UsageError) as raised:
        checked(Dashboard(DashboardConfig(**({"port": 0} | {option: value}))))
    assert f"consumers.dashboard.{message}" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("short-secret", 0o600, "got 12 characters, expected 16 to 256 letters"),
        ("a/secret?c&d=0123456789", 0o600, "got 23 characters, expected 16 to 256 letters"),
        ("secret" * 50, 0o600, "got 300 characters, expected 16 to 256 letters"),
        ("secret" * 1000, 0o600, "File too large, expected a file with a token"),
        ("secret" * 3, 0o640, "which others can read, expected a file of mode 600; chmod 600 "),
        ("sécret" * 3, 0o600, "got 21 characters, expected 16 to 256 letters"),
    ],
)
def test_a_token_that_is_none_is_not_repeated_in_the_error(tmp_path, text, mode, message):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UsageError) as raised:
        Dashboard(DashboardConfig(port=0, token_file=str(path))).check()
    assert message in str(raised.value)
    assert "ecret" not in str(raised.value).replace(str(path), "")


def test_a_token_comes_from_a_file_or_from_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("from-the-file-16\n")
    path.chmod(0o600)
    monkeypatch.setenv(TOKEN_VARIABLE, "from-the-variable")
    with open_dashboard() as consumer:
        assert consumer.link == f"{consumer.address}#token=from-the-variable"
    with open_dashboard(token_file=str(path)) as consumer:
        assert consumer.link == f"{consumer.address}#token=from-the-file-16"
    monkeypatch.setenv(TOKEN_VARIABLE, "secret!")
    with pytest.raises(UsageError, match="CAPFLOW_DASHBOARD_TOKEN: got 7 characters") as raised:
        Dashboard(DashboardConfig(port=0)).check()
    assert "secret" not in str(raised.value)


def test_probes_are_read_and_their_sites_asked_for(tmp_path):
    Probe.make(Site(2, "mlp_in"), np.ones(8), names=("a",)).save(tmp_path / "a.safetensors")
    Probe.make(Site(3, "post_block"), np.ones(8), names=("b",)).save(tmp_path / "b.safetensors")
    paths = [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    assert Dashboard(DashboardConfig(probes=paths)).spec().hooks == {"post_block": "all", "mlp_in": [2]}
    assert Dashboard(DashboardConfig(probes=paths, layers="0-1")).spec().hooks == {
        "post_block": [3, "0-1"],
        "mlp_in": [2],
    }
    assert Dashboard(DashboardConfig(probes=paths, layers=[0])).spec().hooks == {"post_block": [0, 3], "mlp_in": [2]}
    with pytest.raises(UsageError, match="probes: got a twice, expected different names"):
        checked(Dashboard(DashboardConfig(port=0, probes=[paths[0], paths[0]])))
    with pytest.raises(UsageError, match="no such file"):
        checked(Dashboard(DashboardConfig(port=0, probes=("nowhere.safetensors",))))


@pytest.mark.parametrize("near", [True, False])
def test_a_port_in_use_is_one_line_before_anything_starts(near):
    with socket.create_server(("127.0.0.1", 0)) as taken, served_near() if near else contextlib.nullcontext():
        port = taken.getsockname()[1]
        consumer = Dashboard(DashboardConfig(port=port))
        for attempt in (consumer.check, lambda: consumer.open(context())):
            with pytest.raises(UsageError) as raised:
                attempt()
            assert str(raised.value) == (
                f"consumers.dashboard.port: got {port}, in use, expected a free port; "
                "end the program that uses it, or use port=0 for any free port"
            )


def test_the_address_is_known_once_open_and_the_port_free_once_closed():
    with open_dashboard(host="localhost", near=False) as consumer:
        parts = urlsplit(consumer.link)
        assert parts.hostname == "localhost"
        assert len(parts.fragment) > len("token=") + 20
        port = parts.port
    Dashboard(DashboardConfig(port=port)).check()


def test_each_start_has_a_token_of_its_own_and_a_restart_keeps_it():
    with open_dashboard() as one, open_dashboard() as other:
        assert urlsplit(one.link).fragment != urlsplit(other.link).fragment
        before = urlsplit(one.link).fragment
        one.close()
        one.open(context())
        assert urlsplit(one.link).fragment == before


def test_the_link_stands_in_a_private_file_while_the_dashboard_runs():
    with open_dashboard() as consumer:
        path = Path(consumer.link_file)
        assert path.stat().st_mode & 0o777 == 0o600
        assert f'url={consumer.link}"' in path.read_text()
    assert not path.exists()


def test_it_asks_nothing_of_requests_that_ask_for_other_rows():
    assert Dashboard.reads_requests is False


def test_results_name_the_address_and_keep_the_token_to_themselves():
    with open_dashboard() as consumer:
        consumer.on_session("engine-1", make_model())
        result = consumer.on_request_done(done("r1"))
        assert result.status == "ok"
        assert result.payload == {"address": f"http://{urlsplit(consumer.link).netloc}/"}
        assert consumer.on_request_done(done("r2", dropped=[Dropped(1, "x")])).status == "partial_error"
