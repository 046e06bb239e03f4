"""The gRPC server of an API server without an engine: rights, limits, and the steering service."""

import asyncio
import datetime as dt
import ipaddress
import re
import socket
import ssl

import pytest

pytest.importorskip("vllm")

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from capflow import limits
from capflow.errors import UsageError
from capflow_engine.serve.api_keys import Keys
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc import port
from capflow_engine.serve.rpc.capflow_pb2_grpc import GenerateStub, SteeringStub
from capflow_engine.serve.rpc.server import served
from tests.kit.apps import LIMIT, WIDTH, server
from tests.kit.hubs import free_port

VECTOR = [1.0] * WIDTH
ONE = {"post_block": {"layers": {1: {"vectors": [{"vector": VECTOR}]}}}}
CHANGES = [
    ("Set", pb.SetRequest(vectors=ONE)),
    ("Clear", pb.ClearRequest()),
    ("RegisterModule", pb.RegisterModuleRequest(name="one", vectors=ONE)),
    ("UnregisterModule", pb.UnregisterModuleRequest(name="one")),
]
READS = [("Get", pb.GetRequest()), ("Layers", pb.LayersRequest()), ("ListModules", pb.ListModulesRequest())]


def calls(client, ask, *, credentials=None):
    """Serve gRPC beside an app, and return what a coroutine makes of a channel to it."""

    async def run():
        address = port.address("127.0.0.1", free_port())
        async with served(client.app.state, client.app.state.capflow, address):
            secure = credentials and grpc.aio.secure_channel(address, credentials)
            async with secure or grpc.aio.insecure_channel(address) as channel:
                channel.address = address
                return await ask(channel)

    return asyncio.run(run())


async def code_of(call):
    """Return the status of a call, what it says, and the field that it names."""
    try:
        await call
    except grpc.aio.AioRpcError as e:
        return e.code(), e.details(), dict(e.trailing_metadata()).get("field")
    return grpc.StatusCode.OK, "", None


def test_what_is_changed_over_grpc_is_what_http_says(tmp_path):
    client = server(tmp_path)

    async def ask(channel):
        steering = SteeringStub(channel)
        clamps = {
            "post_block": {"layers": {2: {"clamps": [{"vector": VECTOR, "max": 1}, {"vector": VECTOR, "value": 0}]}}}
        }
        done = await steering.Set(pb.SetRequest(vectors=ONE, decode_clamps=clamps))
        assert (list(done.hook_points), list(done.layers_updated)) == (["post_block"], [1, 2])
        state = await steering.Get(pb.GetRequest())
        http = client.get("/v1/steering").json()
        assert (
            (state.active, state.key, state.generation)
            == (True, done.key, 1)
            == (True, http["key"], http["generation"])
        )
        assert dict(state.global_state.base.vectors) == {"post_block:1": pytest.approx(WIDTH**0.5)}
        assert dict(state.global_state.decode.clamps) == {"post_block:2": 2}
        named = await steering.RegisterModule(pb.RegisterModuleRequest(name="a/b", decode_vectors=ONE))
        assert (named.name, list(named.modules)) == ("a/b", ["a/b"])
        listed = await steering.ListModules(pb.ListModulesRequest())
        assert list(listed.modules["a/b"].decode.vectors) == ["post_block:1"]
        assert client.get("/v1/steering/modules").json()["modules"] == ["a/b"]
        forgotten = await steering.UnregisterModule(pb.UnregisterModuleRequest(name="a/b"))
        assert not forgotten.modules
        await steering.Set(pb.SetRequest(prefill_vectors=ONE, replace=True))
        assert client.get("/v1/steering").json()["global"]["base"]["vectors"] == {}
        await steering.Clear(pb.ClearRequest())
        assert (await steering.Get(pb.GetRequest())).key == "none" == client.get("/v1/steering").json()["key"]
        layers = await steering.Layers(pb.LayersRequest())
        assert list(layers.layers[2].hook_points) == ["post_block"]
        assert (list(layers.sites), layers.num_layers, layers.hidden_size, layers.dtype) == (
            [f"post_block:{n}" for n in range(3)], 4, WIDTH, "float32",
        )  # fmt: skip

    calls(client, ask)


INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
WRONG = {"post_block": {"layers": {1: {"vectors": [{"vector": [float("nan")] * WIDTH}]}}}}
SHORT = {"post_block": {"layers": {1: {"vectors": [{"vector": [1.0]}]}}}}


@pytest.mark.parametrize(
    ("method", "request_", "code", "field"),
    [
        ("Set", pb.SetRequest(vectors=SHORT), INVALID, "vectors.post_block.1"),
        ("Set", pb.SetRequest(vectors={"nowhere": ONE["post_block"]}), INVALID, "vectors"),
        ("Set", pb.SetRequest(vectors={"post_block": {"layers": {3: {"vectors": [{"vector": VECTOR}]}}}}), INVALID,
         "vectors.post_block.3"),
        ("Set", pb.SetRequest(decode_vectors=WRONG), INVALID, "decode_vectors.post_block.1"),
        ("Set", pb.SetRequest(vectors={"post_block": {"dtype": "float16", "data": b"12"}}), INVALID,
         "vectors.post_block.shape"),
        ("Set", pb.SetRequest(clamps={"post_block": {"layers": {1: {"clamps": [{"vector": VECTOR}]}}}}), INVALID,
         "clamps.post_block.1.0"),
        ("Set", pb.SetRequest(), INVALID, "global"),
        ("RegisterModule", pb.RegisterModuleRequest(vectors=ONE), INVALID, "name"),
        ("RegisterModule", pb.RegisterModuleRequest(name="empty"), INVALID, "module"),
        ("UnregisterModule", pb.UnregisterModuleRequest(name="gone"), MISSING, "name"),
        ("Clear", pb.ClearRequest.FromString(b"\xca\x3e\x01x"), INVALID, "request"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_its_field_and_changes_nothing(tmp_path, method, request_, code, field):
    client = server(tmp_path)
    result = calls(client, lambda channel: code_of(getattr(SteeringStub(channel), method)(request_)))
    assert (result[0], result[2]) == (code, field), result
    assert client.get("/v1/steering").json()["generation"] == 0


def test_a_steering_key_opens_what_changes_and_nothing_is_needed_to_read(tmp_path):
    async def ask(channel):
        steering = SteeringStub(channel)
        for metadata in ((("x-api-key", "old"),), (("authorization", "Bearer new"),)):
            for method, request in CHANGES:
                assert await code_of(getattr(steering, method)(request, metadata=metadata)) == (
                    grpc.StatusCode.OK,
                    "",
                    None,
                )
        for metadata in ((), (("x-api-key", "ol"),), (("authorization", "old"),), (("x-api-key-bin", b"old"),)):
            for method, request in CHANGES:
                code, message, _ = await code_of(getattr(steering, method)(request, metadata=metadata))
                assert code == grpc.StatusCode.UNAUTHENTICATED
                assert "steering key" in message
        for method, request in READS:
            await getattr(steering, method)(request)

    calls(server(tmp_path, Keys(("old", "new"))), ask)


def test_without_a_key_a_server_that_others_reach_is_changed_by_nobody(tmp_path):
    async def ask(channel):
        for method, request in CHANGES:
            code, message, _ = await code_of(getattr(SteeringStub(channel), method)(request))
            assert code == grpc.StatusCode.PERMISSION_DENIED
            assert "--steering-api-key" in message

    calls(server(tmp_path, Keys(open=False)), ask)


def test_the_server_s_key_guards_all_but_health_and_reflection_before_anything_is_read(tmp_path):
    client = server(tmp_path)
    client.app.state.args.api_key = ["of-the-server"]

    async def ask(channel):
        refused = grpc.StatusCode.UNAUTHENTICATED
        steering, generate = SteeringStub(channel), GenerateStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", "of-the-server"),)):
            for method, request in (*CHANGES, *READS):
                assert (await code_of(getattr(steering, method)(request, metadata=metadata)))[0] == refused
            large = pb.GenerateRequest(prompt="x" * 2 * LIMIT)
            assert (await code_of(generate.Generate(large, metadata=metadata)))[0] == refused
            stream = generate.GenerateStream(pb.GenerateRequest(prompt="x"), metadata=metadata)
            assert (await code_of(stream.read()))[0] == refused
        await steering.Get(pb.GetRequest(), metadata=(("authorization", "Bearer of-the-server"),))
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="capflow.v1.Generate"))
        assert (await check).status == health_pb2.HealthCheckResponse.SERVING

    calls(client, ask)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_a_larger_message_is_refused_however_it_is_sent(tmp_path, compression):
    async def ask(channel):
        call = GenerateStub(channel).Generate(pb.GenerateRequest(prompt="x" * (LIMIT + 1)), compression=compression)
        assert (await code_of(call))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        fits = pb.SetRequest(vectors=ONE)
        assert (await code_of(SteeringStub(channel).Set(fits, compression=compression)))[0] == grpc.StatusCode.OK

    calls(server(tmp_path), ask)


@pytest.mark.parametrize(
    "method",
    [f"capflow.v1.{name}" for name in ("Steering/Set", "Steering/Get", "Generate/Generate", "Capture/Get")],
)
@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05ab", b"\x03"])
def test_bytes_that_are_no_message_are_the_caller_s_fault(tmp_path, method, data):
    async def ask(channel):
        call = channel.unary_unary(f"/{method}", request_serializer=None, response_deserializer=None)
        stream = channel.unary_stream("/capflow.v1.Generate/GenerateStream")
        return await code_of(call(data)), await code_of(stream(data).read())

    for code, words, _ in calls(server(tmp_path), ask):
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "expected the message of" in words


async def hold(channels, count, metadata=()):
    """Hold calls open on channels in turn until one is refused; return how many are open, and why the last was not."""
    kept = []
    for number in range(count):
        watch = channels[number % len(channels)].stream_stream(REFLECT)(metadata=metadata)
        try:
            await watch.write(LIST)
            assert await watch.read()
        except grpc.aio.AioRpcError as e:
            return kept, e
        kept.append(watch)
    return kept, None


async def until(condition):
    """Return when a condition holds; fail when it does not in time."""
    for _ in range(500):
        if await condition():
            return
        # The pause between two looks.
        await asyncio.sleep(0.02)
    pytest.fail("the condition did not come to hold in time")


REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()


def test_a_flood_of_calls_leaves_room_for_other_connections(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "RPC_CALLS_MAX", 4 * limits.OWNERS_MAX)

    async def ask(channel):
        kept, why = await hold([channel], limits.RPC_CALLS_MAX)
        assert why.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert re.search(
            r"calls: got 1 more calls beside 1,0\d\d, expected at most 1,0\d\d now; end some", why.details()
        )
        address = channel.address
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as honest:
            assert (await SteeringStub(honest).Get(pb.GetRequest())).key == "none"
        assert (await code_of(SteeringStub(channel).Get(pb.GetRequest())))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        kept.pop().cancel()

        async def goes():
            return (await code_of(SteeringStub(channel).Get(pb.GetRequest())))[0] == grpc.StatusCode.OK

        await until(goes)
        for call in kept:
            call.cancel()

    calls(server(tmp_path), ask)


def test_a_flood_of_calls_with_one_key_leaves_room_for_another(tmp_path, monkeypatch):
    """Half-sent calls count as any: the message never ends."""
    monkeypatch.setattr(limits, "RPC_CALLS_MAX", 4 * limits.OWNERS_MAX)
    client = server(tmp_path)
    client.app.state.args.api_key = ["first", "second"]
    first, second = ((("authorization", f"Bearer {key}"),) for key in ("first", "second"))

    async def ask(channel):
        half = channel.stream_unary("/capflow.v1.Steering/Get")
        kept = [half(metadata=first) for _ in range(limits.RPC_CALLS_MAX // 2)]

        async def refused():
            code, message, _ = await code_of(SteeringStub(channel).Get(pb.GetRequest(), metadata=first))
            return code == grpc.StatusCode.RESOURCE_EXHAUSTED and "calls: got 1 more calls" in message

        await until(refused)
        assert (await SteeringStub(channel).Get(pb.GetRequest(), metadata=second)).key == "none"
        for call in kept:
            call.cancel()

    calls(client, ask)


def test_a_flood_of_connections_is_bounded_and_an_honest_client_gets_through(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "RPC_CONNECTIONS_MAX", 8)
    monkeypatch.setattr(limits, "HANDSHAKE_S_MAX", 2.0)

    def is_open(connection):
        connection.settimeout(0.2)
        try:
            while data := connection.recv(4096):
                assert data
        except TimeoutError:
            return True
        except ConnectionResetError:
            pass
        return False

    async def ask(channel):
        host, _, at = channel.address.rpartition(":")
        idle = [socket.create_connection((host, int(at))) for _ in range(40)]
        try:
            opened = [await asyncio.to_thread(is_open, each) for each in idle]
            assert sum(opened) <= 8
            result = await SteeringStub(channel).Get(pb.GetRequest(), wait_for_ready=True, timeout=20)
            assert result.key == "none"
        finally:
            for each in idle:
                each.close()

    calls(server(tmp_path), ask)


def test_an_engine_that_is_not_well_does_not_serve(tmp_path):
    client = server(tmp_path)

    async def ask(channel):
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING

        async def dead():
            raise RuntimeError

        client.app.state.engine_client.check_health = dead
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
        unknown = stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
        assert (await code_of(unknown))[0] == grpc.StatusCode.NOT_FOUND

    calls(client, ask)


def test_the_certificate_of_http_is_that_of_grpc(tmp_path):
    client = server(tmp_path)
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder(
            name, name, private.public_key(), x509.random_serial_number(), now, now.replace(year=2100)
        )
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    shape = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "cert").write_bytes(certificate.public_bytes(pem))
    (tmp_path / "key").write_bytes(private.private_bytes(pem, *shape))
    args = client.app.state.args
    args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs = str(tmp_path / "cert"), str(tmp_path / "key"), None
    args.ssl_cert_reqs = ssl.CERT_NONE
    credentials = grpc.ssl_channel_credentials((tmp_path / "cert").read_bytes())
    assert calls(client, lambda c: SteeringStub(c).Get(pb.GetRequest()), credentials=credentials).key == "none"
    plain = calls(client, lambda c: code_of(SteeringStub(c).Get(pb.GetRequest())))
    assert plain[0] == grpc.StatusCode.UNAVAILABLE


def test_a_port_is_held_against_others_but_not_against_its_own_servers():
    address = port.address("127.0.0.1", free_port())
    with port.hold(address):
        with pytest.raises(UsageError, match=f"--grpc-port: got {address}"):
            port.hold(address)

        async def listen():
            mine = [grpc.aio.server(options=[("grpc.so_reuseport", 1)]) for _ in range(2)]
            for each in mine:
                each.add_insecure_port(address)
                await each.start()
            async with grpc.aio.insecure_channel(address) as channel:
                await asyncio.wait_for(channel.channel_ready(), 20)
            for each in mine:
                await each.stop(0)

        asyncio.run(listen())
    port.hold(address).close()


def test_a_port_that_somebody_listens_on_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="--grpc-port"):
        port.hold(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize(("host", "address"), [("::1", "[::1]:5"), ("localhost", "localhost:5")])
def test_an_address_of_six_has_brackets(host, address):
    assert port.address(host, 5) == address


# The first case imports vLLM's server, which takes minutes on a busy machine.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("arguments", "opened"),
    [
        (("--host", "127.0.0.1", "--grpc-port", "5"), True),
        (("--host", "127.0.0.1", "--grpc-port", "5", "--grpc-host", "0.0.0.0"), False),
        (("--host", "0.0.0.0", "--grpc-port", "5"), False),
        (("--host", "127.0.0.1", "--grpc-host", "0.0.0.0"), True),
        (("--grpc-port", "5", "--grpc-host", "0.0.0.0", "--insecure"), True),
    ],
)
def test_changes_need_no_key_only_where_both_doors_are_of_this_machine(tiny_with_words, arguments, opened):
    from capflow_engine.serve.server import parse

    _, args, _ = parse([tiny_with_words, *arguments])
    assert args.capflow.keys.open is opened
    listens = args.capflow.rpc_address
    assert listens in (("127.0.0.1:5", "0.0.0.0:5") if "--grpc-port" in arguments else (None,))
