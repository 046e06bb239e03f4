from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from safetensors import safe_open

import capflow
from capflow import extras
from capflow.capture.site import Site
from capflow_consumers.dataset.contents import SiteContents
from capflow_consumers.dataset.names import slug
from capflow_consumers.export import saelens as tosaelens
from capflow_consumers.export import selection
from capflow_consumers.export.destination import Destination, Export
from tests.kit.captured import IDS, LAYOUTS, REQUESTS, SITES, STORED, flip, run, write
from tests.kit.exports import export, root, rows_at
from tests.kit.frames import make_finished, make_frame, row_of, token_of
from tests.kit.sources import ROOT
from tests.kit.stored import done as ended
from tests.kit.stored import opened

__all__ = ["root"]

# One safetensors file for each request.


def read(file):
    """Return a file's metadata and its tensors, as torch reads them; numpy has no bfloat16."""
    with safe_open(file, "pt") as opened:
        return opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def name_of(site):
    return f"{site.hook}.{site.layer:03d}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_each_request_becomes_a_file_with_all_that_it_has(tmp_path, dtype, layout):
    root = write(tmp_path / "rows", dtype=dtype, layout=layout)
    done = export(root, tmp_path / "out", "safetensors")
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in (tmp_path / "out").glob("*")} - {".capflow-export"} == {
        slug(name) for name in REQUESTS
    }
    for name, (prompt, computed) in REQUESTS.items():
        metadata, tensors = read(tmp_path / "out" / f"{slug(name)}.safetensors")
        assert (metadata["request"], metadata["model"], metadata["capture_status"]) == (name, "test-model", "ok")
        assert (int(metadata["prompt_length"]), int(metadata["computed_length"])) == (prompt, computed)
        assert len(tensors) == 3 * len(SITES)
        for site in SITES:
            rows = np.stack([row_of(name, site, p, dtype=dtype) for p in range(computed)])
            assert str(tensors[f"{name_of(site)}.rows"].dtype) == f"torch.{dtype}"
            assert tensors[f"{name_of(site)}.rows"].shape == rows.shape
            assert tensors[f"{name_of(site)}.rows"].float().numpy().tobytes() == rows.astype(np.float32).tobytes()
            assert tensors[f"{name_of(site)}.positions"].tolist() == list(range(computed))
            assert tensors[f"{name_of(site)}.token_ids"].tolist() == [token_of(name, p) for p in range(computed)]


def write_steered(root, *, is_said=True):
    """Store one request of ten positions, of which 3 and 7 to 9 were steered."""
    consumer = opened(root, SITES)
    steered = {"r1": (3, 4, 7, 10)} if is_said else None
    consumer.on_frame(make_frame([("r1", 4, 0, 10)], SITES, seq=1, steered=steered))
    finished = make_finished("r1", 4, 10)
    consumer.on_request_done(msgspec.structs.replace(ended(computed_length=10, rows=30), finished=(finished,)))
    consumer.close()
    return root


@pytest.mark.parametrize("unsteered", [False, True])
def test_a_file_says_which_rows_were_steered_or_has_none_of_them(tmp_path, unsteered):
    root = write_steered(tmp_path / "rows")
    finished = export(root, tmp_path / "out", "safetensors", *["--unsteered"] * unsteered)
    assert finished.returncode == 0, finished.stderr
    _, tensors = read(tmp_path / "out" / "r1.safetensors")
    positions = [0, 1, 2, 4, 5, 6] if unsteered else list(range(10))
    for site in SITES:
        assert tensors[f"{name_of(site)}.positions"].tolist() == positions
        assert tensors[f"{name_of(site)}.steered"].tolist() == [place in (3, 7, 8, 9) for place in positions]
        rows = np.stack([row_of("r1", site, place) for place in positions])
        assert tensors[f"{name_of(site)}.rows"].float().numpy().tobytes() == rows.astype(np.float32).tobytes()


@pytest.mark.parametrize("part_bytes", [1, 64, 8 << 20])
def test_cached_activations_may_leave_out_steered_rows(tmp_path, part_bytes, monkeypatch):
    import datasets

    monkeypatch.setattr(selection, "_PART_BYTES", part_bytes)
    root = write_steered(tmp_path / "rows")
    destination = Destination(tmp_path / "out", Export(str(root), "saelens", [], {}))
    destination.open()
    sites = {site: SiteContents(6, {(8,)}, {"float32"}) for site in SITES}
    (first, *_) = tosaelens.to_saelens(capflow.open(root), sites, destination, 3, lambda: None, unsteered=True)
    assert (first.contexts, first.rows_left) == (2, 0)
    loaded = datasets.load_from_disk(str(tmp_path / "out" / first.hook_name))
    assert np.array(loaded["token_ids"][:]).reshape(-1).tolist() == [
        token_of("r1", place) for place in (0, 1, 2, 4, 5, 6)
    ]


@pytest.mark.parametrize("to", ["saelens", "safetensors"])
def test_rows_whose_steering_is_not_stored_do_not_pass_for_unsteered_ones(tmp_path, to):
    root = write_steered(tmp_path / "rows", is_said=False)
    finished = export(root, tmp_path / "out", to, "--unsteered")
    assert finished.returncode == 2
    assert "--unsteered: got request r1, whose steered positions are not stored" in finished.stderr


def test_too_few_unsteered_rows_for_a_context_are_refused(tmp_path):
    root = write_steered(tmp_path / "rows")
    finished = export(root, tmp_path / "out", "saelens", "--unsteered", "--context-size", 7)
    assert finished.returncode == 2
    assert "rows at post_block:2: got 6, expected a context of 7" in finished.stderr


def test_rows_lie_in_the_files_bit_for_bit_and_aligned(root, tmp_path):
    export(root, tmp_path / "out", "safetensors", "--site", "post_block:3")
    whole = (tmp_path / "out" / "a.safetensors").read_bytes()
    assert int.from_bytes(whole[:8], "little") % 64 == 56
    rows = np.stack([row_of("a", SITES[1], p, dtype="bfloat16") for p in range(9)])
    assert rows.tobytes() in whole
    tensors = read(tmp_path / "out" / "a.safetensors")[1]
    assert set(tensors) == {f"post_block.003.{name}" for name in ("rows", "positions", "token_ids")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_capture_of_an_id_has_a_file(tmp_path, layout):
    for computed in (4, 5, 6):
        write(tmp_path / "rows", {"r": (2, computed)}, on_collision="suffix", layout=layout)
    assert export(tmp_path / "rows", tmp_path / "out", "safetensors").returncode == 0
    rows = {path.stem: len(read(path)[1]["mlp_out.003.rows"]) for path in (tmp_path / "out").glob("*.safetensors")}
    assert rows == {"r": 4, "r~2": 5, "r~3": 6}


def test_what_is_there_is_not_written_again_and_what_came_since_is_added(root, tmp_path):
    export(root, tmp_path / "out", "safetensors")
    file = tmp_path / "out" / "a.safetensors"
    os.utime(file, (1, 1))
    (tmp_path / "out" / ".partial-x.safetensors").write_bytes(b"left by a kill")
    write(root, {"new": (2, 3)})
    assert export(root, tmp_path / "out", "safetensors").stdout.endswith("1 files written, 3 already there\n")
    assert file.stat().st_mtime == 1
    assert sorted(path.name for path in (tmp_path / "out").glob(".*")) == [".capflow-export.json"]


def test_an_export_that_was_killed_goes_on_and_is_whole(tmp_path):
    """Killed after some files: what has a name is whole, and the next run writes the rest."""
    requests = {f"r{number}": (2, 5) for number in range(6)}
    root = write(tmp_path / "rows", requests)
    script = (
        "import os, sys; from capflow_consumers.export import safetensors as tosafetensors\n"
        "write, left = tosafetensors._write, [3]\n"
        "def dying(capture, sites, stream, **options):\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0: stream.write(b'half'); stream.flush(); os.kill(os.getpid(), 9)\n"
        "    write(capture, sites, stream, **options)\n"
        "tosafetensors._write = dying\n"
        "sys.argv[1:] = ['export', *sys.argv[1:], '--to', 'safetensors']\n"
        "from capflow.cli import main; main()\n"
    )
    out = tmp_path / "out"
    died = subprocess.run([sys.executable, "-c", script, str(root), str(out)], check=False)
    assert died.returncode == -9
    assert len(list(out.glob("r*.safetensors"))) == 3
    assert len(list(out.glob(".partial-*"))) == 1
    assert export(root, out, "safetensors").stdout.endswith("3 files written, 3 already there\n")
    assert not list(out.glob(".partial-*"))
    for name in requests:
        assert len(read(out / f"{name}.safetensors")[1]["mlp_out.003.rows"]) == 5


# SAELens.


@pytest.mark.parametrize(
    ("stored", "written"), [("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")]
)
def test_a_site_becomes_cached_activations_as_saelens_reads_them(tmp_path, stored, written):
    """What `ActivationsStore` of SAELens does with `cached_activations_path`, call by call."""
    import datasets
    import torch

    root = write(tmp_path / "rows", dtype=stored)
    done = export(root, tmp_path / "out", "saelens", "--context-size", 16)
    assert done.returncode == 0, done.stderr
    names = {"blocks.2.hook_resid_post", "blocks.3.hook_resid_post", "blocks.3.hook_mlp_out"}
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == names
    for site in SITES:
        name = site.transformer_lens_name
        assert f"hook_name={name} context_size=16 d_in=8 dtype={written}" in done.stdout
        loaded = datasets.load_from_disk(str(tmp_path / "out" / name))
        assert loaded.column_names == [name, "token_ids"]
        assert loaded.features[name].shape == (16, 8)
        assert loaded.features[name].dtype == written
        assert loaded.features["token_ids"] == datasets.Sequence(datasets.Value("int32"), length=16)
        loaded.set_format(type="torch", columns=loaded.column_names, device="cpu", dtype=torch.float32)
        whole = loaded[0 : len(loaded)]
        rows, token_ids = rows_at(site, stored)
        contexts = len(rows) // 16
        assert whole[name].shape == (contexts, 16, 8)
        assert whole[name].numpy().tobytes() == rows[: contexts * 16].astype(np.float32).tobytes()
        assert whole["token_ids"].reshape(-1).tolist() == token_ids[: contexts * 16].tolist()
    assert f"{contexts} contexts, {len(rows) - contexts * 16} rows left over" in done.stdout


@pytest.mark.parametrize("sizes", [(1, 1), (3000, 1), (1, 1000)])
def test_neither_batches_nor_files_show_in_what_is_read(root, tmp_path, monkeypatch, sizes):
    import datasets

    monkeypatch.setattr(tosaelens, "_BATCH_BYTES", sizes[0])
    monkeypatch.setattr(tosaelens, "_FILE_BYTES", sizes[1])
    export(root, tmp_path / "out", "saelens", "--context-size", 7, "--site", "post_block:2")
    where = tmp_path / "out" / "blocks.2.hook_resid_post"
    files = sorted(path.name for path in where.glob("*.arrow"))
    assert len(files) > 1
    assert files[0] == f"data-00000-of-{len(files):05d}.arrow"
    loaded = datasets.load_from_disk(str(where)).with_format("numpy")[:]
    rows, token_ids = rows_at(SITES[0])
    whole = len(rows) // 7
    assert loaded["blocks.2.hook_resid_post"].tobytes() == rows[: whole * 7].astype(np.float32).tobytes()
    assert loaded["token_ids"].reshape(-1).tolist() == token_ids[: whole * 7].tolist()


def test_sites_that_are_there_are_not_written_again(root, tmp_path):
    out = tmp_path / "out"
    export(root, out, "saelens", "--context-size", 8)
    file = out / "blocks.2.hook_resid_post" / "data-00000-of-00001.arrow"
    os.utime(file, (1, 1))
    shutil.rmtree(out / "blocks.3.hook_mlp_out")
    done = export(root, out, "saelens", "--context-size", 8)
    assert done.stdout.count("contexts") == 1
    assert file.stat().st_mtime == 1
    assert (out / "blocks.3.hook_mlp_out" / "state.json").is_file()


def test_fewer_rows_than_a_context_are_refused(root, tmp_path):
    done = export(root, tmp_path / "out", "saelens", "--context-size", 163)
    assert done.returncode == 2
    assert "rows at post_block:2: got 162, expected a context of 163; --context-size 162 or less" in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_datasets_the_extra_is_named(root, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    done = export(root, tmp_path / "out", "saelens")
    assert done.returncode == 2
    assert "--to saelens: missing package datasets; pip install 'capflow[saelens]'" in done.stderr


def test_rows_of_two_models_are_refused(tmp_path):
    write(tmp_path / "rows", {"a": (2, 20)})
    write(tmp_path / "rows", {"b": (2, 20)}, hidden=16)
    done = export(tmp_path / "rows", tmp_path / "out", "saelens", "--context-size", 4)
    assert done.returncode == 2
    assert re.search(r"rows at \S+: got widths \[8, 16\], expected rows of one model", done.stderr)
    assert export(tmp_path / "rows", tmp_path / "files", "safetensors").returncode == 0


# Whatever the format.


@pytest.mark.parametrize("to", ["saelens", "safetensors"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "post_block.002.safetensors: got checksum"),
        (lambda file: file.write_bytes(file.read_bytes()[:700]), "post_block.002.safetensors: got checksum"),
        (lambda file: file.unlink(), "post_block.002.safetensors: got No such file or directory"),
        (lambda file: flip(file.parent / "request.json", 20), "long/request.json: got "),
    ],
)
def test_damage_is_found_before_anything_is_written(root, tmp_path, to, damage, words):
    damage(root / "long" / "post_block.002.safetensors")
    done = export(root, tmp_path / "out", to)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_verify_what_cannot_be_read_is_still_refused(root, tmp_path):
    file = root / "long" / "post_block.002.safetensors"
    flip(file)
    assert export(root, tmp_path / "flipped", "safetensors", "--no-verify").returncode == 0
    file.write_bytes(file.read_bytes()[:-1])
    assert export(root, tmp_path / "cut", "safetensors", "--no-verify").returncode == 1


@pytest.mark.parametrize("to", ["saelens", "safetensors"])
def test_a_destination_with_anything_else_is_not_touched(root, tmp_path, to):
    out = tmp_path / "out"
    out.write_text("mine")
    assert "got a file; choose a new name" in export(root, out, to).stderr
    out.unlink()
    out.mkdir()
    (out / "mine").write_text("mine")
    done = export(root, out, to)
    assert done.returncode == 2
    assert "got a directory that is not empty" in done.stderr
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_another_export_is_not_mixed_with_the_one_that_is_there(root, tmp_path):
    out = tmp_path / "out"
    assert export(root, out, "saelens", "--context-size", 8).returncode == 0
    other = write(tmp_path / "other")
    for done, differs in (
        (export(root, out, "saelens", "--context-size", 9), "whose options differs"),
        (export(root, out, "saelens", "--context-size", 8, "--site", "mlp_out:3"), "whose sites differs"),
        (export(other, out, "saelens", "--context-size", 8), "whose source differs"),
        (export(root, out, "safetensors"), "whose format and options differ"),
    ):
        assert done.returncode == 2
        assert f"got another export, {differs}; remove the directory, or choose another name" in done.stderr
    (out / ".capflow-export.json").write_text("{")
    assert "remove the directory, or choose another name" in export(root, out, "saelens").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--site", "post_block:9"),
            "--site: got post_block:9, expected one of post_block:2, post_block:3, mlp_out:3;",
        ),
        (("--site", "nonsense"), "site: got nonsense, expected HOOK:LAYER"),
        (("--context-size", "4"), "--context-size is for --to saelens"),
    ],
)
def test_options_that_cannot_be_are_refused(root, tmp_path, arguments, words):
    done = export(root, tmp_path / "out", "safetensors", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_destination_inside_of_the_data_set_is_refused(root):
    for dest in (root, root / "out"):
        assert "expected a directory outside of the data set" in export(root, dest, "safetensors").stderr


def test_what_is_no_data_set_and_one_without_rows_are_refused(tmp_path):
    assert "got nothing, expected the root directory" in export(tmp_path / "no", tmp_path / "out", "saelens").stderr
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".lock").touch()
    done = export(tmp_path / "empty", tmp_path / "out", "safetensors")
    assert done.returncode == 2
    assert "got no rows, expected a data set that has some; a request appears when it has ended" in done.stderr


def test_a_full_disk_leaves_nothing_that_looks_whole(root, tmp_path):
    """The limit on a file's size stands for the disk's."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from capflow.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "sys.argv[1:] = ['export', *sys.argv[1:]]; main()\n"
    )
    for to in ("safetensors", "saelens"):
        command = [sys.executable, "-c", script, str(root), str(tmp_path / to), "--to", to, "--context-size", "64"]
        done = subprocess.run(command[: None if to == "saelens" else -2], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "cannot be written: got " in done.stderr
        assert "File too large" in done.stderr
        assert "make room, and run the same command again: it continues from here" in done.stderr
        assert not list((tmp_path / to).glob(".partial-*"))
        assert export(root, tmp_path / to, to, *(("--context-size", 64) if to == "saelens" else ())).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("options", STORED, ids=IDS)
@pytest.mark.parametrize("to", ["safetensors", "saelens"])
def test_memory_does_not_grow_with_the_data_set(tmp_path, to, options):
    """A request of 96 MiB is exported by a process that may not have 64 MiB more than before."""
    root = write(tmp_path / "rows", {"r": (1, 6144)}, SITES[:1], dtype="float32", hidden=4096, **options)
    script = (
        "import resource, sys, datasets, pyarrow; from capflow.cli import main\n"
        "have = int(open('/proc/self/status').read().split('VmData:')[1].split()[0]) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (have + (64 << 20),) * 2)\n"
        "sys.argv[1:] = ['export', *sys.argv[1:]]; main()\n"
    )
    command = [sys.executable, "-c", script, str(root), str(tmp_path / "out"), "--to", to]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_commands_of_the_documentation_run_as_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows", {"r1": (3, 5)}, (Site(12, "post_block"),))
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ capflow ((?:inspect|export) .*)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = run(*command.split())
        assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"rows", "norms.png", "as-files", "as-activations"}
    assert (tmp_path / "as-activations" / "blocks.12.hook_resid_post" / "state.json").is_file()
