"""A NATS server, and what the nats consumer put into a stream."""

import contextlib
import json
import math
import zlib
from collections import Counter

import numpy as np
import pytest

from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow_consumers.nats import messages as natsmessages
from capflow_consumers.nats.consumer import NatsConfig, NatsConsumer
from tests.kit.checked import checked
from tests.kit.natsd import natsd

SITE = Site(0, "post_block")


class Counts:
    def __init__(self):
        self.counts = Counter()

    def count(self, name, amount=1):
        self.counts[name] += amount


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with natsd(tmp_path_factory.mktemp("natsd")) as running:
        yield running


@pytest.fixture
def stream(request):
    """Return a stream's name, this test's own."""
    return f"t{zlib.crc32(request.node.name.encode()):x}"


def probe_file(directory, hidden=8):
    probe = Probe.make(SITE, np.random.default_rng(3).standard_normal((2, hidden)), names=("glad", "sad"))
    probe.save(directory / "mood.safetensors")
    return probe, str(directory / "mood.safetensors")


@contextlib.contextmanager
def opened(server, name, **options):
    """Yield a consumer with its context, whose subjects begin with the stream's name."""
    config = NatsConfig(**({"stream": name, "servers": [server.url], "create": True, "prefix": name} | options))
    consumer = checked(NatsConsumer(config))
    consumer.context = Counts()
    consumer.open(consumer.context)
    try:
        yield consumer
    finally:
        consumer.close()


def done(request="r1", computed_length=4, **more):
    fields = {"rows_promised": computed_length, "rows": computed_length, "dropped": ()} | more
    return RequestDone("engine-1", request, "stop", 4, computed_length, **fields)


def vectors_of(message):
    """Yield what a message of vectors says of each of its chunks, and the chunk's rows."""
    about = json.loads(message.headers[natsmessages.ROWS_HEADER])
    numbers = np.frombuffer(message.data, {"float32": np.float32, "bfloat16": np.uint16}[about["dtype"]])
    for chunk in about["chunks"]:
        size = math.prod(chunk["shape"])
        yield chunk, numbers[:size].reshape(chunk["shape"])
        numbers = numbers[size:]
    assert not numbers.size


def kinds(messages):
    return Counter(message.subject.split(".")[1] for message in messages)
