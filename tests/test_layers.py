"""Who may import whom: the layers that keep a consumer's machine free of torch and each file free of what is above it."""

import graphlib

import pytest
from sources import imports_of, modules

LAYERS = (
    {"errors", "intervals", "jsontext", "limits", "places", "private", "regular"},
    {
        "bounded",
        "brief",
        "descriptors",
        "enginename",
        "heap",
        "kept",
        "memo",
        "outlet",
        "printable",
        "runtime",
        "shares",
        "site",
        "shard",
        "wholefile",
    },
    {
        "positions",
        "spec",
        "frame",
        "framecost",
        "losses",
        "losslog",
        "plain",
        "packed",
        "vector",
        "clamp",
        "patch",
        "action",
        "result",
        "message",
        "steercheck",
    },
    {"steering", "program", "probefile", "probe", "probekinds", "saelens", "consumer", "hookspecs"},
    {
        "counts",
        "queue",
        "rowformat",
        "session",
        "address",
        "keys",
        "plugins",
        "spool",
        "recording",
        "pluginkit",
        "serveoptions",
    },
    {
        "transport",
        "transport.sockets",
        "transport.outbox",
        "transport.promises",
        "transport.link",
        "transport.workerlink",
        "transport.formerlink",
        "transport.schedulerlink",
        "transport.taplink",
        "transport.zap",
        "transport.connections",
    },
    {"client", "launch", "sqlport", "sqlquery"},
    {
        "budget",
        "share",
        "ledger",
        "relay",
        "waiters",
        "departures",
        "roster",
        "pace",
        "backoff",
        "deadletters",
        "notes",
        "fanout",
        "inbox",
        "inboxwriter",
        "inboxrequests",
        "siblings",
        "spilling",
        "guard",
        "health",
        "cachereads",
        "taps",
        "peerlog",
        "turns",
        "tapping",
        "exchange",
        "hub",
        "localpeer",
        "replay",
        "datasetreplay",
        "metrics",
        "endpoint",
    },
    {"testing"},
    {"cli", "__main__"},
)
"""The core, lowest first; a module imports from its own layer and those below. `cli`, `spool` and `testing` stand for all of their modules."""

ENGINE_ONLY = {"torch", "triton", "vllm", "transformers", "accelerate", "gguf"}
HUB_ONLY = {
    "capflow.hub",
    "capflow.cli",
    "capflow.exchange",
    "capflow.fanout",
    "capflow.ledger",
    "capflow.relay",
    "capflow.roster",
}

FOR_TORCH = {"capflow_consumers.torchrows"}
"""What training loops import: outside of the engine, the only modules that may import torch."""

COMPAT = {
    "capflow_engine.compat",
    "capflow_engine.compat_cache",
    "capflow_engine.compat_model",
    "capflow_engine.compat_step",
}
"""Where vLLM's insides are named."""

ENGINES = ("capflow_engine", "capflow_models")
"""The packages of machines that run models."""

FILES = modules()
IMPORTS = {name: imports_of(path.read_text(encoding="utf-8"), set(FILES)) for name, path in FILES.items()}


def top(name):
    return name.partition(".")[0]


def inside(name, packages):
    """Whether a module is one of these packages or in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def layer(name):
    core = name.removeprefix("capflow.")
    core = next((package for package in ("cli", "spool", "testing") if inside(core, {package})), core)
    found = [index for index, names in enumerate(LAYERS) if core in names]
    assert found, f"{name} has no layer: give it one in LAYERS"
    return found[0]


def core_modules():
    return sorted(name for name in FILES if name.startswith("capflow."))


@pytest.mark.parametrize("name", core_modules())
def test_the_core_imports_downwards(name):
    for imported in IMPORTS[name]:
        if imported == "capflow":
            assert layer(name) >= layer("capflow.hub"), f"{name} imports the facade: name the module"
        elif top(imported) == "capflow":
            assert layer(imported) <= layer(name), f"{name} imports {imported}, which is above it"


def test_no_module_imports_itself_through_others():
    graph = {name: {i for i in found if i in FILES and i not in ("capflow", name)} for name, found in IMPORTS.items()}
    del graph["capflow"]  # the facade imports everything
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", sorted(name for name in FILES if top(name) not in ENGINES))
def test_only_the_engine_imports_torch_and_vllm(name):
    allowed = {"torch"} if name in FOR_TORCH else set()
    assert ({top(imported) for imported in IMPORTS[name]} & ENGINE_ONLY) <= allowed


@pytest.mark.parametrize("name", sorted(FILES))
def test_what_is_for_torch_is_imported_by_nothing_of_ours(name):
    assert IMPORTS[name].isdisjoint(FOR_TORCH)


@pytest.mark.parametrize("name", sorted(name for name in FILES if top(name) in ENGINES))
def test_the_engine_knows_no_hub(name):
    assert not [imported for imported in IMPORTS[name] if inside(imported, HUB_ONLY)]
    assert {top(i) for i in IMPORTS[name]}.isdisjoint({"capflow_consumers", "capflow_dashboard"})


@pytest.mark.parametrize("name", sorted(name for name in FILES if top(name) == "capflow_engine"))
def test_the_engine_knows_no_models(name):
    assert "capflow_models" not in {top(i) for i in IMPORTS[name]}


def test_few_modules_of_the_models_know_the_engine_and_none_vllm():
    models = {name: {top(i) for i in IMPORTS[name]} for name in FILES if top(name) == "capflow_models"}
    know = {name for name, found in models.items() if "capflow_engine" in found}
    named = ("backends", "model", "stream", "transformers_model", "vectors", "vllm_model")
    assert know <= {f"capflow_models.{name}" for name in named}
    assert not [name for name, found in models.items() if "vllm" in found]


@pytest.mark.parametrize("name", ["spec", "specfiles", "model"])
def test_specifications_need_no_torch(name):
    assert IMPORTS[f"capflow_models.{name}"].isdisjoint(ENGINE_ONLY)


@pytest.mark.parametrize("name", sorted(name for name in FILES if top(name) in ENGINES))
def test_only_compat_knows_the_inside_of_vllm(name):
    private = {imported for imported in IMPORTS[name] if inside(imported, {"vllm.v1", "vllm.model_executor"})}
    assert name in COMPAT or not private


@pytest.mark.parametrize("name", sorted(FILES))
def test_only_transport_imports_zmq(name):
    assert inside(name, {"capflow.transport"}) or "zmq" not in {top(i) for i in IMPORTS[name]}


@pytest.mark.parametrize("name", sorted(FILES))
def test_only_rpc_imports_grpc(name):
    found = {top(i) for i in IMPORTS[name]} & {"grpc", "grpc_health", "grpc_reflection", "google"}
    assert inside(name, {"capflow_engine.rpc"}) or not found


@pytest.mark.parametrize(
    "name", sorted(name for name in FILES if top(name) in ("capflow_consumers", "capflow_dashboard"))
)
def test_consumers_import_capflow_and_themselves(name):
    ours = {imported for imported in IMPORTS[name] if top(imported).startswith("capflow")}
    assert all(top(imported) in ("capflow", top(name)) for imported in ours)
    assert not [imported for imported in ours if inside(imported, HUB_ONLY | {"capflow.transport", "capflow.session"})]


def plugin_modules():
    return {"duckdb", "filesystem", "gate", "log", "nats", "record"}


@pytest.mark.parametrize("name", sorted(plugin_modules()))
def test_consumers_do_not_import_each_other(name):
    others = {f"capflow_consumers.{other}" for other in plugin_modules() - {name}}
    assert IMPORTS[f"capflow_consumers.{name}"].isdisjoint(others)


def test_the_core_names_plugins_only_in_its_facade():
    """`capflow.open` is loaded by name, lazily; nothing else in the core knows which consumers there are."""
    for name in core_modules():
        assert {top(i) for i in IMPORTS[name]}.isdisjoint({"capflow_consumers", "capflow_dashboard", *ENGINES})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", {"torch"}),
        ("def f():\n    import vllm.v1.core as c", {"vllm.v1.core"}),
        ("from capflow import limits", {"capflow.limits"}),
        ("from capflow import Frame", {"capflow"}),
        ("if TYPE_CHECKING:\n    from capflow.hub import Hub", {"capflow.hub"}),
    ],
)
def test_the_reader_of_imports_sees_them_all(source, expected):
    assert imports_of(source, set(FILES)) == expected
