"""Keys: who may connect over TCP and do what; changes hold while everyone runs; nobody else reads a secret."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from capflow import limits
from capflow.errors import CapflowError, HubUnreachableError, UsageError
from capflow.hub.hub import Hub
from capflow.hub.peers.guard import Guard, Offences
from capflow.protocol import message
from capflow.protocol.message import Await, Hello, WatchRequest, Welcome
from capflow.steering.action import Abort, ActionApplied, Rejected
from capflow.transport.address import hub_key, is_local, with_key, without_key
from capflow.transport.client import Client
from capflow.transport.keys import AllowList, find_key, key_directory, peer_key, read_key, write_key
from capflow.transport.sockets import Dealer, Event
from capflow.transport.zap import new_key
from tests.kit.frames import make_frame, make_hello
from tests.kit.hubs import Recorder, free_port, raw_peer, running_hub, scheduler_link, worker_link
from tests.kit.keyrings import LOOPBACK, allow, keyed_hub, keys, public
from tests.kit.waiting import eventually

__all__ = ["keys"]


class TestWhoGetsIn:
    def test_an_engine_whose_key_may_capture(self, keys):
        consumer = Recorder()
        with keyed_hub(consumer) as hub:
            assert hub_key(hub.address) == public("hub")
            with worker_link(hub.address, key="gpu") as link:
                frame = make_frame()
                assert link.send(frame.header, frame.payload) is None
                eventually(lambda: consumer.rows["r1"] == 4)

    def test_the_hubs_own_key_may_everything(self, keys):
        with keyed_hub() as hub, scheduler_link(hub.address, key="hub"), Client(hub.address, key="hub") as client:
            assert client.status()["address"] == hub.address

    def test_nobody_whose_key_is_not_allowed(self, keys):
        with keyed_hub() as hub:
            expected = f"does not allow this key; on its machine: capflow keys allow {public('eve')}"
            with pytest.raises(CapflowError, match=expected):
                Client(hub.address, key="eve").status()
            with worker_link(hub.address, key="eve", wait=False) as link:
                eventually(lambda: link.refusal)
                assert expected in link.refusal
            assert hub.snapshot().sessions == 0
            assert hub.counts.protocol_errors == 0  # it never came as far as the protocol

    def test_nobody_without_a_key(self, keys):
        with keyed_hub() as hub:
            plain = without_key(hub.address)
            with pytest.raises(CapflowError, match="no key, or another one"):
                Client(plain).status()
            with raw_peer(plain) as peer:
                peer.send(message.encode(Hello("client", "", "c")))
                assert not peer.poll(500)
            assert hub.counts.protocol_errors == 0

    def test_nobody_who_takes_another_for_the_hub(self, keys):
        with (
            keyed_hub() as hub,
            pytest.raises(CapflowError, match=r"keys of the hub at .*: got no key, or another one"),
        ):
            Client(with_key(hub.address, public("eve")), key="ann").status()

    def test_nobody_when_the_hub_has_no_key_and_the_peer_expects_one(self, keys):
        with running_hub(LOOPBACK, Recorder()) as hub, pytest.raises(CapflowError, match="no key, or another one"):
            Client(with_key(hub.address, public("hub")), key="ann").status()

    def test_what_is_sent_cannot_be_read_on_the_way(self, keys):
        with keyed_hub() as hub, tapped(hub.address) as (address, seen), worker_link(address, key="gpu") as link:
            frame = make_frame([("a-secret-request", 4, 0, 4)], dtype="float32")
            link.send(frame.header, frame.payload)
            eventually(lambda: not link.counters["unacked_frames"])
            whole = b"".join(seen)
            assert len(whole) > len(frame.payload)
            assert b"a-secret-request" not in whole
            assert bytes(frame.payload) not in whole


@contextlib.contextmanager
def tapped(address):
    """Give an address that leads to the hub's, and the list of all bytes that pass."""
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = int(address.rpartition(":")[2])

        def relay():
            with contextlib.suppress(OSError):
                near, _ = server.accept()
                far = socket.create_connection(("127.0.0.1", target))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=(source, sink), daemon=True).start()

        def copy(source, sink):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    seen.append(data)
                    sink.sendall(data)

        threading.Thread(target=relay, daemon=True).start()
        yield with_key(f"tcp://127.0.0.1:{server.getsockname()[1]}", hub_key(address)), seen


class TestRights:
    def test_who_may_read_may_not_steer_nor_capture(self, keys):
        with keyed_hub() as hub, scheduler_link(hub.address, key="gpu"):
            with Client(hub.address, key="ann") as client:
                assert client.status()["sessions"]
                assert client.results(["r1"], wait=False) == {"r1": {}}
                outcome = client.act(Abort("r1"), 20)
                assert isinstance(outcome, Rejected)
                assert outcome.reason == (
                    "key ann: got the right to read, expected the right to steer; on the hub's machine: "
                    f"capflow keys allow {public('ann')} --name ann --rights read,steer"
                )
            with worker_link(hub.address, make_hello("other"), key="ann", wait=False) as link:
                eventually(lambda: link.refusal)
                assert "expected the right to capture" in link.refusal

    def test_who_may_steer_may_not_read(self, keys):
        allow(keys, "ann", "steer")
        with keyed_hub() as hub, scheduler_link(hub.address, key="gpu") as link:
            with Client(hub.address, key="ann") as client:
                thread = threading.Thread(target=apply_one, args=(link,))
                thread.start()
                assert client.act(Abort("r1"), 20).step == 3
                thread.join(20)
                with pytest.raises(CapflowError, match="expected the right to read"):
                    client.status()
            with Client(hub.address, key="ann") as client, pytest.raises(CapflowError, match="the right to read"):
                client.results(["r1"])

    def test_who_may_capture_alone_may_not_ask(self, keys):
        allow(keys, "gpu", "capture")
        with (
            keyed_hub() as hub,
            worker_link(hub.address, key="gpu"),
            pytest.raises(CapflowError, match="expected the right to read or steer"),
        ):
            Client(hub.address, key="gpu").status()

    def test_an_engine_belongs_to_the_key_that_brought_it(self, keys):
        allow(keys, "eve", "capture")
        with keyed_hub() as hub, worker_link(hub.address, key="gpu") as link:
            with worker_link(hub.address, make_hello(boot="another"), key="eve", wait=False) as other:
                eventually(lambda: other.refusal)
                assert "got another key than its other workers" in other.refusal
            assert link.connected
            assert link.reconnects == 0

    def test_a_connection_is_no_other_keys_because_it_calls_itself_so(self, keys):
        """ZMQ lets a peer choose its connection's name, also one that was another's."""
        allow(keys, "eve", "read")
        with keyed_hub() as hub:
            with named_peer(hub.address, "gpu", b"engine") as peer:
                peer.send(message.encode(make_hello()))
                assert peer.poll(20_000)
            with named_peer(hub.address, "eve", b"engine") as peer:
                peer.send_multipart(make_frame().encode())
                assert peer.poll(20_000)
                assert isinstance(message.decode(peer.recv()), message.Bye)
            assert hub.counts.frames == 0


def apply_one(link):
    acts = []
    eventually(lambda: acts.extend(link.actions()) or acts)
    link.outcome(ActionApplied(acts[0].id, 3))


@contextlib.contextmanager
def named_peer(address, key, name):
    """A raw peer with a key that chooses the name of its connection."""
    pair = read_key(find_key(key))
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.set(zmq.LINGER, 0)
    peer.set(zmq.ROUTING_ID, name)
    peer.set(zmq.CURVE_SERVERKEY, bytes.fromhex(hub_key(address)))
    peer.set(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public))
    peer.set(zmq.CURVE_SECRETKEY, bytes.fromhex(pair.secret))
    peer.connect(without_key(address))
    try:
        yield peer
    finally:
        peer.close()
        context.term()


def greet(dealer, hello):
    """Say Hello on a connection once it is made; return when the hub has let it in."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        dealer.poll(0.05)
        if Event.CONNECTED in dealer.events():
            dealer.send([message.encode(hello)])
        if (parts := dealer.receive()) is not None:
            assert isinstance(message.decode(parts[0]), Welcome)
            return
    raise AssertionError("no welcome")


class TestChangesWhileTheHubRuns:
    def test_a_key_that_is_allowed_later_gets_in_by_itself(self, keys):
        with keyed_hub() as hub, worker_link(hub.address, key="eve", wait=False) as link:
            eventually(lambda: link.refusal)
            allow(keys, "eve", "capture")
            eventually(lambda: link.connected)
            assert link.refusal is None

    def test_a_key_that_is_revoked_is_cut_off_and_stays_out(self, keys):
        consumer = Recorder()
        with keyed_hub(consumer) as hub, worker_link(hub.address, key="gpu") as link:
            with worker_link(hub.address, make_hello("other"), key="hub") as other:
                AllowList(keys).revoke("gpu")
                eventually(lambda: not link.connected)
                eventually(lambda: link.refusal)
                assert "not allowed" in link.refusal or "does not allow" in link.refusal
                assert other.connected
            with pytest.raises(CapflowError, match="does not allow"):
                Client(hub.address, key="gpu").status()
            assert hub.counts.frames == 0

    @pytest.mark.parametrize("role", ["worker", "scheduler", "client"])
    def test_the_connection_of_a_revoked_key_is_closed_within_a_second(self, keys, role):
        """It says nothing after its Hello, so that nothing of it could be refused."""
        allow(keys, "gpu", "capture", "read", "steer")
        with keyed_hub() as hub, closing(Dealer(hub.address, key=read_key(find_key("gpu")))) as dealer:
            hello = make_hello(role=role) if role != "client" else Hello("client", "", "c")
            greet(dealer, hello)
            assert hub.snapshot().sessions == 1
            AllowList(keys).revoke("gpu")
            began = time.monotonic()
            while Event.DISCONNECTED not in dealer.events():
                assert time.monotonic() - began < 5
                dealer.poll(0.05)
            assert time.monotonic() - began < 1.5  # a second, and what a busy machine adds
            assert hub.snapshot().sessions == 0

    def test_a_tap_whose_key_is_revoked_hears_no_more_frames(self, keys):
        with (
            keyed_hub() as hub,
            worker_link(hub.address, key="gpu") as link,
            closing(Dealer(hub.address, key=read_key(find_key("ann")), message_bytes_max=2**20)) as tap,
        ):
            greet(tap, Hello("client", "", "c"))
            tap.send([message.encode(WatchRequest(limits.TAP_BYTES_MAX))])
            eventually(lambda: len(hub.watchers) == 1)
            frame = make_frame()
            assert link.send(frame.header, frame.payload) is None
            eventually(lambda: hub.watchers.frames == 1)
            AllowList(keys).revoke("ann")
            eventually(lambda: not len(hub.watchers))
            assert link.send(frame.header, frame.payload) is None
            eventually(lambda: hub.counts.frames == 2)
            assert hub.watchers.frames == 1

    def test_a_scheduler_whose_key_is_revoked_is_sent_no_action(self, keys):
        allow(keys, "ann", "read", "steer")
        with (
            keyed_hub() as hub,
            closing(Dealer(hub.address, key=read_key(find_key("gpu")))) as scheduler,
            Client(hub.address, key="ann") as client,
        ):
            greet(scheduler, make_hello(role="scheduler"))
            assert client.status()
            AllowList(keys).revoke("gpu")
            eventually(lambda: hub.snapshot().engines == 0)
            outcome = client.act(Abort("r1"), timeout=20)
            assert isinstance(outcome, Rejected)
            assert "no engine is connected" in outcome.reason

    def test_a_right_that_is_given_back_lets_a_peer_in_again(self, keys, monkeypatch):
        monkeypatch.setattr(limits, "HANDSHAKE_S_MAX", 0.5)
        with keyed_hub() as hub, worker_link(hub.address, key="gpu") as link:
            allow(keys, "gpu", "read")
            eventually(lambda: link.refusal)
            assert not link.connected
            allow(keys, "gpu", "capture")
            eventually(lambda: link.connected)

    def test_who_may_read_no_more_is_told_no_result(self, keys):
        with keyed_hub() as hub, closing(Dealer(hub.address, key=read_key(find_key("ann")))) as client:
            greet(client, Hello("client", "", "c"))
            client.send([message.encode(Await(("r1",)))])
            eventually(lambda: len(hub._exchange.answers._waiters._clients) == 1)
            allow(keys, "ann", "steer")
            eventually(lambda: hub.snapshot().sessions == 0)
            assert not hub._exchange.answers._waiters._clients

    def test_a_hub_with_a_new_key_takes_the_old_ones_peers(self, keys):
        with keyed_hub() as hub, Client(hub.address, key="ann") as client:
            assert client.status()
        write_key(keys, "hub2", new_key())
        with running_hub(LOOPBACK, Recorder(), key="hub2") as hub, Client(hub.address, key="ann") as client:
            assert client.status()


class TestAllowList:
    def test_lines_that_are_none_allow_nobody(self, keys, caplog):
        path = keys / "allowed"
        path.write_text(path.read_text() + f"\n# a comment\n{public('eve')} read,everything eve\nnonsense\n")
        listed = AllowList(keys)
        assert {entry.name for entry in listed.entries()} == {"gpu", "ann"}
        assert caplog.text.count("it allows nobody") == 2

    def test_one_that_others_can_write_allows_nobody(self, keys, caplog):
        listed = AllowList(keys)
        assert listed.entries()
        (keys / "allowed").chmod(0o622)
        assert listed.entries() == []
        assert "nobody may connect" in caplog.text
        assert f"chmod 600 {keys / 'allowed'}" in caplog.text

    def test_one_that_is_gone_allows_nobody(self, keys, caplog):
        listed = AllowList(keys)
        assert listed.entries()
        (keys / "allowed").unlink()
        listed.refresh()
        assert listed.find(public("gpu")) is None

    def test_changed_by_many_at_once_loses_none(self, keys):
        pairs = [new_key() for _ in range(20)]
        threads = [
            threading.Thread(target=AllowList(keys).allow, args=(pair.public, ["read"], f"many-{number}"))
            for number, pair in enumerate(pairs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {pair.public for pair in pairs} < {entry.public for entry in AllowList(keys).entries()}

    def test_a_name_is_one_keys(self, keys):
        with pytest.raises(UsageError, match="ann, which another key has"):
            AllowList(keys).allow(public("eve"), ["read"], "ann")
        with pytest.raises(UsageError, match="one that is allowed: ann, gpu"):
            AllowList(keys).revoke("nobody")


class TestFiles:
    def test_are_for_their_owner_alone_whatever_the_umask(self, keys):
        before = os.umask(0)
        try:
            write_key(keys, "open", new_key())
            AllowList(keys).allow(public("eve"), ["read"], "eve")
        finally:
            os.umask(before)
        assert (keys / "open.key").stat().st_mode & 0o777 == 0o600
        assert (keys / "allowed").stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
    def test_that_others_can_read_are_refused(self, keys, mode):
        path = keys / "gpu.key"
        path.chmod(mode)
        with pytest.raises(UsageError, match=rf"expected -rw-------; run: chmod 600 {path}") as error:
            read_key(path)
        assert "\n" not in str(error.value)

    def test_in_a_directory_that_others_can_enter_are_refused(self, keys):
        keys.chmod(0o750)
        with pytest.raises(UsageError, match=rf"got drwxr-x---, expected drwx------; run: chmod 700 {keys}"):
            read_key(keys / "gpu.key")

    def test_are_not_written_over(self, keys):
        before = (keys / "gpu.key").read_text()
        with pytest.raises(UsageError, match="a file that exists"):
            write_key(keys, "gpu", new_key())
        assert (keys / "gpu.key").read_text() == before

    @pytest.mark.parametrize("text", ["", "public x\nsecret y\n", "\0" * 100, "secret " + "0" * 64])
    def test_that_are_no_keys_are_refused(self, keys, text):
        (keys / "gpu.key").write_text(text)
        with pytest.raises(UsageError, match="a file that `capflow keys new` made"):
            read_key(keys / "gpu.key")

    @pytest.mark.parametrize("name", ["../evil", ".hidden", "a b", "x" * 65, ""])
    def test_have_names_that_are_names(self, keys, name):
        with pytest.raises(UsageError):
            write_key(keys, name, new_key())

    def test_a_secret_is_not_shown(self, keys):
        pair = read_key(keys / "gpu.key")
        assert pair.secret not in repr(pair)
        assert pair.secret not in str(Hub(LOOPBACK, [], key="gpu").__dict__)

    def test_a_key_is_what_zmq_takes_it_for(self):
        pair = new_key()
        derived = zmq.utils.z85.decode(zmq.curve_public(zmq.utils.z85.encode(bytes.fromhex(pair.secret))))
        assert derived.hex() == pair.public


class TestWhatIsNamed:
    def test_a_hub_with_a_key_needs_one_of_its_peers(self, keys, monkeypatch):
        address = with_key("tcp://10.0.0.1:9000", "ab" * 32)
        with pytest.raises(UsageError, match="--key: got none, expected a key"):
            peer_key(address, None)
        monkeypatch.setenv("CAPFLOW_KEY", "ann")
        assert peer_key(address, None).public == public("ann")
        assert peer_key(address, str(keys / "gpu.key")).public == public("gpu")
        assert peer_key("tcp://127.0.0.1:9000", None) is None  # the variable is for hubs that have keys
        with pytest.raises(UsageError, match=r"--key: got .*no-such.key: No such file"):
            peer_key(address, "no-such")

    def test_a_key_for_a_hub_that_has_none_is_refused(self, keys):
        with pytest.raises(UsageError, match="expected an address with the hub's key"):
            Client("tcp://127.0.0.1:9000", key="ann")

    @pytest.mark.parametrize("address", ["ipc:///tmp/x.sock", f"tcp://{'ab' * 32}@127.0.0.1:0"])
    def test_a_hub_takes_a_key_for_tcp_alone(self, keys, address):
        with pytest.raises(UsageError, match="address to listen at"):
            Hub(address, [], key="hub")

    def test_off_loopback_a_key_is_enough(self, keys):
        with running_hub("tcp://0.0.0.0:0", Recorder(), key="hub") as hub:
            assert not is_local(hub.address)
            address = hub.address.replace("0.0.0.0", "127.0.0.1")
            with Client(address, key="hub") as client:
                assert client.status()
        with pytest.raises(UsageError, match="--insecure allows that"):
            Hub("tcp://0.0.0.0:0", [])
        with pytest.raises(UsageError, match="--insecure allows that"):
            Client("tcp://10.0.0.1:9000")


class TestOffences:
    def test_a_few_are_borne_and_many_are_not(self):
        offences = Offences()
        for count in range(1, limits.OFFENCES_MAX + 1):
            assert not offences.ignored("a", 0.0)
            assert offences.note("a", 0.0) == count
        assert offences.ignored("a", limits.IGNORED_S - 0.1)
        assert not offences.ignored("a", limits.IGNORED_S)
        assert not offences.ignored("b", 0.0)
        assert offences.note("a", limits.IGNORED_S) == 1  # counting starts from zero

    def test_are_forgotten_with_time(self):
        offences = Offences()
        for count in range(3 * limits.OFFENCES_MAX):
            now = count * limits.OFFENCE_WINDOW_S
            offences.note("a", now)
            assert not offences.ignored("a", now)

    def test_of_how_many_is_bounded(self):
        offences = Offences()
        for number in range(limits.SESSIONS_MAX + 10):
            offences.note(str(number), 0.0)
        assert len(offences._offenders) == limits.SESSIONS_MAX


def test_a_guard_without_keys_lets_nobody_steer_off_loopback():
    assert Guard().refusal("", "steer") is None
    assert Guard(local=False).refusal("", "read") is None
    assert Guard(local=False).refusal("", "read", "steer") is None
    assert "actions are off" in Guard(local=False).refusal("", "steer")


def test_nothing_answers_where_nobody_listens(keys):
    with pytest.raises(HubUnreachableError):
        Client(with_key(f"tcp://127.0.0.1:{free_port()}", public("hub")), timeout=0.2, key="ann").status()


def test_a_dealer_that_is_not_allowed_is_told(keys):
    with keyed_hub() as hub, contextlib.closing(Dealer(hub.address, key=read_key(find_key("eve")))) as dealer:
        seen = []
        eventually(lambda: (dealer.poll(0.1), seen.extend(dealer.events()), Event.DISCONNECTED in seen)[-1])
        assert Event.NOT_ALLOWED in seen


def test_the_command(keys, tmp_path):
    def capflow(*arguments, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "capflow", *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    made = capflow("keys", "new", "bob").strip()
    assert made == public("bob")
    assert capflow("keys", "allow", made, "--name", "bob", "--rights", "read,steer") == "bob may read, steer\n"
    listed = capflow("keys", "list")
    assert f"bob  {made}  read,steer" in listed
    assert read_key(keys / "bob.key").secret not in listed
    assert "bob may no longer connect" in capflow("keys", "revoke", "bob")
    assert "read,steer" not in capflow("keys", "list")
    assert "a file that exists" in capflow("keys", "new", "bob", code=2)
    assert "--rights: got all, expected some of capture,read,steer" in capflow(
        "keys", "allow", made, "--rights", "all", code=2
    )
    (keys / "bob.key").chmod(0o644)
    address = with_key("tcp://127.0.0.1:1", public("hub"))
    assert "run: chmod 600" in capflow("status", "--address", address, "--key", "bob", code=2)
    elsewhere = Path(tmp_path / "elsewhere")
    capflow("keys", "new", "carl", "--dir", str(elsewhere))
    assert elsewhere.stat().st_mode & 0o777 == 0o700


def test_a_place_that_cannot_be_written_is_told_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CapflowError, match=r"directory of keys .*: got .*, expected one that can be made; set XDG_"):
        key_directory(tmp_path / "file" / "keys")
    with pytest.raises(CapflowError, match=r"key .*: got .*, expected a file that can be written; check the room"):
        write_key(tmp_path / "nowhere", "me", new_key())
