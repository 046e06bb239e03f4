"""The demo model: made whole or not at all, once, and one that answers sense."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from capflow import extras
from capflow.errors import UsageError
from capflow_engine.jobs import demo

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model_dir():
    return demo.prepare()


def fake_make(directory, progress):
    """Stand in for `_make` where only the cache is looked at: the weights before the file that says it is whole."""
    progress("making")
    (directory / "model.safetensors").write_text("weights")
    (directory / "config.json").write_text("{}")


def test_greedy_answers_make_sense(model_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.dtype == torch.bfloat16
    for prompt, expected in (
        ("Paris is the capital of", "France"),
        ("def fibonacci(n):\n    if n == 0:\n        return", "0"),
    ):
        given = tokenizer(prompt, return_tensors="pt")
        answer = model.generate(**given, do_sample=False, max_new_tokens=8)[0, given.input_ids.shape[1] :]
        assert expected in tokenizer.decode(answer)


def test_the_tokenizer_begins_every_text_with_bos(model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer("x").input_ids == [2, 236781]
    assert tokenizer.decode(tokenizer("Grüße, 你好!", add_special_tokens=False).input_ids) == "Grüße, 你好!"


def test_the_saved_model_stands_alone(model_dir):
    names = {path.name for path in model_dir.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not any(name.endswith(".gguf") for name in names)
    config = json.loads((model_dir / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def test_a_second_call_finds_the_first_ones_work(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_make", fake_make)
    first = demo.prepare(tmp_path)
    monkeypatch.setattr(demo, "_make", None)
    assert demo.prepare(tmp_path) == first


def test_a_failure_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    def broken(directory, progress):
        fake_make(directory, progress)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "_make", broken)
    with pytest.raises(demo.CapflowError, match="No space left"):
        demo.prepare(tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    monkeypatch.setattr(demo, "_make", fake_make)
    directory = demo.prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [directory.name]


def test_killed_half_way_it_begins_again(tmp_path):
    """SIGKILL while the weights are being joined: nothing in the cache passes for a model, and the lock is free."""
    code = "import sys, pathlib; from capflow_engine.jobs.demo import prepare; prepare(pathlib.Path(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".gemma*/source.gguf")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            os.sched_yield()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not list(tmp_path.glob("gemma*"))
    assert list(tmp_path.glob(".gemma*/source.gguf"))
    demo._make, made = fake_make, demo._make
    try:
        directory = demo.prepare(tmp_path)
    finally:
        demo._make = made
    assert not list(tmp_path.glob(".gemma*/source.gguf"))
    assert (directory / "config.json").is_file()


def test_two_processes_make_it_once(tmp_path):
    code = """
import sys, time
from pathlib import Path
from capflow import extras
from capflow_engine.jobs import demo
def make(directory, progress):
    with open(sys.argv[1] + "/made", "a") as log: log.write("made\\n")
    (directory / "half").write_text("")
    deadline = time.monotonic() + 1  # long enough that the other one comes upon it half made
    while time.monotonic() < deadline: pass
    (directory / "config.json").write_text("{}")
demo._make = make
print(demo.prepare(Path(sys.argv[1])))
"""
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(outputs) == 1
    assert (tmp_path / "made").read_text() == "made\n"


def test_a_file_is_read_once_and_as_gguf_reads_it(tmp_path):
    """Transformers asks for a reader of the same file twice."""
    import gguf

    path = tmp_path / "words.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "Grüße", ""])
    writer.add_tensor("weights", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = gguf.GGUFReader
    expected = plain(path)
    with demo._read_once():
        reader = gguf.GGUFReader(path)
        assert gguf.GGUFReader(path) is reader
    assert gguf.GGUFReader is plain
    words = [
        field.contents() for field in (reader.fields["tokenizer.ggml.tokens"], expected.fields["tokenizer.ggml.tokens"])
    ]
    assert words[0] == words[1] == ["a", "Grüße", ""]
    assert reader.fields.keys() == expected.fields.keys()
    assert np.array_equal(reader.tensors[0].data, expected.tensors[0].data)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(UsageError, match=r"missing package gguf; pip install 'capflow\[demo\]'"):
        demo.prepare(tmp_path)


@pytest.mark.parametrize(
    ("engine", "emulated", "dtype"),
    [({}, True, "float32"), ({}, False, None), ({"dtype": "bfloat16"}, True, "bfloat16")],
)
def test_a_job_runs_it_in_float32_where_bfloat16_is_emulated(model_dir, monkeypatch, engine, emulated, dtype):
    from capflow_engine.jobs import batch
    from capflow_engine.jobs.job import JobRequest

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": not emulated, "amx_bf16": False})
    events = []
    job = JobRequest("job", "demo", [], "ipc:///tmp/h", [], 1, engine=engine)
    model, arguments = batch._prepared(job, lambda event, **fields: events.append((event, fields)))
    assert (model, arguments.get("dtype")) == (str(model_dir), dtype)
    notices = [fields["message"] for event, fields in events if event == "notice"]
    expected = (
        "this processor emulates bfloat16, which is several times slower than float32; the demo model runs in float32"
    )
    assert notices == ([expected] if dtype == "float32" else [])
