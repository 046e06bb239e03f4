"""The surface table has every name of vLLM that the source imports, overrides or replaces, and no other."""

import ast
import contextlib
import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from capflow.errors import CapflowError, UsageError
from capflow_engine.compat import engine as compat
from capflow_engine.compat.versions import contract
from capflow_engine.compat.versions.surface import (
    BEAM_SEARCH,
    CORE,
    DRAFTS,
    FEATURES,
    GRPC,
    HTTP,
    LORA,
    OPTIONAL,
    OVERRIDES,
    PARALLEL,
    READS,
    REPLACED,
    REPLICAS,
    SYMBOLS,
    V2_RUNNER,
)
from tests.kit.sources import modules

SOURCES = {
    name: ast.parse(path.read_text(encoding="utf-8"))
    for name, path in modules().items()
    if name.partition(".")[0] in ("capflow_engine", "capflow_models") and not name.endswith(("_pb2", "_pb2_grpc"))
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def named(place):
    """Return what `module:Class.name` names."""
    module, _, path = place.partition(":")
    value = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def functions(tree, prefix=""):
    """Yield the functions of a module and the names that they have in the table."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTION | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if isinstance(node, FUNCTION):
                yield name, node
            yield from functions(node, f"{name}.")


def test_each_import_of_vllm_is_in_the_table_and_the_reverse():
    imported = {
        (node.module, alias.name)
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    }
    plain = [
        alias.name
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert not [name for name in plain if name.partition(".")[0] == "vllm"]
    in_table = {(place, symbol.name) for symbol in SYMBOLS for place in (symbol.module, symbol.instead) if place}
    assert imported == in_table


# The MROs below are of these classes, and of these mixins before these classes.
PAIRS = {tuple(side.rpartition(".")[0] for side in (each.ours, each.theirs)) for each in OVERRIDES}
IN_FUNCTIONS = {"capflow_engine.compat.step:_deciding.Deciding"}


@pytest.mark.parametrize(("ours", "theirs"), sorted(pair for pair in PAIRS if pair[0] not in IN_FUNCTIONS))
def test_the_table_has_each_method_that_the_mro_overrides(ours, theirs):
    mine, its = named(ours), named(theirs)
    own = [cls for cls in mine.__mro__ if cls.__module__.partition(".")[0] == "capflow_engine"]
    methods = {name for cls in own for name, value in vars(cls).items() if callable(value)}
    theirs_own = [cls for cls in its.__mro__ if cls.__module__.partition(".")[0] == "vllm"]
    base = {name for name in methods if any(name in vars(cls) for cls in theirs_own)}
    base.discard("model_post_init")  # pydantic's own
    assert base == {
        each.ours.rpartition(".")[2]
        for each in OVERRIDES
        if (each.ours.rpartition(".")[0], each.theirs.rpartition(".")[0]) == (ours, theirs)
    }


def test_each_class_that_calls_super_of_a_class_of_vllm_is_in_the_table():
    """A method that calls its own name of `super()`, in a class whose bases here do not have it, overrides another's.

    Packages other than vLLM are named.
    """
    others = {"GGUFReader", "Tracer", "HealthServicer", "APIRoute", "ClassDef"}
    in_table = {each.ours for each in OVERRIDES}
    ours = contract.Source.of(modules()["capflow_engine"].parents[1])
    unlisted = []
    for module, tree in SOURCES.items():
        for name, node in functions(tree) if module.startswith("capflow_engine.") else ():
            cls, _, method = name.rpartition(".")
            calls = list(contract._calls_of_super(node))
            if not calls or f"{module}:{name}" in in_table or method == "__init__":
                continue
            kind = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == cls.rpartition(".")[2])
            bases = {ast.unparse(base).rpartition(".")[2] for base in kind.bases}
            own = [base for base in bases if ours.member(module, base, method) is not None]
            subclasses = {each.partition(":")[0] for each in in_table if each.endswith(f".{method}")}
            if not own and not bases & others and module not in subclasses:
                unlisted.append(f"{module}:{name}")
    assert unlisted == []


def own_fields():
    """Return the names of the attributes that classes here give their own objects."""
    names = set()
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names |= {
                    part.target.id
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                }
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names |= {
                target.attr
                for target in targets
                if isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
    return names


def assigned(node):
    """Yield the attributes of other objects that a function sets; None for a name that it computes."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "setattr":
            yield None
        targets = part.targets if isinstance(part, ast.Assign) else []
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and getattr(each.value, "id", "") not in ("self", "cls"):
                    yield each.attr


# Arguments before they are the engine's, objects that only capflow reads, and attributes of other packages.
NOT_OF_VLLM = {
    "capflow_engine.compat.launch:in_one_process",
    "capflow_engine.compat.model:_structures",
    "capflow_engine.serve.server:parse",
    "capflow_engine.serve.server:_vllm_arguments",
    "capflow_engine.compat.step:_attached",
    "capflow_engine.compat.engine:take_calls",
    "capflow_engine.compat.engine:end_after_tokens",
    "capflow_engine.scheduler.orders:Orders.attach",
}


def test_each_attribute_that_is_set_on_an_object_of_vllm_is_in_the_table():
    listed = {(each.by, each.theirs.rpartition(".")[2]) for each in REPLACED}
    mine = own_fields()
    unlisted = set()
    for module in (name for name in SOURCES if name.startswith(("capflow_engine.compat", "capflow_engine.scheduler"))):
        for name, node in functions(SOURCES[module]):
            place = f"{module}:{name}"
            for attribute in assigned(node):
                ours = attribute in mine or (attribute or "").startswith(("capflow", "__"))
                if place not in NOT_OF_VLLM and (place, attribute) not in listed and not ours:
                    unlisted.add((place, attribute))
    assert {each for each in unlisted if each[1] is not None or each[0] not in {by for by, _ in listed}} == set()


@pytest.mark.parametrize("entry", REPLACED, ids=lambda entry: entry.theirs)
def test_each_replaced_attribute_is_replaced(entry):
    module, _, path = entry.by.partition(":")
    node = dict(functions(SOURCES[module]))[path]
    name = entry.theirs.rpartition(".")[2]
    words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    words |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    assert name in words


def read():
    """Return the attributes of other objects that the source reads, but those that our own classes have too."""
    own = own_fields() | {
        node.name
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, FUNCTION | ast.ClassDef)
    }
    return {
        node.attr
        for module, tree in SOURCES.items()
        if module.startswith(READERS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr not in own and not node.attr.startswith("__")
    }


READERS = ("capflow_engine.compat.", "capflow_engine.scheduler", "capflow_engine.worker", "capflow_engine.llm")
# Names that classes of vLLM have too, but that the source reads of other objects.
READ_OF_OTHERS = {"default_factory", "gather", "recv", "runner_type", "scheduler_cls", "worker_cls"}


def test_each_attribute_that_is_read_of_an_object_of_vllm_is_in_the_table():
    """For one class at least: the source does not say of which class an object is."""
    place = contract.installed()
    listed = {attribute for each in READS for attribute in each.names} | {
        each.theirs.rpartition(".")[2] for each in (*OVERRIDES, *REPLACED)
    }
    members = {
        attribute
        for attribute in read() - listed
        for each in READS
        if place.member(*each.cls.split(":"), attribute) is not None
    }
    assert members == READ_OF_OTHERS


def test_each_attribute_of_the_table_is_read():
    words = {
        part.attr if isinstance(part, ast.Attribute) else part.value
        for tree in SOURCES.values()
        for part in ast.walk(tree)
        if isinstance(part, ast.Attribute | ast.Constant)
    }
    assert {name for each in READS for name in each.names} - words == set()


def test_every_need_is_a_feature():
    """Some features have no name of vLLM for themselves: only their tests turn them off."""
    needs = {each.need for table in (SYMBOLS, OVERRIDES, REPLACED, READS) for each in table}
    assert needs | {GRPC, PARALLEL, REPLICAS, DRAFTS, LORA} == {CORE, OPTIONAL, *FEATURES}


def test_the_installed_vllm_fulfils_the_table():
    assert contract.breaks(contract.installed()) == []


def vllm_with(path, old, new):
    """Return the source of the installed vLLM with a text replaced in one file."""
    place = contract.installed()

    def text(name):
        content = place._text(name)
        if name != path:
            return content
        assert old in content
        return content.replace(old, new)

    return contract.Source(text)


SCHEDULER = "vllm/v1/core/sched/scheduler.py"


@pytest.mark.parametrize(
    ("path", "old", "new", "need", "problem"),
    [
        (SCHEDULER, "def _preempt_request(", "def _preempt(", CORE, "missing"),
        (SCHEDULER, "def add_request(self, request: Request", "def add_request(self, new, request", CORE, "is new; "),
        (
            SCHEDULER,
            "def _handle_stopped_request(self, request: Request",
            "def _handle_stopped_request(self, request: Request, why: str",
            CORE,
            "does not take why",
        ),
        (
            "vllm/v1/outputs.py",
            "    def get_output(self)",
            "    def cancel(self): ...\n\n    @abc.abstractmethod\n    def get_output(self)",
            CORE,
            "abstract; ",
        ),
        ("vllm/v1/request.py", "_block_hasher", "_hasher", CORE, "missing"),
        ("vllm/v1/request.py", "def update_block_hashes(", "def rehash(", CORE, "missing"),
        ("vllm/v1/worker/gpu/input_batch.py", "num_computed_tokens_np", "num_computed_np", V2_RUNNER, "missing"),
        ("vllm/entrypoints/openai/completion/api_router.py", "def create_completion(", "def made(", HTTP, "missing"),
        ("vllm/entrypoints/generate/beam_search/offline.py", "_beam_search_step", "_beam_step", BEAM_SEARCH, "missing"),
    ],
)
def test_a_changed_vllm_breaks_what_needs_it(path, old, new, need, problem):
    broken = contract.breaks(vllm_with(path, old, new))
    assert broken
    assert {each.need for each in broken} == {need}
    assert problem in " ".join(each.problem for each in broken)


BROKEN = {need: [contract.Break(need, "vllm.x.y", "missing")] for need in (CORE, HTTP)}


@pytest.fixture
def newer(monkeypatch):
    """Make the installed vLLM a newer one; call with what is off."""
    compat._warn_untested.cache_clear()
    compat._warn_off.cache_clear()

    def make(mode, off):
        monkeypatch.setattr(compat, "vllm_version", lambda: ("vllm", "0.99.0"))
        monkeypatch.setattr(compat, "off", lambda version: off)
        monkeypatch.setenv(compat.VARIABLE, mode)

    yield make
    compat._warn_untested.cache_clear()
    compat._warn_off.cache_clear()


def test_a_newer_version_runs_with_a_warning_and_one_line_for_each_feature_that_is_off(newer, caplog):
    newer("probe", {HTTP: BROKEN[HTTP]})
    compat.require()
    compat.require()
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("capflow was not tested with vLLM 0.99.0, only with versions from ")
    assert second == "capflow: the HTTP server: off with vLLM 0.99.0: vllm.x.y: missing"
    with pytest.raises(UsageError, match=r"^the HTTP server: off with vllm 0.99.0: got .*; pip install 'vllm>="):
        compat.need(HTTP)
    compat.need(BEAM_SEARCH)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("probe", r"^vllm 0\.99\.0: got 'vllm\.x\.y: missing'?.*pip install 'vllm>="),
        ("strict", r"^vllm version: got 0\.99\.0, expected one of 0\.26\.0, .* pip install"),
        ("never", r"^CAPFLOW_VLLM: got never, expected probe, strict, force"),
    ],
)
def test_a_newer_version_is_refused(newer, mode, words):
    newer(mode, BROKEN)
    with pytest.raises(CapflowError, match=words.replace("'?", "").replace("got '", "got ")):
        compat.require()


def test_force_takes_every_version(newer):
    newer("force", {})
    compat.require()


def test_the_probe_imports_nothing_of_vllm():
    code = (
        "import sys; from capflow_engine.compat.versions import contract; contract.breaks(contract.installed());"
        "print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher with"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}, "--enable-expert-para"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "--decode-context-parallel-size: got 2, expected 1 on a CPU",
        ),
        ({"enable_dbo": True}, "--enable-dbo is not supported with capflow; leave it out"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size is not supported with capflow"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill is not supported with capflow"),
    ],
)
def test_what_divides_a_step_among_ranks_is_refused_from_the_arguments(arguments, option):
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(UsageError, match=option):
        compat.check_arguments(EngineArgs(model="none", **arguments))


@pytest.mark.parametrize("older", [True, False])
def test_the_older_executor_on_ray_is_refused(monkeypatch, older):
    """It calls a worker's model runner itself: nothing would be captured or steered."""
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0" if older else "1")
    words = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND: got 0, expected 1"
    with pytest.raises(UsageError, match=words) if older else contextlib.nullcontext():
        compat.check_arguments(EngineArgs(model="none", distributed_executor_backend="ray"))


DIVIDED = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("changed", "divides"),
    [
        ({}, True),
        ({"all2all_backend": "deepep_low_latency"}, True),
        ({"all2all_backend": "flashinfer_nvlink_two_sided"}, False),
        ({"tensor_parallel_size": 1}, False),
        ({"data_parallel_size": 1}, False),
        ({"enable_expert_parallel": False}, False),
    ],
)
def test_experts_are_refused_exactly_where_vllm_divides_a_steps_tokens(changed, divides):
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    for check in (
        lambda: compat.check_arguments(EngineArgs(model="none", **DIVIDED | changed)),
        # An old name of the default backend is known to vLLM's configuration only.
        lambda: compat._refuse_divided_experts(ParallelConfig(**{"all2all_backend": "naive"} | DIVIDED | changed)),
    ):
        if divides:
            with pytest.raises(
                UsageError, match=r"^--enable-expert-parallel: got .* --all2all-backend \w+, expected all tokens"
            ):
                check()
        else:
            check()


@pytest.mark.parametrize("on", [True, False])
def test_a_pass_that_divides_tokens_is_seen(on):
    """vLLM 0.32 has no such pass."""
    assert compat._divides_tokens(SimpleNamespace(pass_config=SimpleNamespace(enable_sp=on))) == on


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"runner_type": "pooling"}, "model runner type: got pooling"),
        ({"is_diffusion": True}, "a diffusion model is not"),
    ],
)
def test_a_model_that_generates_no_tokens_is_refused(kind, words):
    with pytest.raises(UsageError, match=words):
        compat.check_kind(SimpleNamespace(**{"runner_type": "generate", "is_diffusion": False} | kind))


def test_a_platform_with_workers_of_its_own_is_refused_by_name(monkeypatch):
    from vllm import platforms

    class Platform:
        device_name = "tpu"
        is_cpu = is_xpu = is_cuda_alike = staticmethod(lambda: False)

    monkeypatch.setattr(platforms, "current_platform", Platform())
    with pytest.raises(UsageError, match=r"^platform of vLLM: got tpu, expected CUDA, ROCm, XPU or CPU"):
        compat.worker_base()
