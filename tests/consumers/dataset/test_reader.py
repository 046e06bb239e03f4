from __future__ import annotations

import re
import shutil
import subprocess
import sys

import msgspec
import numpy as np
import pytest

import capflow
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.layout import SHARD_PATTERN
from capflow_consumers.dataset.shards.index import ShardSet
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit.captured import LAYOUTS, flip, write
from tests.kit.frames import make_frame, make_model, row_of
from tests.kit.sources import ROOT
from tests.kit.stored import done, hashed, opened

SITES = (Site(2, "post_block"), Site(3, "mlp_out"))


@pytest.fixture
def root(tmp_path):
    """A data set of two requests, `a` of 5 rows a site and `b/c` of 3, in bfloat16."""
    root = tmp_path / "root"
    consumer = FilesystemConsumer(FilesystemConfig(str(root), capture="requests", layout="per_file"))
    consumer.open(None)
    consumer.on_session("engine-1", make_model())
    consumer.on_frame(make_frame([("a", 4, 0, 5), ("b/c", 3, 0, 3)], SITES, dtype="bfloat16", texts=True))
    for request, prompt, computed in (("a", 4, 5), ("b/c", 3, 3)):
        rows = computed * 2
        consumer.on_request_done(RequestDone("engine-1", request, "stop", prompt, computed, rows, rows, ()))
    consumer.close()
    return root


def test_the_requests_are_listed_by_their_exact_ids(root):
    dataset = capflow.open(root)
    assert sorted(dataset.requests()) == ["a", "b/c"]
    assert len(dataset) == 2
    assert "b/c" in dataset
    assert "b" not in dataset


def test_a_capture_says_what_it_is(root):
    capture = capflow.open(str(root))["a"]
    assert (capture.id, capture.prompt_length, capture.computed_length) == ("a", 4, 5)
    assert (capture.status, capture.error) == ("ok", None)
    assert set(capture.sites) == set(SITES)
    assert list(capture.texts) == [0, 1, 2, 3, 4]
    assert (3, "mlp_out") in capture
    assert "post_block:3" not in capture


def test_rows_are_mapped_read_only_and_found_by_tuple_or_text(root):
    rows = capflow.open(root)["a"][2, "post_block"]
    expected = np.stack([row_of("a", SITES[0], p, dtype="bfloat16") for p in range(5)])
    assert rows.rows.tobytes() == expected.tobytes()
    assert rows.rows.shape == (5, 8)
    base = rows.rows
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        rows.rows[0] = 0
    assert capflow.open(root)["a"]["post_block:2"].rows.tobytes() == rows.rows.tobytes()


def test_verify_notices_one_flipped_bit_anywhere_in_a_file(root):
    dataset = capflow.open(root)
    dataset.verify()
    file = root / "a" / "post_block.002.safetensors"
    whole = file.read_bytes()
    for index in (3, 511, 512, 600, len(whole) - 1):
        file.write_bytes(whole[:index] + bytes([whole[index] ^ 4]) + whole[index + 1 :])
        with pytest.raises(CapflowError, match=r"post_block\.002\.safetensors: got checksum [0-9a-f]{16}, expected"):
            dataset.verify()
    file.write_bytes(whole)
    dataset.verify()


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b[:100], lambda b: b"\0" + b[1:]])
def test_a_file_of_the_wrong_size_or_header_is_refused_without_reading_its_rows(root, damage):
    file = root / "a" / "mlp_out.003.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CapflowError, match=r"mlp_out\.003\.safetensors: got .* restore it from a copy"):
        capflow.open(root)["a"][3, "mlp_out"]


def test_a_missing_file_is_named(root):
    (root / "a" / "mlp_out.003.safetensors").unlink()
    with pytest.raises(CapflowError, match=r"mlp_out\.003\.safetensors: got No such file"):
        capflow.open(root)["a"][3, "mlp_out"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(b'"rows":', b'"rows":1'), "request.json: got a checksum that does not match"),
        (lambda text: text[:-10], "request.json: got a checksum that does not match"),
        (lambda text: hashed(b"{" + text), "request.json: got JSON is malformed"),
        (lambda text: hashed(text.replace(b'"a"', b'"\xff"')), "request.json: got 'utf-8' codec can't decode"),
        (
            lambda text: hashed(text.replace(b'"format":1', b'"format":3')),
            "request.json format: got 3, expected 1 or 2",
        ),
        (lambda text: hashed(text.replace(b'"mlp_out"', b'"../x"')), "got an unknown hook point"),
        (lambda text: hashed(text.replace(b'"bfloat16"', b'"int8"')), "got an unknown dtype"),
        (
            lambda text: hashed(text.replace(b"mlp_out.003.safetensors", b"../../secret")),
            "got a file name that is not the site's",
        ),
    ],
)
def test_a_sidecar_that_cannot_be_trusted_is_refused(root, change, message):
    file = root / "a" / "request.json"
    file.write_bytes(change(file.read_bytes()))
    dataset = capflow.open(root)
    with pytest.raises(CapflowError, match=re.escape(message)):
        dataset["a"]
    assert dataset.requests() == ["b/c"]
    (damaged,) = dataset.damaged()
    assert message in damaged


@pytest.fixture
def mixed(root):
    """The same with a request in a packed file, and four in two shards."""
    for number, options in enumerate(({"layout": "packed"}, {"layout": "sharded"}, {"layout": "sharded"})):
        write(root, {f"{number}{name}": (2, 3) for name in ("x", "y")}, SITES, **options)
    return root


@pytest.mark.parametrize("piece", ["sidecar", "index", "head", "end", "nothing left", "no access"])
def test_what_is_damaged_hides_nothing_else(mixed, piece, caplog):
    every = ["0x", "0y", "a", "b/c", "1x", "1y", "2x", "2y"]
    first, _ = sorted(mixed.glob(SHARD_PATTERN))
    file, lost = (mixed / "0x" / "request.json", ["0x"]) if piece == "sidecar" else (first, [])
    whole = file.read_bytes()
    if piece == "sidecar":
        flip(file, 20)
    elif piece == "index":
        flip(file, whole.rindex(b"\xa21x"))  # msgpack's
    elif piece == "head":
        flip(file, 1)
    elif piece == "end":
        file.write_bytes(whole[:-1])
    elif piece == "nothing left":
        file.write_bytes(bytes(len(whole)))
        lost = ["1x", "1y"]
    else:
        file.unlink()
        file.mkdir()
        lost = ["1x", "1y"]
    dataset = capflow.open(mixed)
    left = [name for name in every if name not in lost]
    assert sorted(dataset.requests()) == sorted(left)
    for _ in range(2):
        assert sorted(capture.id for capture in dataset) == sorted(left)
    for capture in dataset:
        capture.verify()
    (damage,) = dataset.damaged()
    assert damage.startswith(f"{file}: got ")
    assert caplog.text.count(f"{damage}; it is left out") == 1
    with pytest.raises(CapflowError, match=re.escape(str(file))):
        dataset.verify()
    for name in lost:
        with pytest.raises(CapflowError, match=re.escape(str(file))):
            dataset[name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_shard_stops_no_hub(mixed, layout, caplog):
    first, second = sorted(mixed.glob(SHARD_PATTERN))
    first.write_bytes(b"")
    with second.open("r+b") as file:
        file.write(second.read_bytes().replace(b'"request":"2x"', b'"request":"2?"', 1))  # whose hash is another now
    for request in ("new", "2x"):
        write(mixed, {request: (2, 3)}, SITES, layout=layout)
    assert f"{first}: got other first bytes than a shard has" in caplog.text
    assert "new" in capflow.open(mixed).requests()
    assert "new" in [capture.id for capture in capflow.open(mixed)]


def test_a_shard_that_cannot_be_looked_at_fails_no_request_that_is_committed(tmp_path, monkeypatch):
    consumer = opened(tmp_path, layout="sharded", shard_bytes=1 << 20)

    def fail(*_):
        raise OSError(24, "Too many open files")

    for number in range(8):
        consumer.on_frame(make_frame([(f"r{number}", 4, 0, 100)], hidden=1024, seq=number + 1))
        if number == 4:
            monkeypatch.setattr(ShardSet, "refresh", fail)
        assert consumer.on_request_done(done(f"r{number}", computed_length=100)).status == "ok"
    monkeypatch.undo()
    consumer.close()
    assert len(capflow.open(tmp_path)) == 8


@pytest.mark.parametrize("deleted", [["r1"], ["r1~2"], ["r1", "r1~2"], ["r1~2", "r1~3"], ["r1", "r1~11"]])
def test_captures_that_are_left_are_found_whichever_were_deleted(tmp_path, deleted):
    every = ["r1", *(f"r1~{number}" for number in range(2, 12))]
    for number in range(11):
        write(tmp_path, {"r1": (1, 1 + number), "other": (1, 1)}, SITES, on_collision="suffix")
    for name in deleted:
        shutil.rmtree(tmp_path / name)
    left = [1 + number for number, name in enumerate(every) if name not in deleted]
    for _ in range(2):
        dataset = capflow.open(tmp_path)
        assert dataset.requests() == ["other", "r1"]
        assert [len(capture[SITES[0]].rows) for capture in dataset if capture.id == "r1"] == left
        assert [len(capture[SITES[0]].rows) for capture in dataset.captures("r1")] == left
        assert len(dataset["r1"][SITES[0]].rows) == left[-1]
        assert "r1" in dataset
        dataset.verify()
        write(tmp_path, {"r1": (1, 30)}, SITES, on_collision="suffix")  # and a new one is the last
        left = [*left, 30]
        assert [len(capture[SITES[0]].rows) for capture in dataset if capture.id == "r1"] == left
        assert len(dataset["r1"][SITES[0]].rows) == 30


def test_captures_that_a_living_writer_adds_and_a_user_deletes_stay_in_order(tmp_path):
    consumer = opened(tmp_path, on_collision="suffix")
    dataset = None
    for number in range(1, 8):
        consumer.on_frame(make_frame([("r1", 4, 0, number)], seq=number))
        consumer.on_request_done(done(computed_length=number))
        dataset = dataset or capflow.open(tmp_path)
        if number in {3, 5}:
            shutil.rmtree(tmp_path / f"r1~{number - 1}")
    consumer.close()
    assert sorted(path.name for path in tmp_path.glob("r1*")) == ["r1", "r1~3", "r1~5", "r1~6", "r1~7"]
    assert len(dataset["r1"][0, "post_block"].rows) == 7


@pytest.mark.parametrize(("on_collision", "status"), [("error", "error"), ("overwrite", "ok")])
def test_a_name_is_taken_by_what_is_left_of_it(tmp_path, on_collision, status):
    for number in (1, 2):
        write(tmp_path, {"r1": (1, number)}, SITES, on_collision="suffix")
    shutil.rmtree(tmp_path / "r1")
    consumer = opened(tmp_path, on_collision=on_collision)
    consumer.on_frame(make_frame([("r1", 4, 0, 4)]))
    result = consumer.on_request_done(done())
    consumer.close()
    assert result.status == status
    assert status == "ok" or f"{tmp_path}/r1~2 exists already" in result.error
    assert [path.name for path in tmp_path.glob("r1*")] == ["r1~2"]
    assert len(capflow.open(tmp_path)["r1"].sites) == (1 if status == "ok" else 2)


def test_what_is_not_there_is_named_with_what_is(root):
    dataset = capflow.open(root)
    with pytest.raises(UsageError, match=r"no such request: got zzz; requests\(\) lists the ids"):
        dataset["zzz"]
    with pytest.raises(UsageError, match=r"got post_block:0, expected one of post_block:2, mlp_out:3"):
        dataset["a"][0, "post_block"]
    with pytest.raises(UsageError, match=r'expected \(layer, hook\) or "hook:layer"'):
        dataset["a"][7]


def test_what_is_not_a_data_set_is_refused(root, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "missing", "missing: got nothing, expected the root directory of a captured data set"),
        (root / "a" / "request.json", "request.json: got a file, expected the root directory"),
        (root / "a", f"got one request's directory, expected the root above it; open {root} and index it"),
        (tmp_path / "empty", "empty is not a captured data set: expected directories with a request.json"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            capflow.open(path)


def test_reading_loads_neither_torch_nor_vllm_nor_zmq(root):
    script = (
        "import sys, capflow; capflow.open(sys.argv[1])['a'][2, 'post_block'];"
        "print([m for m in ('torch', 'vllm', 'zmq', 'duckdb') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_the_snippets_of_the_documentation_work_as_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "data.md").read_text()
    for request, options, mark, count in (("r1", {}, "", 7), ("r2", {"layout": "sharded"}, " needs:shards", 1)):
        consumer = FilesystemConsumer(FilesystemConfig("rows", **options))
        consumer.open(None)
        sites = (Site(12, "post_block"),)
        consumer.on_frame(make_frame([(request, 3, 0, 5)], sites, hidden=640, dtype="bfloat16", texts=True))
        consumer.on_request_done(RequestDone("engine-1", request, "stop", 3, 5, 5, 5, ()))
        consumer.close()
        snippets = re.findall(rf"```python{mark}\n(.*?)```", text, re.DOTALL)
        assert len(snippets) == count
        names = {}
        exec("".join(snippets), names)  # noqa: S102 - our own documentation
    assert names["vectors"].shape == (2, 640)


def test_the_documentation_names_every_option_and_every_key_of_the_sidecar():
    text = (ROOT / "docs" / "data.md").read_text()
    for field in msgspec.structs.fields(FilesystemConfig):
        default = "" if field.default is msgspec.NODEFAULT else str(field.default).lower()
        assert re.search(rf"^\| `{field.name}` \|.*{default}", text, re.MULTILINE), field.name
    for field in msgspec.structs.fields(layout.Sidecar):
        assert re.search(rf"^\|.*`{field.name}`.*\|", text, re.MULTILINE), field.name
