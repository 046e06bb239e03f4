"""The arguments of `capflow serve`, as vLLM's server gets them."""

import pytest

from capflow_engine.jobs import demo
from capflow_engine.serve.server import _vllm_arguments

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("arguments", "names"), [(["demo"], ["demo"]), (["demo", "--served-model-name", "small"], ["small"])]
)
def test_the_demo_model_is_served_by_its_name(tmp_path, monkeypatch, arguments, names):
    monkeypatch.setattr(demo, "prepare", lambda **_: tmp_path)
    _, args = _vllm_arguments(arguments)
    assert (args.model, args.model_tag, args.served_model_name) == (str(tmp_path), str(tmp_path), names)


def test_any_other_model_is_the_user_s(tmp_path):
    _, args = _vllm_arguments([str(tmp_path)])
    assert (args.model, args.served_model_name) == (str(tmp_path), None)
