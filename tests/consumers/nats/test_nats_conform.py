"""The nats consumer keeps the rules that `capflow.testing` holds anyone's to, against the real server."""

import json
import zlib
from pathlib import Path

import msgspec
import pytest

from capflow.testing import conformance, make_model
from capflow_consumers.nats.consumer import NatsConsumer
from tests.kit.natsd import messages_of
from tests.kit.streams import server

__all__ = ["server"]


class NatsOfDirectory(NatsConsumer):
    """The nats consumer with a stream for each directory, which its results do not name."""

    def __init__(self, config):
        name = stream_here()
        super().__init__(msgspec.structs.replace(config, stream=name, prefix=name))

    def on_request_done(self, done):
        result = super().on_request_done(done)
        payload = {"rows": result.payload["rows"]} if result.payload else {}
        return msgspec.structs.replace(result, payload=payload)


def stream_here():
    return f"t{zlib.crc32(str(Path.cwd()).encode()):x}"


def forwarded():
    """Return the tokens at each site that the stream has rows of, by request."""
    kept = {}
    for message in messages_of(OPTIONS["servers"], stream_here()):
        if ".rows." in message.subject:
            for chunk in json.loads(message.data)["chunks"]:
                places = enumerate(chunk["token_ids"], chunk["start"])
                kept.setdefault(chunk["request"], []).extend(
                    (site, *place) for place in places for site in chunk["sites"]
                )
    return {request: sorted(places) for request, places in kept.items()}


TestNats = conformance(
    NatsOfDirectory,
    {"stream": "of-the-directory", "create": "true", "sites": "post_block:0+heads:1", "vectors": "true"},
    model=make_model(2, hooks=("post_block",), shapes={"heads": (2, 6)}),
    kept=forwarded,
    handle_s_max=30.0,
)
OPTIONS = TestNats.subject.options


@pytest.fixture(autouse=True)
def at_the_server(server):
    """Have the consumer connect to the server, which has its port when it runs."""
    OPTIONS["servers"] = server.url
