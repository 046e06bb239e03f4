"""The server that pages may use: its address, its key, and who may name one."""

from __future__ import annotations

import pytest

from capflow.errors import UsageError
from capflow_dashboard.access import KEY_VARIABLE, read_key
from capflow_dashboard.again.address import CompletionServer
from capflow_dashboard.consumer import Dashboard, DashboardConfig
from tests.kit.dashboards import CountingContext, dashboard


@pytest.mark.parametrize(
    ("text", "url", "host", "port", "path"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("http://h/v1", "http://h", "h", 80, ""),
        ("https://h/v1/", "https://h", "h", 443, ""),
        ("https://h:444/behind/v1", "https://h:444/behind", "h", 444, "/behind"),
        ("http://[::1]:8000", "http://[::1]:8000", "::1", 8000, ""),
    ],
)
def test_an_address_is_read(text, url, host, port, path):
    server = CompletionServer.parse(text, "secret", where="server")
    assert (server.url, server.host, server.port, server.path) == (url, host, port, path)
    assert "secret" not in repr(server)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:8000",
        "ftp://h",
        "file:///etc/passwd",
        "http://",
        "http://:80",
        "http://h:0",
        "http://h:99999",
        "http://h?x=1",
        "http://h/#x",
        "http://h/a b",
        "http://h\r\nX: y",
        "http://hö",
        "http://[::1",
    ],
)
def test_what_is_no_address_is_refused_before_anything_starts(text):
    with pytest.raises(UsageError, match=r"consumers.dashboard.server: got .*expected an address such as http://127"):
        Dashboard(DashboardConfig(port=0, allow_steering=True, server=text)).check()


def test_a_password_in_the_address_is_not_repeated():
    with pytest.raises(UsageError, match="got a user in the address") as raised:
        CompletionServer.parse("http://me:hunter2@h", where="server")
    assert "hunter2" not in str(raised.value)


def test_it_needs_the_right_to_steer():
    with pytest.raises(UsageError, match="allow_steering: got false, with server, expected true"):
        Dashboard(DashboardConfig(port=0, server="http://h")).check()
    with pytest.raises(UsageError, match=r"dashboard.server: got none, with a server_key_file"):
        Dashboard(DashboardConfig(port=0, allow_steering=True, server_key_file="x")).check()


def test_the_key_comes_from_a_file_or_vllms_variable_and_stays_out_of_errors(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, "of-the-variable")
    assert read_key(None) == "of-the-variable"
    path = tmp_path / "key"
    path.write_text("sk-a/b+c=\n")
    path.chmod(0o640)
    with pytest.raises(
        UsageError, match=r"server_key_file: got .*, which others can read, expected a file of mode 600"
    ):
        read_key(str(path))
    path.chmod(0o600)
    assert read_key(str(path)) == "sk-a/b+c="
    path.write_text("two words")
    with pytest.raises(UsageError, match="server_key_file: got 9 characters, expected 1 to 1024 printable") as raised:
        read_key(str(path))
    assert "two" not in str(raised.value)
    with pytest.raises(UsageError, match=r"server_key_file: got nowhere: No such file .*expected a file with a key"):
        read_key("nowhere")


def test_the_process_gets_the_key_through_the_channel_and_not_by_its_environment(monkeypatch):
    from pathlib import Path

    monkeypatch.setenv(KEY_VARIABLE, "of-the-variable")
    with dashboard(allow_steering=True, server="http://127.0.0.1:9") as consumer:
        consumer.open(CountingContext())
        try:
            pid = consumer._process.pid
            for part in ("environ", "cmdline"):
                assert b"of-the-variable" not in Path(f"/proc/{pid}/{part}").read_bytes()
        finally:
            consumer.close()
