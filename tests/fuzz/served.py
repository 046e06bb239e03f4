"""Targets that need vLLM: bodies over HTTP and messages over gRPC, for servers without an engine, and vector files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import warnings
from pathlib import Path

import grpc
import numpy as np
import safetensors.numpy
import torch
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from capflow.errors import UsageError
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc import port
from capflow_engine.serve.rpc.generation import body_of
from capflow_engine.serve.rpc.server import served
from capflow_engine.steering.files import load_sites, load_vector
from tests.fuzz.files import NAME, Files
from tests.fuzz.messages import Messages
from tests.fuzz.mutator import mutated
from tests.kit.apps import WIDTH, server
from tests.kit.hubs import free_port

VECTOR = [1.0] * WIDTH
VECTORS = {"post_block": {"1": VECTOR, "0": {"vector": VECTOR, "scale": 2.0, "relative": True}}}
CLAMPS = {"post_block": {"2": [{"vector": VECTOR, "min": -1, "max": 1, "strength": 0.5}]}}
PATCHES = {"post_block": {"1": [{"positions": [0], "vector": VECTOR}]}}
PACKED = {"dtype": "float32", "shape": [1, 2], "layer_indices": [0], "data": "AAAAAAAAAAA=", "scales": [1.5]}
CAPTURE = {"hooks": {"post_block": [0, "1-2"]}, "positions": [1, {"last": 3}], "max_rows": 7, "tag": "x"}

BLAMES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,  # nothing generates here
    grpc.StatusCode.UNAVAILABLE,  # no hub runs
}
"""The statuses that blame a request, or what does not run here."""


class _Named(Messages):
    """An input is a name, `NAME`, and what is sent there; the name stays."""

    def mutate(self, choose, data, others):
        """Return an input of the same name."""
        name, _, content = data.partition(NAME)
        return name + NAME + mutated(choose, content, [other.partition(NAME)[2] for other in others])


class Http(_Named):
    """Bodies of the routes with capture and steering fields; answers are 2xx, 4xx, or 501 (model cannot generate)."""

    def __init__(self, root):
        self.client = server(Path(tempfile.mkdtemp(dir=root)))
        for name in ("openai_serving_completion", "openai_serving_chat"):
            setattr(self.client.app.state, name, None)
        fields = (
            {"capture": CAPTURE, "capture_id": "one", "capture_wait": True},
            {"steering_vectors": VECTORS, "decode_steering_clamps": CLAMPS, "steering_report": True},
            {"steering_patches": PATCHES, "prefill_steering_vectors": {"post_block": PACKED}},
            {"steering_name": ["one", "two"], "steering_scale": 0.5},
            {"steering_module_ref": ["one", 1.0]},
        )
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        bodies = [
            ("/v1/completions", {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, **each}) for each in fields
        ]
        bodies += [("/v1/chat/completions", {**chat, **each}) for each in fields[:2]]
        bodies += [
            ("/v1/steering/set", {"vectors": VECTORS, "decode_clamps": CLAMPS, "replace": True}),
            ("/v1/steering/modules", {"name": "one", "vectors": VECTORS, "clamps": CLAMPS}),
            ("/v1/steering/modules/unregister", {"name": "one"}),
        ]
        self.inputs = [path.encode() + NAME + json.dumps(body).encode() for path, body in bodies]

    def read(self, data):
        """Send it."""
        path, _, content = data.partition(NAME)
        answer = self.client.post(path.decode(), content=content, headers={"content-type": "application/json"})
        assert answer.status_code < 500 or answer.status_code == 501, answer.text
        json.loads(answer.content)


class Rpc(_Named):
    """Messages of the gRPC services. Every answer is a message or a status that blames the request."""

    SERVICES = pb.DESCRIPTOR.services_by_name

    def __init__(self, root):
        self.loop = asyncio.new_event_loop()
        client = server(Path(tempfile.mkdtemp(dir=root)))
        address = port.address("127.0.0.1", free_port())
        self.serving = served(client.app.state, client.app.state.capflow, address)
        self.loop.run_until_complete(self._begin(address))
        vectors = {"post_block": {"layers": {1: {"vectors": [{"vector": VECTOR, "scale": 2.0}]}}}}
        clamps = {
            "post_block": {"layers": {2: {"clamps": [{"vector": VECTOR, "max": 1}, {"vector": VECTOR, "value": 0}]}}}
        }
        messages = {
            "Steering/Set": pb.SetRequest(vectors=vectors, decode_clamps=clamps, replace=True),
            "Steering/RegisterModule": pb.RegisterModuleRequest(name="one", vectors=vectors),
            "Steering/UnregisterModule": pb.UnregisterModuleRequest(name="one"),
            "Capture/Get": pb.GetCaptureRequest(id="one"),
            "Generate/Generate": pb.GenerateRequest(prompt="a", steering_vectors=vectors, capture=CAPTURE),
        }
        self.inputs = [name.encode() + NAME + message.SerializeToString() for name, message in messages.items()]

    async def _begin(self, address):
        await self.serving.__aenter__()
        self.channel = grpc.aio.insecure_channel(address)

    def read(self, data):
        """Call with it. What is to be generated is read as a body first, which a server without a model does not do."""
        name, _, content = data.partition(NAME)
        if name == b"Generate/Generate":
            with contextlib.suppress(DecodeError, UsageError, ValidationError):
                body_of(pb.GenerateRequest.FromString(content), stream=False)
        self.loop.run_until_complete(self._call(name.decode(), content))

    async def _call(self, name, content):
        call = self.channel.unary_unary(f"/{pb.DESCRIPTOR.package}.{name}")
        try:
            await call(content, timeout=5)
        except grpc.aio.AioRpcError as e:
            if e.code() not in BLAMES:
                raise
            raise UsageError(e.details()) from e


class Vectors(Files):
    """Files of vectors, in each format."""

    taken = True

    def make(self, directory):
        """Write two layers in each."""
        warnings.simplefilter("ignore")  # torch's, of pickles
        arrays = {f"post_block.{layer}": np.arange(8, dtype=np.float32) for layer in (0, 1)}
        safetensors.numpy.save_file(arrays, directory / "v.safetensors")
        np.savez(directory / "v.npz", **arrays)
        np.savez_compressed(directory / "c.npz", **arrays)
        np.save(directory / "v.npy", np.stack(list(arrays.values())))
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        torch.save(tensors, directory / "v.pt")
        torch.save(tensors, directory / "old.pt", _use_new_zipfile_serialization=False)

    def look(self, directory):
        """Load each file, as a whole and one of its layers."""
        for path in sorted(directory.iterdir()):
            load_sites(path)
            load_vector(path, 0)


SERVED = {"http": Http, "rpc": Rpc, "vectors": Vectors}
