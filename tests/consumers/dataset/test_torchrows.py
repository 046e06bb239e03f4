from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError
from tests.kit.captured import IDS, LAYOUTS, REQUESTS, SITES, STORED, write
from tests.kit.frames import row_of, token_of
from tests.kit.sources import ROOT

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from capflow_consumers.dataset.torch_rows import _SHARE_ROWS, TorchRows  # noqa: E402

MANY = {f"r{number}": (3, 7 + 13 * number) for number in range(12)}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("set") / "rows")


@pytest.fixture(scope="module", params=LAYOUTS)
def many(tmp_path_factory, request):
    """942 tokens of 12 requests, at 3 sites."""
    return write(tmp_path_factory.mktemp("set") / "rows", MANY, layout=request.param)


def all_of(requests, sites=SITES, dtype="bfloat16"):
    """Count the rows of a data set, each as bytes with its site, position and token id."""
    return Counter(
        (row_of(name, site, p, dtype=dtype).tobytes(), site, p, token_of(name, p))
        for name, (_, computed) in requests.items()
        for site in sites
        for p in range(computed)
    )


def items(rows, batches):
    """Return the rows of batches in the same form, in order."""
    rows_of = []
    for batch in batches:
        tensor = batch.rows
        assert tensor.shape == (len(batch.sites), rows.hidden_size)
        assert (batch.sites.dtype, batch.positions.dtype, batch.token_ids.dtype) == (
            torch.int64,
            torch.int64,
            torch.int32,
        )
        raw = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        places = zip(batch.sites.tolist(), batch.positions.tolist(), batch.token_ids.tolist(), strict=True)
        rows_of += [
            (row.tobytes(), rows.sites[site], p, token) for row, (site, p, token) in zip(raw, places, strict=True)
        ]
    return rows_of


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("shuffle_rows", [0, 100, 100_000])
def test_every_row_comes_once_an_epoch_whoever_loads(many, workers, shuffle_rows):
    rows = TorchRows(many, batch_rows=50, shuffle_rows=shuffle_rows)
    loader = DataLoader(rows, batch_size=None, num_workers=workers)
    batches = list(loader)
    assert Counter(items(rows, batches)) == all_of(MANY)
    assert rows.rows_total == sum(len(batch.rows) for batch in batches) == 3 * sum(n for _, n in MANY.values())
    assert sum(len(batch.rows) < 50 for batch in batches) <= max(1, workers)


@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (5, 0), (2, 3)])
def test_every_row_comes_to_one_rank_and_the_shares_are_even(many, world_size, workers):
    counts, sizes = Counter(), []
    for rank in range(world_size):
        rows = TorchRows(many, batch_rows=64, shuffle_rows=200, rank=rank, world_size=world_size)
        mine = items(rows, DataLoader(rows, batch_size=None, num_workers=workers))
        sizes.append(len(mine))
        counts.update(mine)
    assert counts == all_of(MANY)
    assert max(sizes) - min(sizes) <= _SHARE_ROWS * max(1, workers)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_ranks_of_torch_distributed_share_without_being_told(many, tmp_path):
    """Two processes of a gloo group, each with two workers of its own."""
    script = (
        "import sys, torch, torch.distributed as dist\n"
        "from torch.utils.data import DataLoader\n"
        "from capflow_consumers.dataset.torch_rows import TorchRows\n"
        "path, store, rank = sys.argv[1:]\n"
        "dist.init_process_group('gloo', init_method=f'file://{store}', rank=int(rank), world_size=2)\n"
        "rows = TorchRows(path, shuffle_rows=100)\n"
        "count = torch.tensor(0); total = torch.tensor(0, dtype=torch.int64)\n"
        "for batch in DataLoader(rows, batch_size=None, num_workers=2):\n"
        "    count += len(batch.rows); total += ((batch.sites + 1) * (batch.positions + 7) * batch.token_ids).sum()\n"
        "mine = int(count)\n"
        "dist.all_reduce(count); dist.all_reduce(total)\n"
        "print(rows.rank, rows.world_size, mine < int(count), int(count), int(total), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(many), str(tmp_path / "store"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    everything = all_of(MANY)
    sites = TorchRows(many).sites
    total = sum((sites.index(site) + 1) * (p + 7) * token for _, site, p, token in everything)
    assert outputs == [f"{rank} 2 True {everything.total()} {total}\n" for rank in (0, 1)]


def test_ranks_of_torchrun_are_known_before_a_group_is(root, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    rows = TorchRows(root)
    assert (rows.rank, rows.world_size) == (1, 4)


def test_a_seed_an_epoch_and_a_share_make_the_order(many):
    def order(rows):
        return items(rows, rows)

    def fresh(**options):
        return TorchRows(many, batch_rows=50, **{"shuffle_rows": 300, **options})

    first = order(fresh())
    assert order(fresh()) == first
    assert order(fresh(seed=1)) != first
    rows = fresh()
    rows.set_epoch(1)
    second = order(rows)
    assert second != first
    assert Counter(second) == Counter(first)
    rows.set_epoch(0)
    assert order(rows) == first


def test_workers_that_persist_see_the_epoch_change(root):
    rows = TorchRows(root, batch_rows=40, shuffle_rows=100)
    loader = DataLoader(rows, batch_size=None, num_workers=1, persistent_workers=True)
    first, again = items(rows, loader), items(rows, loader)
    rows.set_epoch(1)
    assert first == again != items(rows, loader)


@pytest.mark.long
def test_workers_that_are_spawned_read_the_same(root):
    rows = TorchRows(root, batch_rows=40, shuffle_rows=100)
    loader = DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert items(rows, loader) == items(rows, rows)


def test_without_shuffling_rows_come_as_they_lie(root):
    rows = TorchRows(root, ["mlp_out:3"], batch_rows=20, shuffle_rows=0)
    batches = list(rows)
    assert [len(batch.rows) for batch in batches] == [20] * 8 + [2]
    places = [(site, p, token) for _, site, p, token in items(rows, batches)]
    expected = [(SITES[2], p, token_of(name, p)) for name in ("a", "b/c", "long") for p in range(REQUESTS[name][1])]
    assert places == expected


def test_a_shuffled_batch_mixes_what_the_buffer_holds(many):
    """With a buffer for all rows, the first batch is a fair sample of them: sites, positions, requests."""
    rows = TorchRows(many, batch_rows=600, shuffle_rows=100_000)
    first = next(iter(rows))
    share = 600 / rows.rows_total
    for site in range(3):
        assert abs(int((first.sites == site).sum()) / 600 - 1 / 3) < 0.1
    early = sum(min(n, 50) for _, n in MANY.values()) * 3
    assert abs(int((first.positions < 50).sum()) - early * share) < 100
    firsts = [items(rows, itertools.islice(iter(rows), 1))[0] for rows in (TorchRows(many, seed=s) for s in range(8))]
    assert len(set(firsts)) > 4, "not always the same row first"


@pytest.mark.parametrize(
    ("stored", "asked"), [("bfloat16", None), ("float16", None), ("float32", None), ("bfloat16", "float32")]
)
def test_dtypes_come_bit_for_bit_or_as_asked(tmp_path, stored, asked):
    root = write(tmp_path / "rows", {"r": (2, 40)}, SITES[:1], dtype=stored)
    rows = TorchRows(root, shuffle_rows=0, dtype=asked and getattr(torch, asked))
    (batch,) = list(DataLoader(rows, batch_size=None))
    assert batch.rows.dtype == getattr(torch, asked or stored)
    expected = np.stack([row_of("r", SITES[0], p, dtype=stored) for p in range(40)]).astype(np.float32)
    assert batch.rows.float().numpy().tobytes() == expected.tobytes()


def test_batches_are_the_callers_and_stay_as_they_are(root):
    rows = TorchRows(root, batch_rows=30, shuffle_rows=60)
    iterator = iter(rows)
    first = next(iterator)
    kept = first.rows.clone()
    list(iterator)
    assert torch.equal(first.rows, kept)
    first.rows.zero_()
    assert Counter(items(rows, rows)) == all_of(REQUESTS)


def test_sites_of_several_dtypes_need_one_to_be_chosen(tmp_path):
    write(tmp_path / "rows", {"a": (2, 5)}, SITES[:1], dtype="bfloat16")
    write(tmp_path / "rows", {"b": (2, 5)}, SITES[:1], dtype="float32")
    with pytest.raises(UsageError, match="rows: got dtypes bfloat16, float32; choose one with dtype="):
        TorchRows(tmp_path / "rows")
    rows = TorchRows(tmp_path / "rows", dtype=torch.bfloat16)
    assert sum(len(batch.rows) for batch in rows) == 10


@pytest.mark.parametrize("world_size", [1, 3])
def test_captures_of_one_id_all_come(tmp_path, world_size):
    expected = Counter()
    for computed in (90, 150):
        write(tmp_path / "rows", {"r": (2, computed)}, on_collision="suffix")
        expected.update(all_of({"r": (2, computed)}))
    counts = Counter()
    for rank in range(world_size):
        rows = TorchRows(tmp_path / "rows", rank=rank, world_size=world_size)
        counts.update(items(rows, rows))
    assert counts == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"sites": ["post_block:9"]},
            r"sites: got post_block:9, expected one of post_block:2, post_block:3, mlp_out:3",
        ),
        ({"sites": ["nonsense"]}, r"site: got nonsense, expected HOOK:LAYER"),
        ({"batch_rows": 0}, r"batch_rows: got 0, expected an integer of 1 or more"),
        ({"shuffle_rows": -1}, r"shuffle_rows: got -1, expected an integer of 0 or more"),
        ({"seed": 0.5}, r"seed: got 0.5, expected an integer"),
        ({"rank": 2, "world_size": 2}, r"rank, world_size: got \(2, 2\), expected both"),
        ({"rank": 0}, r"rank, world_size: got \(0, None\), expected both"),
    ],
)
def test_what_cannot_be_is_refused(root, options, words):
    with pytest.raises(UsageError, match=words):
        TorchRows(root, **options)


def test_what_is_no_data_set_and_one_without_rows_are_refused(tmp_path):
    with pytest.raises(UsageError, match="got nothing, expected the root directory"):
        TorchRows(tmp_path / "no")
    (tmp_path / ".lock").touch()
    with pytest.raises(UsageError, match="got no rows, expected a data set that has some"):
        TorchRows(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_that_comes_later_is_an_error_and_not_fewer_rows(tmp_path, workers):
    root = write(tmp_path / "rows")
    rows = TorchRows(root)
    file = root / "long" / "mlp_out.003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CapflowError, match=r"mlp_out\.003\.safetensors"):
        list(DataLoader(rows, batch_size=None, num_workers=workers))


def test_a_capture_that_was_replaced_or_removed_is_an_error(tmp_path):
    root = write(tmp_path / "rows")
    rows = TorchRows(root)
    write(root, {"long": (4, 20)}, on_collision="overwrite")
    with pytest.raises(CapflowError, match="request 'long' has changed; make a new TorchRows"):
        list(rows)
    assert sum(len(batch.rows) for batch in TorchRows(root)) == 3 * (9 + 3 + 20)


@pytest.mark.long
@pytest.mark.parametrize("options", STORED, ids=IDS)
def test_memory_is_bounded_by_the_buffer(tmp_path, options):
    """A request of 96 MiB is read in a process that may take 64 MiB more than before."""
    root = write(tmp_path / "rows", {"r": (1, 6144)}, [Site(0, "post_block")], dtype="float32", hidden=4096, **options)
    script = (
        "import resource, sys; from capflow_consumers.dataset.torch_rows import TorchRows\n"
        "rows = TorchRows(sys.argv[1], batch_rows=256, shuffle_rows=1024)\n"  # 16 MiB, 4 MiB a batch
        "have = int(open('/proc/self/status').read().split('VmData:')[1].split()[0]) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (have + (64 << 20),) * 2)\n"
        "print(sum(len(batch.rows) for batch in rows))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=False)
    assert done.stdout == "6144\n", done.stderr


def test_the_training_loop_of_the_documentation_runs_as_pasted(tmp_path):
    write(tmp_path / "rows", {"r1": (3, 5)}, (Site(12, "post_block"),), hidden=640)
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python torch\n(.*?)```", text, re.DOTALL)
    command = [sys.executable, "-c", snippet]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line[:15] for line in done.stdout.splitlines()] == ["0 post_block:12"] * 3 + ["1 post_block:12"] * 3
