"""One architecture of each structural pattern against Transformers, every hook at every layer.

`make architectures` runs all.
"""

import numpy as np
import pytest

from capflow.errors import UsageError
from capflow.transport.hub_process import HubProcess
from capflow_engine.layer.structure import HookPlace
from tests.architectures import run as checks
from tests.architectures import table as architectures
from tests.kit.processor import without_amx

pytestmark = pytest.mark.engine

EVERY = set(checks.HOOKS)
DENSE, QKV = EVERY - {"router"}, {"q", "k", "v"}
PATTERNS = {
    "llama": DENSE,  # a split stream, added up in the norms
    "gemma3_text": DENSE,  # norms before and after each block
    "gpt2": DENSE,  # a whole stream
    "gpt_neox": DENSE - {"post_attn"},  # attention beside the MLP, by vLLM's Transformers backend
    "exaone4": DENSE,  # norms only after each block
    "granite": DENSE,  # what is added is scaled
    "olmoe": EVERY - {"neurons"},  # experts
    "falcon_h1": DENSE - {"attn_in", "attn_out"},  # attention beside a state space
    "ctrl": DENSE - {"neurons"},  # an MLP that is no more than a sequence of modules
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("conformance") / "rows"
    hub = HubProcess([f"filesystem:root={root},capture=requests"])
    hub.start(60)
    yield hub.address, str(root)
    hub.stop()


def counted(hooks, result):
    """Return how many layers have each of these hooks when all have them."""
    return {hook: 1 if hook == "final" else result["layers"] for hook in hooks}


@pytest.mark.parametrize("model_type", list(PATTERNS))
def test_every_hook_at_every_layer_is_what_transformers_computes(model_type, hub):
    result = checks.check(model_type, "float32", *hub)
    assert {hook for hook, layers in result["sites"].items() if layers} == PATTERNS[model_type]
    assert {hook: result["sites"][hook] for hook in PATTERNS[model_type]} == counted(PATTERNS[model_type], result)
    assert set(result["missing"]) == EVERY - PATTERNS[model_type]
    assert checks.passed(result), result["errors"]


def test_sites_that_are_not_steered_have_the_same_rows(hub):
    result = checks.check("gemma3_text", "float32", *hub, steer_sites=["none"])
    assert result["sites"] == counted(EVERY, result) | {"router": 0}
    assert checks.passed(result), result["errors"]


@without_amx
def test_a_stream_that_vllm_divides_in_float16_is_captured_whole(hub):
    for steered in (None, ["none"]):
        result = checks.check("deepseek_v2", "float16", *hub, steer_sites=steered)
        experts = {"router": result["layers"] - 1, "neurons": 1}  # the first layer is dense
        assert result["sites"] == counted(EVERY, result) | dict.fromkeys(QKV, 0) | experts
        assert checks.passed_in({"dtypes": {"float16": result}}, "float16"), result["errors"]


def test_a_model_that_vllm_scales_in_part_in_float16_is_refused(hub):
    with pytest.raises(UsageError, match=r"Glm4MoeDecoderLayer: .*in float16 alone it adds .*: use another dtype"):
        checks.check("glm4_moe", "float16", *hub)


def test_a_wrong_place_is_noticed(hub, monkeypatch):
    from capflow_engine.compat import model as compat_model

    resolve = compat_model.resolve

    def misled(layer, *args):
        hooks = resolve(layer, *args)
        norm = hooks.places["mlp_in"]
        hooks.places["mlp_in"] = HookPlace(norm.module, hooks.places["post_attn"].slots)  # before the norm
        return hooks

    monkeypatch.setattr(compat_model, "resolve", misled)
    result = checks.check("llama", "float32", *hub)
    assert not checks.passed(result)
    wrong = {hook for hook, error in result["errors"].items() if error > checks.ERROR_MAX}
    assert wrong == {"mlp_in"}


def test_the_reference_checks_its_own_names(monkeypatch, tmp_path):
    monkeypatch.setitem(architectures.NAMES, "llama", ("mlp", "post_attention_layernorm", "self_attn"))
    model = architectures.make("llama", tmp_path)
    (rows,) = architectures.expected("llama", model, [[5, 6, 7]])
    assert architectures.adds_up(rows, 3) > checks.ERROR_MAX


def result_of(**fields):
    return {
        "architecture": "SomeForCausalLM",
        "missing": {},
        "sites": dict.fromkeys(checks.HOOKS, 3) | {"final": 1},
        "errors": dict.fromkeys(checks.HOOKS, 1e-7),
        "unproved": [],
        "layers": 3,
    } | fields


def test_the_matrix_names_what_is_right_and_why_others_are_not(monkeypatch, tmp_path):
    results = {
        "all": result_of(
            dtypes={
                "bfloat16": result_of(errors={"post_block": 7e-3}),
                "float16": {"failed": "UsageError: X does not support float16"},
            }
        ),
        "some": result_of(
            sites=dict.fromkeys(checks.HOOKS, 3) | {"mlp_out": 2, "final": 1}, missing={"mlp_out": "two modules"}
        ),
        "own": result_of(plain=True, errors=dict.fromkeys(checks.HOOKS, 0.0)),
        "other": result_of(plain=True, errors={"post_block": 2e-3}),
        "off": result_of(errors={"post_block": 2e-3}),
        "unproved": result_of(unproved=["mlp_in"]),
        "broken": {"failed": "ValueError: Model architectures ['X'] are not supported for now."},
    }
    document = tmp_path / "compatibility.md"
    document.write_text(f"before\n{checks.BEGIN}\n{checks.END}\nafter\n")
    monkeypatch.setattr(checks, "MATRIX", document)
    checks.write(results, {"bert": "an encoder"}, {"all": "a note"})
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert (
        f"| some | SomeForCausalLM {'| all ' * 11}| 2 of 3<sup>4</sup> | all | yes "
        "| 1e-07 | -<sup>5</sup> | -<sup>5</sup> |" in text
    )
    assert f"| all<sup>2</sup> | SomeForCausalLM {'| all ' * 13}| yes | 1e-07 | 7e-03 | -<sup>1</sup> |" in text
    assert f"| own | SomeForCausalLM {'| all ' * 13}| yes | - | same bits<sup>3</sup> | - |" in text
    assert "<sup>3</sup> compared with plain forward hooks" in text
    assert "* rows differ from plain hooks' in 2e-03 of their numbers: other" in text
    assert "<sup>1</sup> vLLM refuses it in this dtype" in text
    assert "<sup>2</sup> a note" in text
    assert "<sup>4</sup> two modules" in text
    assert "<sup>5</sup> not run in this dtype" in text
    assert "* vLLM does not implement it: broken" in text
    assert "* rows differ from Transformers' by 2e-03, for an unknown reason: off" in text
    assert "* an encoder: bert" in text
    assert checks.rights(text) == {"all", "own", "some"}
    checks.write(results, {}, {})
    assert checks.rights(document.read_text()) == {"all", "own", "some"}


def test_a_wrong_scale_is_more_than_rounding():
    rows = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    for dtype, size in checks.ROUNDING.items():
        noise = 1 + 2 * size * np.random.default_rng(1).uniform(-1, 1, rows.shape)
        for scale, right in ((1.0, True), (1.05, False), (0.4, False)):
            error = architectures.usual_distance(rows * noise * scale, rows)
            result = {"dtypes": {dtype: result_of(errors={"post_block": error})}}
            assert checks.passed_in(result, dtype) == right
    assert not checks.passed_in(result_of(), "float16")  # which was not tried


def test_relative_distance():
    reference = np.array([[1.0, -4.0]], np.float32)
    assert architectures.distance(np.array([[1.0, -3.0]], np.float32), reference) == 0.25
    assert architectures.distance(np.zeros((2, 2), np.float32), reference) == float("inf")
