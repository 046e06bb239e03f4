"""Addresses: the default is private, the rest is checked, and one hub holds one address."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from capflow.errors import CapflowError, UsageError
from capflow.system.runtime import runtime_directory
from capflow.transport.address import check_address, default_address, held, is_local


@pytest.fixture
def runtime(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.delenv("CAPFLOW_HUB", raising=False)
        yield Path(directory)


def test_the_default_is_a_socket_that_only_its_user_reaches(runtime):
    assert default_address() == f"ipc://{runtime}/capflow/hub.sock"
    assert (runtime / "capflow").stat().st_mode & 0o777 == 0o700
    assert check_address(default_address()) == default_address()


def test_the_environment_names_another(runtime, monkeypatch):
    monkeypatch.setenv("CAPFLOW_HUB", "tcp://127.0.0.1:5000")
    assert default_address() == "tcp://127.0.0.1:5000"


def test_without_a_runtime_directory_it_lies_in_tmp(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_directory() == Path(f"/tmp/capflow-{os.getuid()}")  # noqa: S108  it is what is tested


def test_a_directory_open_to_others_is_refused(runtime):
    (runtime / "capflow").mkdir(mode=0o777)
    (runtime / "capflow").chmod(0o755)
    with pytest.raises(CapflowError, match=r"got mode drwxr-xr-x of user \d+, expected drwx------"):
        runtime_directory()


def test_a_link_in_its_place_is_refused(runtime):
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "capflow").symlink_to(runtime / "elsewhere")
    with pytest.raises(CapflowError, match="got mode lrwx"):
        runtime_directory()


def test_a_file_in_its_place_is_refused(runtime):
    (runtime / "capflow").touch()
    with pytest.raises(CapflowError):
        runtime_directory()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a directory away")
def test_a_directory_of_another_user_is_refused(runtime):
    (runtime / "capflow").mkdir(mode=0o700)
    os.chown(runtime / "capflow", 12345, 12345)
    with pytest.raises(CapflowError, match="of user 12345"):
        runtime_directory()


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5000", "tcp://localhost:1", "tcp://[::1]:5000", "tcp://127.0.0.1:0", "ipc:///tmp/x.sock"],
)
def test_what_only_this_machine_reaches_is_taken(address):
    assert check_address(address) == address
    assert is_local(address)


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:5000", "tcp://*:5000", "tcp://10.0.0.1:5000", "tcp://hub.example:5000", "tcp://[::]:5000"],
)
def test_what_others_reach_is_taken_only_when_insecure(address):
    with pytest.raises(UsageError, match=r"expected a loopback or ipc address, or keys; .*--insecure allows that"):
        check_address(address)
    assert check_address(address, insecure=True) == address
    assert not is_local(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "hub",
        "http://127.0.0.1:5000",
        "inproc://x",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:http",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://:5000",
        "tcp://user@127.0.0.1:5000",
        "tcp://127.0.0.1;1.2.3.4:5000",
        "ipc://",
        "ipc://relative.sock",
        "ipc://@abstract",
        "ipc:///no/such/directory/hub.sock",
        "ipc:///tmp",
        "ipc:///tmp/" + "x" * 200,
    ],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UsageError, match="--address: got"):
        check_address(address, insecure=True, where="--address")


def test_an_address_is_held_once(tmp_path):
    address = f"ipc://{tmp_path}/h"
    in_use = f"address {address} is in use; stop the hub"
    with held(address), pytest.raises(CapflowError, match=in_use), held(address):
        pass
    with held(address):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_a_killed_hub_left_is_free(tmp_path):
    (tmp_path / "h.lock").touch()
    with held(f"ipc://{tmp_path}/h"):
        pass


def test_a_link_where_the_lock_should_be_is_refused(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "h.lock").symlink_to(tmp_path / "target")
    with pytest.raises(CapflowError, match="cannot listen at"), held(f"ipc://{tmp_path}/h"):
        pass
