"""One live server for the tests that do not mind what ran on it before."""

import contextlib
import json

import pytest


@pytest.fixture(scope="session")
def served(tiny_with_words, tmp_path_factory):
    """A server of HTTP and gRPC, and a hub that it serves."""
    import grpc
    import openai

    from tests.kit.adapters import save_adapter
    from tests.kit.doors import BODY_BYTES_MAX, KEY, LENGTH_MAX, MODULE, STEERING_KEY, Served
    from tests.kit.hubs import free_port
    from tests.kit.servers import environment, healthy, process, wait_until

    home = tmp_path_factory.mktemp("home")
    (home / "one.json").write_text(json.dumps(MODULE))
    (home / "chat.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    # The last slot stays empty: see `tests/rows/test_adapters.py`.
    lora = f"adapted={save_adapter(tiny_with_words, home / 'lora', seed=1)}"
    adapter = ["--enable-lora", "--max-loras", "2", "--lora-modules", lora]
    port, rpc = free_port(), free_port()
    command = [
        "serve", tiny_with_words, "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--hf-overrides", json.dumps({"max_position_embeddings": LENGTH_MAX}), "--max-model-len", str(LENGTH_MAX),
        "--served-model-name", "tiny", "--api-key", KEY, "--chat-template", str(home / "chat.jinja"),
        "--steering-api-key", STEERING_KEY, "--steering-modules", f"one={home}/one.json",
        "--steering-body-bytes-max", str(BODY_BYTES_MAX), "--grpc-port", str(rpc), *adapter,
    ]  # fmt: skip
    variables = environment(home)
    address = f"127.0.0.1:{rpc}"
    with contextlib.ExitStack() as stack:
        hub_command = ("run", "--consumer", f"filesystem:root={home}/rows,capture=requests")
        hub, _ = stack.enter_context(process(*hub_command, environment=variables))
        server, lines = stack.enter_context(process(*command, environment=variables))
        try:
            wait_until(lambda: healthy(port), 400, server)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
            with grpc.insecure_channel(address) as channel, client:
                yield Served(client, channel, port, home / "rows", address)
        finally:
            server.terminate()
            hub.terminate()
    assert not any("Traceback" in line for line in lines)
