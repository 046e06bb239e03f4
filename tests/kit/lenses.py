"""Lenses for tests: tiny models with their rows, and what Transformers predicts from a row."""

import contextlib
import copy
import json
import os
import signal
from pathlib import Path

import ml_dtypes  # noqa: F401  NumPy's bfloat16
import msgspec
import numpy as np
import torch
import transformers

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.lenses.file import save_lens
from capflow.lenses.origin import LensOrigin
from tests.architectures import table
from tests.kit.frames import make_frame
from tests.kit.stored import done, opened

TOKENS = (17, 5, 211, 88, 9, 140)
"""The tokens of the request of which a tiny model has rows."""


class LensModel:
    """A saved tiny model.

    tokens: the tokens of the request of which it has rows.
    rows: the stream after each block at each of these, `[layers, tokens, hidden]` float32.
    """

    def __init__(self, directory, model_type, model, tokens=TOKENS):
        self.directory = str(directory)
        self.tokens = list(tokens)
        self.model = model.eval()
        self._layers = list(table.layers_of(model, model.config))
        streams = table.expected(model_type, model, [self.tokens])[0]
        self.rows = np.stack([streams[layer, "post_block"] for layer in range(len(self._layers))]).astype(np.float32)
        self.info = ModelInfo(
            self.directory, len(self._layers), self.rows.shape[2], "float32",
            tuple(Site(layer, "post_block") for layer in range(len(self._layers))),
        )  # fmt: skip

    def logits(self):
        """Return the model's own logits at each of `tokens`, `[tokens, vocabulary]` float64."""
        with torch.no_grad():
            return self.model(torch.tensor([self.tokens]), use_cache=False).logits[0].double().numpy()

    def lens(self, rows):
        """Return what Transformers predicts if its last block's output is these rows: `[rows, vocabulary]` float64.

        The rows are `[rows, hidden]`. All that follows the last block is the model's own, with its every scale and cap.
        """
        given = torch.from_numpy(np.ascontiguousarray(rows, np.float32))[None]

        def replaced(module, args, output):
            return (given, *output[1:]) if isinstance(output, tuple) else given

        handle = self._layers[-1].register_forward_hook(replaced)
        try:
            with torch.no_grad():
                logits = self.model(torch.zeros(1, len(rows), dtype=torch.long) + 7, use_cache=False).logits[0]
        finally:
            handle.remove()
        return torch.softmax(logits.double(), -1).numpy()

    def exact(self, rows):
        """Return what the model's own norm, head, scales and caps make of rows: logits `[rows, vocabulary]` float64.

        The rows are `[rows, hidden]`. All is computed in float64.
        """
        given = torch.from_numpy(np.ascontiguousarray(rows, np.float64))[None]
        double = copy.deepcopy(self.model).double()

        def replaced(module, args, output):
            return (given, *output[1:]) if isinstance(output, tuple) else given

        list(table.layers_of(double, double.config))[-1].register_forward_hook(replaced)
        with torch.no_grad():
            return double(torch.zeros(1, len(rows), dtype=torch.long) + 7, use_cache=False).logits[0].numpy()

    def frame(self, request="r1", layers=None, positions=None, *, dtype="float32", **fields):
        """Return a frame with the rows of some layers at positions `[first, end)`."""
        layers = range(len(self.rows)) if layers is None else layers
        first, end = positions or (0, len(self.tokens))
        sites = [Site(layer, "post_block") for layer in layers]
        hidden = self.rows.shape[2]
        frame = make_frame(
            [(request, len(self.tokens), first, end - first)], sites, hidden=hidden, dtype=dtype, **fields
        )
        rows = np.ascontiguousarray(self.rows[list(layers), first:end]).astype(np.dtype(dtype))
        return type(frame).seal(frame.header, rows.view(np.uint8).reshape(-1))


def save_model(directory, model_type, *, tied=False, **fields):
    """Save a tiny random model of an architecture; return it with its rows."""
    torch.manual_seed(7)
    config = table.config_of(model_type)
    for name, value in ({"tie_word_embeddings": tied} | fields).items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.tie_weights()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.15 if "emb" in name or "wte" in name else 0.09
            weight.normal_(0, scale) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(directory)
    return LensModel(directory, model_type, model)


def save_architecture(directory, model_type):
    """Save the tiny model of `make architectures`; return it with its rows."""
    return LensModel(directory, model_type, table.make(model_type, directory))


def assert_lens(layers, model, rows, *, k=8):
    """Fail unless the layers of an answer are what Transformers predicts from rows `[layers, hidden]`."""
    expected = model.lens(rows)
    assert len(layers) == len(rows)
    for layer, probabilities in zip(layers, expected, strict=True):
        assert_tokens(layer["tokens"], probabilities, k=k)


def assert_tokens(tokens, probabilities, *, k=8):
    """Fail unless tokens are the `k` most likely ones, with their probabilities."""
    order = np.argsort(-probabilities, kind="stable")[:k]
    assert [token for token, *_ in tokens] == order.tolist()
    np.testing.assert_allclose([token[-1] for token in tokens], probabilities[order], rtol=1e-4)


def change_config(directory, **fields):
    """Change fields of a saved configuration; None removes one."""
    path = Path(directory) / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@contextlib.contextmanager
def stopped(pid):
    """Stop a process for as long as a block runs, if it lives then."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def log_softmax(logits):
    """Return the log probabilities of logits `[n, vocabulary]` float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def save_translators(path, model, kind, /, *, scale=0.05, hook="post_block", layers=None, dtype=np.float32, **fields):
    """Save a lens file with random translators near the identity; return the tensors by layer, in float64.

    Each is a pair `weight, bias`; a Jacobian lens has no bias.
    """
    rng = np.random.default_rng(5)
    width, count = model.rows.shape[2], len(model.rows)
    identity = np.eye(width) if kind == "jacobian" else 0
    tensors, parts = {}, {}
    for layer in range(count - 1) if layers is None else layers:
        weight = (identity + rng.normal(0, scale, (width, width))).astype(dtype)
        bias = rng.normal(0, 0.1, width).astype(dtype)
        site = Site(layer, hook)
        tensors[site, "weight"] = weight
        if kind == "tuned":
            tensors[site, "bias"] = bias
        parts[layer] = weight.astype(np.float64), bias.astype(np.float64)
    origin = {"num_layers": count, "hidden_size": width, "vocabulary_size": 0} | fields
    save_lens(path, LensOrigin(kind, **origin), tensors)
    return parts


def store(model, root, requests=("r1",), *, layers=None, hook="post_block", dtype="float32", prompt=None):
    """Store requests with the rows of a model in a data set."""
    layers = range(len(model.rows)) if layers is None else layers
    sites = tuple(Site(layer, hook) for layer in layers)
    consumer = opened(root, sites, positions="all")
    consumer.on_session("engine-1", msgspec.structs.replace(model.info, sites=sites, dtype=dtype))
    count = len(model.tokens)
    for number, request in enumerate(requests, 1):
        frame = model.frame(request, layers=layers, dtype=dtype, seq=number)
        blocks = tuple(block._replace(sites=sites) for block in frame.header.blocks)
        (part,) = frame.header.requests
        parts = (msgspec.structs.replace(part, token_ids=tuple(model.tokens)),)
        header = msgspec.structs.replace(frame.header, blocks=blocks, requests=parts)
        consumer.on_frame(type(frame).seal(header, np.frombuffer(frame.payload, np.uint8)))
        consumer.on_request_done(done(request, prompt or count - 2, count, rows=count * len(sites)))
    consumer.close()
    return root
