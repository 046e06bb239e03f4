from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.errors import CapflowError
from capflow_consumers.dataset.capture import shown
from capflow_consumers.dataset.reader import DirectoryCapture
from capflow_consumers.dataset.shards import file as shardfile
from capflow_consumers.inspect.norms import NormStats
from capflow_consumers.inspect.norms_plot import plot_norms
from capflow_consumers.inspect.survey import Surveyor
from tests.kit.captured import IDS, LAYOUTS, REQUESTS, SITES, STORED, flip, run, write
from tests.kit.frames import row_of


def inspect(*arguments):
    """Return what `capflow inspect` says to these arguments."""
    return run("inspect", *arguments)


@pytest.fixture
def root(tmp_path):
    return write(tmp_path / "rows")


@pytest.fixture(params=LAYOUTS)
def any_root(tmp_path, request):
    return write(tmp_path / "rows", layout=request.param)


# What is there.


def test_everything_is_counted(any_root):
    root = any_root
    done = inspect(root, "--json")
    assert done.returncode == 0, done.stderr
    survey = json.loads(done.stdout)
    tokens = sum(computed for _, computed in REQUESTS.values())
    assert (survey["captures"], survey["rows"], survey["bytes"]) == (3, tokens * 3, tokens * 3 * 8 * 2)
    assert survey["bytes_on_disk"] == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert (survey["positions"], survey["prompt_tokens"]) == (150, 47)
    assert survey["models"] == {"test-model": 3}
    assert (survey["ended"], survey["statuses"]) == ({"stop": 3}, {"ok": 3})
    assert [site["site"] for site in survey["sites"]] == ["post_block:2", "post_block:3", "mlp_out:3"]
    assert (survey["damaged"], survey["gaps"], survey["dropped"]) == ([], [], {})


def test_norms_are_those_of_the_rows(any_root):
    survey = json.loads(inspect(any_root, "--json").stdout)
    for site in SITES:
        rows = [row_of(name, site, p, dtype="bfloat16") for name, (_, n) in REQUESTS.items() for p in range(n)]
        norms = np.linalg.norm(np.stack(rows).astype(np.float64), axis=1)
        (stats,) = [one for one in survey["sites"] if one["site"] == str(site)]
        assert (stats["rows"], stats["dtypes"], stats["hidden_sizes"]) == (len(rows), ["bfloat16"], [8])
        assert stats["norm_mean"] == pytest.approx(norms.mean())
        assert (stats["norm_min"], stats["norm_max"]) == pytest.approx((norms.min(), norms.max()))
        assert stats["norm_median"] == pytest.approx(np.median(norms), rel=0.02)


def test_people_are_shown_the_same(root):
    output = inspect(root).stdout
    for words in (
        "3 ok 3; requests ended stop 3",
        "test-model 3",
        "486 at 150 positions",
        "[162, 8]",
        "bfloat16",
        "all right",
    ):
        assert words in output


def test_quick_reads_no_rows(root):
    flip(next(root.glob("a/*.safetensors")))
    done = inspect(root, "--quick", "--json")
    assert done.returncode == 0
    survey = json.loads(done.stdout)
    assert (survey["rows"], survey["checked"], survey["sites"][0]["norm_mean"]) == (486, False, None)


def test_rows_that_are_not_finite_are_counted_and_have_no_norm():
    stats = NormStats()
    rows = np.ones((5, 4), np.float32)
    rows[1, 2], rows[3, 0] = np.nan, np.inf
    stats.add(rows, np.arange(5))
    assert (stats.rows, stats.rows_not_finite, stats.mean, stats.max) == (5, 2, 2.0, 2.0)
    assert np.isnan(stats.column_norms[[1, 3]]).all()


def test_columns_widen_when_positions_outgrow_them():
    stats = NormStats()
    positions = np.arange(5000)
    for some in np.split(positions, 10):
        stats.add((some[:, None] + 1.0).astype(np.float32), some)
    assert stats.column_width == 8
    expected = (positions + 1.0).reshape(-1, 8).mean(axis=1)
    np.testing.assert_allclose(stats.column_norms, expected)


# What is missing or damaged.


def test_gaps_name_positions_and_reasons(tmp_path):
    dropped = {"long": [(21, "queue_full"), (4, "spool_full"), (2, "queue_full")]}
    root = write(tmp_path / "rows", dropped=dropped, lost={"long": (20, 27)})
    done = inspect(root, "--json")
    assert done.returncode == 0
    survey = json.loads(done.stdout)
    (gap,) = survey["gaps"]
    assert (gap["request"], gap["status"]) == ("long", "partial_error")
    assert gap["dropped"] == survey["dropped"] == {"queue_full": 23, "spool_full": 4}
    assert gap["missing"] == {str(site): "7 rows" for site in SITES}  # no site has them, so which is in `error`
    assert "got 0..20 27..150, expected 0..150" in gap["error"]
    assert survey["rows_missing"] == 21
    output = inspect(root).stdout
    assert "'long' partial_error" in output
    assert "1 captures, 21 rows missing, dropped queue_full 23, spool_full 4" in output


def test_positions_are_shown_in_runs():
    assert shown(np.array([0, 1, 2, 7, 9, 10])) == "0..2 7 9..10"
    assert shown(np.arange(0, 40, 2)) == "0 2 4 6 8 10 12 14 and 12 more"


@pytest.mark.parametrize("index", [-1, 600])
def test_one_flipped_bit_is_found_named_and_left_out_of_the_norms(root, index):
    flip(root / "long" / "mlp_out.003.safetensors", index)
    done = inspect(root, "--json")
    assert done.returncode == 1
    assert done.stderr.startswith(f"capflow: {root}: 1 of 3 captures are damaged; the first: request 'long'")
    assert "mlp_out.003.safetensors: got checksum" in done.stderr
    survey = json.loads(done.stdout)
    assert (survey["captures_damaged"], survey["rows"]) == (1, 36)
    assert "damaged   request 'long'" in inspect(root).stdout


@pytest.mark.parametrize("kept", [0, 100, 600])
def test_a_truncated_file_is_found_also_by_a_quick_look(root, kept):
    file = root / "a" / "post_block.002.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    for options in ((), ("--quick",)):
        done = inspect(root, *options)
        assert done.returncode == 1
        assert "1 of 3 captures are damaged" in done.stderr
        assert str(file) in done.stderr


@pytest.mark.parametrize("layout", ["packed", "sharded"])
def test_no_flipped_bit_and_no_missing_end_goes_unseen(tmp_path, layout):
    root = write(tmp_path / "rows", {"a": (2, 5), "b": (2, 3)}, layout=layout)
    for file in (path for path in root.rglob("*") if path.is_file() and path.stat().st_size):
        whole = file.read_bytes()
        for index in range(0, len(whole), len(whole) // 25):
            flip(file, index)
            done = inspect(root)
            assert done.returncode == 1, (file, index)
            assert str(file) in done.stderr
            file.write_bytes(whole[:index])
            assert inspect(root).returncode == 1, (file, index)
            file.write_bytes(whole)
    assert inspect(root).returncode == 0


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"format": 1}'])
def test_a_sidecar_that_cannot_be_read_is_damage(root, damage):
    (root / "b-c~x").mkdir()
    (root / "b-c~x" / "request.json").write_bytes(damage)
    done = inspect(root)
    assert done.returncode == 1
    assert f"1 of 4 captures are damaged; the first: {root}/b-c~x/request.json: got " in done.stderr
    assert "486 at 150 positions" in done.stdout


def test_all_damage_is_named_and_the_rest_is_surveyed_and_drawn(tmp_path):
    root = write(tmp_path / "rows", {"a": (2, 5), "b": (2, 3), "c": (2, 4)})
    for number in range(3):
        write(root, {f"s{number}": (2, 6)}, layout="sharded")
    flip(root / "a" / "request.json", 30)
    flip(root / "b" / "post_block.002.safetensors")
    for number, path in enumerate(sorted(root.glob("*.parquet"))[:2]):
        flip(path, (-200, 1)[number])
    done = inspect(root, "--json", "--png", tmp_path / "norms.png")
    assert done.returncode == 1
    survey = json.loads(done.stdout)
    assert (survey["captures"], survey["captures_damaged"], survey["statuses"]) == (6, 4, {"ok": 5})
    for words in ("a/request.json", "b/post_block.002.safetensors", "/shard~000001", "/shard~000002"):
        assert sum(words in damage for damage in survey["damaged"]) == 1, words
    assert survey["rows"] == 3 * (4 + 6 * 3)
    assert (drawn(tmp_path / "norms.png")[..., :3] < 0.8).any()


def test_nothing_is_drawn_when_nothing_is_whole(root, tmp_path):
    for path in root.glob("*/*.safetensors"):
        flip(path)
    done = inspect(root, "--png", tmp_path / "norms.png")
    assert done.returncode == 1
    assert "3 of 3 captures are damaged" in done.stderr
    assert not (tmp_path / "norms.png").exists()


def test_positions_that_cannot_be_are_damage(root, monkeypatch):
    dataset = capflow.open(root)
    capture = dataset["a"]
    rows = capture["post_block:2"]
    monkeypatch.setattr(type(capture), "__getitem__", lambda *_: rows._replace(positions=rows.positions[::-1]))
    survey = Surveyor(dataset, check=False).survey()
    assert survey.captures_damaged == 3
    assert "got 8 7 6 5 4 3 2 1 and 1 more, expected rising from 0 to below 9" in survey.damaged[0]


def test_a_capture_whose_engine_died_is_a_gap_and_no_damage(tmp_path):
    for layout in LAYOUTS:
        root = write(tmp_path / layout, layout=layout, died=["long"])
        done = inspect(root, "--json")
        assert done.returncode == 0, done.stderr
        survey = json.loads(done.stdout)
        assert (survey["rows"], survey["damaged"], survey["ended"]) == (486, [], {"stop": 2, "error": 1})
        assert [(gap["request"], gap["status"]) for gap in survey["gaps"]] == [("long", "partial_error")]
        assert capflow.open(root).damaged() == []
        capflow.open(root).verify()
        assert run("export", root, tmp_path / f"out-{layout}", "--to", "safetensors").returncode == 0


@pytest.mark.parametrize("ended", [True, False])
def test_positions_that_cannot_be_are_damage_to_verify_and_export_too(root, tmp_path, monkeypatch, ended):
    rows = capflow.open(root)["a"]["post_block:2"]
    wrong = rows.positions + 1 if ended else rows.positions[::-1]  # the last is after the request's end
    monkeypatch.setattr(DirectoryCapture, "__getitem__", lambda *_: rows._replace(positions=wrong))
    words = "positions of post_block:2: got "
    with pytest.raises(CapflowError, match=words):
        capflow.open(root).verify()
    assert words in run("export", root, tmp_path / "out", "--to", "safetensors").stderr
    assert words in inspect(root).stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "got nothing, expected the root directory of a captured data set"),
        (lambda path: path.write_text("x"), "got a file, expected the root directory"),
        (lambda path: path.mkdir(), "is not a captured data set"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path, make, words):
    make(tmp_path / "x")
    done = inspect(tmp_path / "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_data_set_without_captures_is_nothing_wrong(tmp_path):
    root = write(tmp_path / "rows", {"r": (4, 4)})
    for file in (root / "r").iterdir():
        file.unlink()
    done = inspect(root, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["captures"] == 0
    done = inspect(root, "--png", tmp_path / "x.png")
    assert done.returncode == 2
    assert "--png: no row has a norm above 0" in done.stderr
    assert not (tmp_path / "x.png").exists()


# The picture.


def drawn(file):
    """Return a picture's pixels, `[height, width, 4]`."""
    from matplotlib.image import imread

    return imread(file)


def test_the_picture_has_a_panel_for_each_hook(root, tmp_path):
    done = inspect(root, "--png", tmp_path / "norms.png")
    assert done.returncode == 0, done.stderr
    both = drawn(tmp_path / "norms.png")
    plot_norms({Site(2, "post_block"): stats_of(range(1, 9))}, tmp_path / "one.png", "")
    one = drawn(tmp_path / "one.png")
    assert both.shape[1] == one.shape[1] == 1300
    assert both.shape[0] > 1.5 * one.shape[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["norms.png", "one.png", "rows"]


def stats_of(norms, positions=None):
    """Return the stats of rows with these norms, by default at positions from 0."""
    stats = NormStats()
    norms = np.asarray(norms, np.float32)
    stats.add(norms[:, None], np.arange(len(norms)) if positions is None else np.asarray(positions))
    return stats


def test_colours_are_those_of_the_norms_whatever_one_row_is(tmp_path):
    """One row a million times the others leaves them their colours; a position without a row is grey."""
    norms = 2.0 ** np.linspace(0, 4, 400)
    norms[200] = 1e7
    positions = np.delete(np.arange(401), 300)
    plot_norms({Site(0, "post_block"): stats_of(norms, positions)}, tmp_path / "x.png", "")
    pixels = drawn(tmp_path / "x.png")[..., :3]
    line = pixels[pixels.shape[0] // 2]
    (grey,) = np.nonzero((abs(line - 0.85) < 0.02).all(axis=1))
    assert 1 <= len(grey) <= 8, "one column in 401 of 1,100 pixels, and what is about it"
    (coloured,) = np.nonzero(np.ptp(line[: grey[0] - 3], axis=1) > 0.2)
    (first, last) = line[coloured[[3, -3]]]
    assert first[1] < 0.1, "violet"
    assert last[1] > 0.6, "green: the scale is not stretched"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.jpg", "expected a file whose name ends in .png"),
        ("no/x.png", "whose directory does not exist; make it first"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_anything_is_read(root, tmp_path, name, words):
    flip(root / "a" / "post_block.002.safetensors")
    done = inspect(root, "--png", tmp_path / name)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_without_matplotlib_the_extra_is_named(root, tmp_path, monkeypatch):
    from capflow import extras
    from capflow.errors import UsageError
    from capflow_consumers.inspect import norms_plot as normsplot

    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--png: missing package matplotlib; pip install 'capflow\[plot\]'"):
        normsplot.check_plot(tmp_path / "x.png")


# Size.


def survey_within(root, room):
    """Return how many rows are found by a process that may not have more memory than before by so many bytes."""
    script = (
        "import resource, sys, capflow; from capflow_consumers.inspect.survey import Surveyor\n"
        "surveyor = Surveyor(capflow.open(sys.argv[1]))\n"
        "have = int(open('/proc/self/status').read().split('VmData:')[1].split()[0]) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (have + int(sys.argv[2]),) * 2)\n"
        "survey = surveyor.survey()\n"
        "print(survey.rows, survey.damaged)\n"
    )
    command = [sys.executable, "-c", script, str(root), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


@pytest.mark.long
@pytest.mark.parametrize("options", STORED, ids=IDS)
def test_memory_does_not_grow_with_the_data_set(tmp_path, options):
    """A request of 96 MiB is looked through by a process that may not have 64 MiB more than before."""
    root = write(tmp_path / "rows", {"r": (1, 6144)}, SITES[:1], dtype="float32", hidden=4096, **options)
    assert survey_within(root, 64 << 20) == "6144 []\n"


@pytest.mark.parametrize("options", STORED, ids=IDS)
def test_memory_does_not_grow_with_a_request(tmp_path, options, monkeypatch):
    """The same with a request of 48 MiB, 24 MiB a site, of which a batch has 4, and 24 MiB more than before."""
    monkeypatch.setattr(shardfile, "BATCH_BYTES_MAX", 4 << 20)
    monkeypatch.setattr(shardfile, "COMPRESSED_BATCH_BYTES_MAX", 4 << 20)
    root = write(tmp_path / "rows", {"r": (1, 1536)}, SITES[:2], dtype="float32", hidden=4096, **options)
    assert survey_within(root, 24 << 20) == "3072 []\n"
