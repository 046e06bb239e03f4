"""What many tests share: a tiny model, what Transformers computes with it, and a hub that keeps its rows.

Torch is imported by the fixtures that need it, so that the other tests start without it.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Threads of a model's kernels that wait, wait without a core: they would take it from the other tests, by the minute.
# It is read when torch is imported, here and in every process that the tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# One thread is a tenth faster for models as small as those of the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The processes of an engine sleep when they wait, so that hubs and clients beside it get a core at once.
SLEEPING_WAITS = str(Path(__file__).parent / "kit" / "sleeping_waits")
sys.path.append(SLEEPING_WAITS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SLEEPING_WAITS, os.environ.get("PYTHONPATH")]))

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # how long an example takes says something of the machine only


def slow_tests():
    """Return the tests and the files of tests that `slow.txt` lists, which are marked `slow`."""
    lines = Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def pytest_ignore_collect(collection_path, config):
    """Leave a file unread if no test of it has the marker that a run like `-m "engine and not long"` demands."""
    demanded = re.fullmatch(r"(\w+)( and not .*)?", config.option.markexpr)
    if demanded is None or demanded[1] == "slow" or not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    return f"mark.{demanded[1]}" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items):
    slow = slow_tests()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in slow or name.partition("::")[0] in slow:
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory):
    """Have spools without a place of their own lie below a directory of this run, also those of child processes."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the directory of a tiny model without a tokenizer; nothing may be written there."""
    from tests.kit.engines import save_tiny

    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def backend(tmp_path_factory):
    """A tiny model that vLLM's Transformers backend runs, its directory and what Transformers computes with it.

    Made once: the backend changes the class of the model, of which no other can be made in this process then.
    """
    from tests.kit.engines import BACKEND, save_tiny
    from tests.kit.steered import SteeredReference

    model = save_tiny(tmp_path_factory.mktemp("backend"), BACKEND)
    return model, SteeredReference(model)


@pytest.fixture(scope="session")
def tiny_with_words(tiny, tmp_path_factory):
    """Return the directory of the same model with a tokenizer beside it."""
    from tests.kit.engines import save_words

    directory = tmp_path_factory.mktemp("words") / "llama"
    shutil.copytree(tiny, directory)
    save_words(directory)
    return str(directory)


@pytest.fixture(scope="session")
def reference(tiny):
    """What Transformers computes with `tiny`, and with `tiny_with_words`."""
    from tests.kit.engines import Reference

    return Reference(tiny)


@pytest.fixture
def keeper(tmp_path_factory):
    """A consumer on a hub of this process, its address in `keeper.address`."""
    from tests.kit.rows import Keeper, kept

    with kept(Keeper(), tmp_path_factory) as keeper:
        yield keeper
