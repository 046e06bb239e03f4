"""The store: what modules and the global state come to, and that processes which share a directory agree on it."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError
from capflow.steering.clamp import Clamp
from capflow.steering.compiler import program_of
from capflow.steering.patch import Patch
from capflow.steering.request import NOTHING, ModuleUse, Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow_engine.steering.store import SteeringStore, UnknownModuleError

WIDTH = 8


def vector(number, layer=1, scale=1.0):
    return SteeringVector.make(Site(layer, "post_block"), np.full(WIDTH, number, np.float32), scale)


def base(*vectors, clamps=()):
    return Steering(base=Tier(vectors, clamps))


def direction(layer=1, strength=1.0):
    unit = np.eye(WIDTH, dtype=np.float32)[0]
    return Clamp(layer, "post_block", unit.tobytes(), low=0.0, high=0.0, strength=strength)


def uses(*modules):
    return Steering(modules=tuple(ModuleUse(*module) for module in modules))


@pytest.fixture(params=["in memory", "in files"])
def store(request, tmp_path):
    return SteeringStore(tmp_path if request.param == "in files" else None)


def test_a_request_without_anything_has_no_program(store):
    assert store.resolve(None, WIDTH) is None
    assert store.resolve(NOTHING, WIDTH) is None
    assert store.global_state == NOTHING


def test_modules_are_added_by_their_scales_to_what_a_request_brings_and_to_the_global_state(store):
    store.register("kind", base(vector(1.0), clamps=(direction(2),)))
    store.register("terse", Steering(decode=Tier((vector(5.0),))))
    store.set_global(base(vector(100.0)))
    asked = Steering(base=Tier((vector(10.0),)), modules=(ModuleUse("kind", 2.0), ModuleUse("terse")))
    owners = ("global", "module kind", "module terse", "request")
    kind = base(vector(2.0), clamps=(direction(2, strength=2.0),))
    parts = [base(vector(100.0)), kind, Steering(decode=Tier((vector(5.0),))), base(vector(10.0))]
    program = store.resolve(asked, WIDTH)
    assert program == program_of(WIDTH, parts, owners)
    (ops,) = (each for layer, _, each in program.decode if layer == 1)
    assert [(program.owners[op.owner], program.array()[op.row][0]) for op in ops] == [
        ("global", 100.0), ("module kind", 2.0), ("module terse", 5.0), ("request", 10.0),
    ]  # fmt: skip


def test_a_module_alone_is_worked_out_once_until_something_changes(store):
    store.register("kind", base(vector(1.0)))
    first = store.resolve(uses(("kind", 0.5)), WIDTH)
    assert store.resolve(uses(("kind", 0.5)), WIDTH) is first
    assert store.resolve(uses(("kind", 1.0)), WIDTH) != first
    store.register("kind", base(vector(2.0)))
    again = store.resolve(uses(("kind", 0.5)), WIDTH)
    assert again == program_of(WIDTH, [base(vector(1.0))], ["module kind"])
    assert first.id == program_of(WIDTH, [base(vector(0.5))]).id, "who runs keeps what it has"


def test_what_a_request_brings_itself_is_not_taken_for_the_module_that_it_names(store):
    store.register("kind", base(vector(1.0)))
    alone = store.resolve(uses(("kind",)), WIDTH)
    both = store.resolve(Steering(base=Tier((vector(1.0),)), modules=(ModuleUse("kind"),)), WIDTH)
    assert both != alone
    assert store.resolve(uses(("kind",)), WIDTH) == alone


def test_an_unknown_name_is_an_error_of_its_own_that_says_which_there_are(store):
    store.register("kind", base(vector(1.0)))
    for call in (
        lambda: store.resolve(uses(("unkind",)), WIDTH),
        lambda: store.get("unkind"),
        lambda: store.unregister("unkind"),
    ):
        with pytest.raises(UnknownModuleError, match=r"name: got unkind, .*\(kind\)"):
            call()
    store.unregister("kind")
    assert store.names == ()
    with pytest.raises(UnknownModuleError):
        store.resolve(uses(("kind",)), WIDTH)


def test_setting_the_global_state_changes_the_sites_it_names_and_replacing_it_all(store):
    store.set_global(base(vector(1.0, 0), vector(2.0, 1), clamps=(direction(0), direction(0), direction(1))))
    store.set_global(base(vector(3.0, 1), clamps=(direction(0, strength=0.5),)))
    state = store.global_state.base
    assert [(v.layer, float(v.array()[0])) for v in state.vectors] == [(0, 1.0), (1, 3.0)]
    assert [(c.layer, c.strength) for c in state.clamps] == [(1, 1.0), (0, 0.5)]
    store.set_global(base(vector(9.0, 0, scale=0.0), clamps=(direction(1, strength=0.0),)))
    state = store.global_state.base
    assert [v.layer for v in state.vectors] == [1]
    assert [c.layer for c in state.clamps] == [0]
    store.set_global(Steering(prefill=Tier((vector(4.0),))), replace=True)
    assert store.global_state == Steering(prefill=Tier((vector(4.0),)))
    store.clear_global()
    assert store.global_state == NOTHING


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (NOTHING, "vectors, clamps or features"),
        (uses(("other",)), "steering_name"),
        (Steering(patches=(Patch(0, "post_block", (0,), bytes(4 * WIDTH)),)), "steering_patches"),
    ],
)
def test_what_cannot_be_shared_is_refused(store, module, words):
    with pytest.raises(UsageError, match=words):
        store.register("module", module)
    with pytest.raises(UsageError, match=words):
        store.set_global(module)
    assert store.names == ()


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", 7, None])
def test_a_wrong_name_is_refused(store, name):
    with pytest.raises(UsageError, match="name: "):
        store.register(name, base(vector(1.0)))


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "ß", "x" * 256])
def test_a_name_never_becomes_a_path(tmp_path, name):
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    store = SteeringStore(inside)
    store.register(name, base(vector(1.0)))
    assert SteeringStore(inside).names == (name,)
    assert [path.name for path in tmp_path.rglob("*") if path.parent != inside] == ["a", "b"]


def test_files_hold_each_content_once_and_nothing_that_is_over(tmp_path):
    store = SteeringStore(tmp_path)
    for name in ("one", "other"):
        store.register(name, base(vector(1.0)))
    store.set_global(base(vector(1.0)))
    assert len(list(tmp_path.glob("*.steering"))) == 1
    store.clear_global()
    store.unregister("one")
    assert SteeringStore(tmp_path).get("other") == base(vector(1.0))
    store.unregister("other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generation", "index", "lock"]


def test_two_stores_of_one_directory_see_each_other(tmp_path):
    here, there = SteeringStore(tmp_path), SteeringStore(tmp_path)
    here.register("kind", base(vector(1.0)))
    program = there.resolve(uses(("kind",)), WIDTH)
    there.register("kind", base(vector(2.0)))
    there.set_global(base(vector(3.0)))
    assert here.resolve(uses(("kind",)), WIDTH) == program_of(
        WIDTH, [base(vector(3.0)), base(vector(2.0))], ["global", "module kind"]
    )
    assert program.id == program_of(WIDTH, [base(vector(1.0))]).id
    here.unregister("kind")
    assert there.names == ()


_CHILD = """
import sys
from pathlib import Path
import numpy as np
from capflow.capture.site import Site
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow_engine.steering.store import SteeringStore

store = SteeringStore(Path(sys.argv[1]))
for line in sys.stdin:
    word, name, number = line.split()
    if word == "register":
        made = SteeringVector.make(Site(1, "post_block"), np.full(8, float(number), np.float32))
        store.register(name, Steering(base=Tier((made,))))
        print("done", flush=True)
    else:
        print(store.get(name).base.vectors[0].array()[0], flush=True)
"""


def test_another_process_sees_a_change_with_its_next_question(tmp_path):
    store = SteeringStore(tmp_path)
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:

        def ask(*words):
            child.stdin.write(" ".join(map(str, words)) + "\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        for number in range(1, 30):  # faster than a clock of files ticks
            store.register("kind", base(vector(float(number))))
            assert ask("get", "kind", 0) == f"{number}.0"
        assert ask("register", "terse", 7) == "done"
        assert store.get("terse") == base(vector(7.0))
        child.stdin.close()


def test_changes_at_once_are_all_kept_and_readers_see_whole_modules(tmp_path):
    """Four stores change, as four processes would: each has its own lock on the directory."""
    stores = [SteeringStore(tmp_path) for _ in range(4)]
    reader, over, seen = SteeringStore(tmp_path), threading.Event(), set()

    def change(number, store):
        for turn in range(25):
            store.register(f"mine-{number}", base(vector(float(turn))))
            store.register("ours", base(vector(float(number)), vector(float(number), 2)))

    def read():
        while not over.is_set():
            if "ours" in reader.names:
                one, other = reader.get("ours").base.vectors
                seen.add((float(one.array()[0]), float(other.array()[0])))

    threads = [threading.Thread(target=change, args=each) for each in enumerate(stores)]
    watching = threading.Thread(target=read)
    for thread in (watching, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    watching.join()
    assert reader.names == ("mine-0", "mine-1", "mine-2", "mine-3", "ours")
    assert all(reader.get(f"mine-{n}") == base(vector(24.0)) for n in range(4))
    assert seen
    assert all(one == other for one, other in seen)


def test_a_store_whose_directory_is_gone_keeps_what_it_has_and_refuses_changes(tmp_path):
    directory = tmp_path / "store"
    directory.mkdir()
    store = SteeringStore(directory)
    store.register("kind", base(vector(1.0)))
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    assert store.get("kind") == base(vector(1.0))
    with pytest.raises(CapflowError, match="steering store"):
        store.register("kind", base(vector(2.0)))
    assert store.get("kind") == base(vector(1.0))
