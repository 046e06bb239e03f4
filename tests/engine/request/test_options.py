"""The options of a request: what workers read is what the scheduler wrote."""

import pickle

import msgspec
import pytest

pytest.importorskip("vllm")

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.compiler import program_of
from capflow_engine.request.options import RequestOptions
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.store import SteeringStore

VECTOR, OTHER = [1.0, -2.0], [0.5, 4.0]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"id": "a", "capture": {"hooks": {"post_block": [0, 1]}, "positions": {"every": 2}}},
        {"capture": {"filesystem": {"hooks": {"mlp_in": "all"}}}},
        {"steering_vectors": {"post_block": {1: VECTOR}}, "decode_steering_vectors": {"mlp_out": {0: OTHER}}},
        {"steering_clamps": {"post_block": {1: [{"vector": VECTOR, "min": 0.0}]}}},
        {"steering_patches": {"post_block": {1: [{"positions": [0, -1], "vector": [VECTOR, OTHER]}]}}},
    ],
)
def test_pickled_options_are_the_same_and_have_the_same_keys(values):
    asked = RequestOptions.make(**values)
    program = None if asked.steering is None else program_of(len(VECTOR), [asked.steering])
    for options in (asked, msgspec.structs.replace(asked, steering=None, program=program)):
        read = pickle.loads(pickle.dumps(options))  # noqa: S301  written just now
        assert read == options
        assert type(read) is RequestOptions
        if program is not None and options.program is not None:
            assert read.program.key(read.program.decode) == program.key(program.decode)


def steered(**more):
    """Return options with a program."""
    asked = RequestOptions.make(steering_vectors={"post_block": {1: VECTOR}}, **more)
    return msgspec.structs.replace(asked, steering=None, program=program_of(len(VECTOR), [asked.steering]))


def test_the_engine_reads_what_a_front_end_packed():
    for options in (steered(id="a"), RequestOptions.make(id="b"), RequestOptions.make(steering_name="m")):
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode({"capflow": dict(options.pack())}))
        assert RequestOptions.unpack(wire) == options


def test_requests_that_share_a_program_are_pickled_with_it_once_and_read_with_one():
    options = steered()
    many = [msgspec.structs.replace(options, id=f"{n}") for n in range(8)]
    data = pickle.dumps(many)
    assert data.count(options.program.rows) == 1
    read = pickle.loads(data)  # noqa: S301  written just now
    assert read == many
    assert {id(each.program) for each in read} == {id(read[0].program)}


@pytest.mark.parametrize(
    "value",
    [
        {"options": "gKA="},
        {"options": b"", "program": "AAAA"},
        {"options": b"\x80", "program": b"\x80"},
        {"options": b"\x80", "rows": 1},
        {"program": b"\x80"},
        {"steering": {}},
        [1],
    ],
)
def test_what_no_front_end_packed_is_refused(value):
    with pytest.raises(UsageError, match="expected packed options"):
        RequestOptions.unpack({"capflow": value})


def test_parameters_that_requests_share_are_compiled_once(monkeypatch):
    from capflow_engine.request import params as params_module

    info = ModelInfo("m", 4, 2, "float32", (Site(1, "post_block"),))
    fit, store = Fit(info, Size(8, 8, 8)), SteeringStore()
    params = params_module.sampling_params(steering_vectors={"post_block": {1: VECTOR}})
    others = params_module.sampling_params(steering_vectors={"post_block": {1: OTHER}})
    calls = []
    monkeypatch.setattr(
        params_module, "_compiled", lambda *args, of=params_module._compiled: calls.append(1) or of(*args)
    )
    prepared = params_module.Prepared.each([params, others, params], fit, store, ["a", "b", "c"])
    assert len(calls) == 2
    assert [one.options.id for one in prepared] == ["a", "b", "c"]
    assert prepared[0].options.program is prepared[2].options.program
    assert prepared[0].options.program != prepared[1].options.program
    assert len({id(one.params) for one in prepared}) == 3
