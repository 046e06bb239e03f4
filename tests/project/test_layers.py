"""Who may import whom: consumers run without torch, and no file imports from a layer above it."""

import ast
import collections
import graphlib
import re

import pytest

from tests.kit.sources import imports_of, modules

LAYERS = {
    "capflow": (
        "errors limits files version extras divergence",
        "system text",
        "capture buffers",
        "steering",
        "probes protocol lenses",
        "weights",
        "saes attention experts",
        "plugins serve_options",
        "transport",
        "hub",
        "replay",
        "testing",
        "cli __main__",
    ),
    "capflow_consumers": (
        "log gate gate_in_graph async_gate record progress framelog",
        "dataset",
        "filesystem duckdb nats inspect export features",
    ),
    "capflow_engine": (
        "layer",
        "hubs settings stepclock",
        "compat",
        "steering",
        "request taps",
        "scheduler llm ranks",
        "worker serve jobs",
    ),
}
"""The folders and files of each package, lowest first. A module imports from its own line and from earlier lines."""

FILES_MAX = 14
"""A folder has at most so many modules beside its folders, so that a listing explains it."""

ENGINE_ONLY = {"torch", "triton", "vllm", "transformers", "accelerate", "gguf"}
HUB_ONLY = {"capflow.hub", "capflow.cli"}

FOR_TORCH = {"capflow_consumers.dataset.torch_rows"}
"""What training loops import: outside of the engine, the only modules that may import torch."""

ENGINES = ("capflow_engine", "capflow_models")
"""The packages of machines that run models."""

FILES = modules()
IMPORTS = {name: imports_of(path.read_text(encoding="utf-8"), set(FILES)) for name, path in FILES.items()}


def top(name):
    return name.partition(".")[0]


def inside(name, packages):
    """Whether a module is one of these packages or in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def place(name):
    """Return the package of a module, the part of it that stands in `LAYERS`, and its line there."""
    package, _, inner = name.partition(".")
    part = inner.partition(".")[0]
    lines = [index for index, line in enumerate(LAYERS[package]) if part in line.split()]
    assert lines, f"{name}: {part!r} stands in no line of LAYERS"
    return package, part, lines[0]


def layered_modules():
    """Return the modules that the table is about: all but the packages' own."""
    return sorted(name for name in FILES if top(name) in LAYERS and name != top(name))


@pytest.mark.parametrize("name", layered_modules())
def test_modules_import_downwards(name):
    package, part, line = place(name)
    for imported in IMPORTS[name]:
        if imported == "capflow":
            assert package != "capflow" or part in ("hub", "replay", "testing", "cli"), f"{name} imports the facade"
        elif top(imported) == package and imported in FILES:
            below = place(imported)[2]
            assert below <= line, f"{name} imports {imported}, which is above it"


def test_folders_are_small():
    counts = collections.Counter(name.rpartition(".")[0] for name in FILES)
    assert {folder: count for folder, count in counts.items() if count > FILES_MAX} == {"capflow": counts["capflow"]}


@pytest.mark.parametrize("name", sorted(name for name, path in FILES.items() if path.name == "__init__.py"))
def test_packages_say_what_they_own(name):
    source = FILES[name].read_text(encoding="utf-8")
    assert re.search("Invariants?:", ast.get_docstring(ast.parse(source)) or ""), f"{name} says no invariant"


def test_no_module_imports_itself_through_others():
    graph = {
        name: {i for i in imported if i in FILES and i not in ("capflow", name)} for name, imported in IMPORTS.items()
    }
    del graph["capflow"]  # the facade imports everything
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", sorted(name for name in FILES if top(name) not in ENGINES))
def test_only_the_engine_imports_torch_and_vllm(name):
    allowed = {"torch"} if name in FOR_TORCH else set()
    assert ({top(imported) for imported in IMPORTS[name]} & ENGINE_ONLY) <= allowed


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"capflow"}))
def test_what_is_for_torch_is_imported_by_nothing_of_ours(name):
    """But by the facade, at the first use of `capflow.TorchRows`."""
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
    importers = {name for name, imported in models.items() if "capflow_engine" in imported}
    named = "backends experiment.session model runs.engine_session stream sweep.metrics sweep.session sweep.shapes"
    named += " transformers_model vectors.file"
    assert importers <= {f"capflow_models.{name}" for name in (*named.split(), "vllm_model")}
    assert not [name for name, imported in models.items() if "vllm" in imported]


@pytest.mark.parametrize("name", ["spec", "specfiles", "model"])
def test_specifications_need_no_torch(name):
    assert IMPORTS[f"capflow_models.{name}"].isdisjoint(ENGINE_ONLY)


@pytest.mark.parametrize("name", sorted(name for name in FILES if top(name) in ENGINES))
def test_only_compat_knows_the_inside_of_vllm(name):
    private = {imported for imported in IMPORTS[name] if inside(imported, {"vllm.v1", "vllm.model_executor"})}
    assert inside(name, {"capflow_engine.compat"}) or not private


@pytest.mark.parametrize("name", sorted(FILES))
def test_only_transport_imports_zmq(name):
    assert inside(name, {"capflow.transport"}) or "zmq" not in {top(i) for i in IMPORTS[name]}


@pytest.mark.parametrize("name", sorted(FILES))
def test_only_rpc_imports_grpc(name):
    imported = {top(i) for i in IMPORTS[name]} & {"grpc", "grpc_health", "grpc_reflection", "google"}
    assert inside(name, {"capflow_engine.serve.rpc"}) or not imported


@pytest.mark.parametrize(
    "name", sorted(name for name in FILES if top(name) in ("capflow_consumers", "capflow_dashboard"))
)
def test_consumers_import_capflow_and_themselves(name):
    ours = {imported for imported in IMPORTS[name] if top(imported).startswith("capflow")}
    assert all(top(imported) in ("capflow", top(name)) for imported in ours)
    assert not [
        imported for imported in ours if inside(imported, HUB_ONLY | {"capflow.transport", "capflow.protocol.session"})
    ]


CONSUMERS = ("async_gate", "duckdb", "filesystem", "gate", "log", "nats", "record")


@pytest.mark.parametrize("name", sorted(name for name in FILES if top(name) == "capflow_consumers"))
def test_consumers_do_not_import_each_other(name):
    part = name.split(".")[1] if "." in name else ""
    others = {f"capflow_consumers.{other}" for other in CONSUMERS if other != part}
    assert part not in CONSUMERS or not [imported for imported in IMPORTS[name] if inside(imported, others)]


def test_the_core_names_plugins_only_in_its_facade():
    """`capflow.open` is loaded by name, lazily; nothing else in the core knows which consumers there are."""
    for name in (name for name in FILES if name.startswith("capflow.")):
        assert {top(i) for i in IMPORTS[name]}.isdisjoint({"capflow_consumers", "capflow_dashboard", *ENGINES})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", {"torch"}),
        ("def f():\n    import vllm.v1.core as c", {"vllm.v1.core"}),
        ("from capflow import limits", {"capflow.limits"}),
        ("from capflow import Frame", {"capflow"}),
        ("if TYPE_CHECKING:\n    from capflow.hub.hub import Hub", {"capflow.hub.hub"}),
    ],
)
def test_the_reader_of_imports_sees_them_all(source, expected):
    assert imports_of(source, set(FILES)) == expected


def test_public_classes_have_names_of_their_own():
    homes = collections.defaultdict(list)
    for name, path in FILES.items():
        if not name.endswith(("_pb2", "_pb2_grpc")):
            classes = [
                node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
            ]
            for node in classes:
                homes[node.name].append(name)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1 and not name.startswith("_")} == {}
