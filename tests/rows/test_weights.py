"""Weights that change while an engine runs: rows are those of the weights of their step, and say which these are."""

import duckdb
import numpy as np
import pytest
import torch

import capflow
from capflow.capture.frame import Weights
from tests.kit.engines import GREEDY, LAYERS, Reference, engine, prompts, relative_error, save_drafter
from tests.kit.rows import ALL, FLOAT32_BOUND, SITES, Keeper, check_rows, kept

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT = prompts([104], seed=8)[0]
CACHING = {"block_size": 32, "max_num_seqs": 4, "enable_prefix_caching": True}


class Versions(Keeper):
    """A keeper that also keeps the weights of each position, as the frames say them."""

    def __init__(self):
        super().__init__()
        # Request → position → the version of the weights.
        self.versions = {}

    def on_frame(self, frame):
        super().on_frame(frame)
        for chunk in frame.chunks():
            kept = self.versions.setdefault(chunk.request.id, {})
            for offset in range(len(chunk.token_ids)):
                kept[chunk.start + offset] = frame.header.weights.version


@pytest.fixture
def versions(tmp_path_factory):
    with kept(Versions(), tmp_path_factory) as keeper:
        yield keeper


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Another checkpoint of the same model, and its reference."""
    directory = tmp_path_factory.mktemp("trained") / "model"
    save_drafter(tiny, directory, noise=0.02)
    return str(directory), Reference(directory)


def reload(llm, directory):
    llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})


def test_results_files_and_tables_name_the_weights_and_new_ones_read_no_old_cache(tiny, reference, trained, tmp_path):
    directory, after = trained
    consumers = [
        f"filesystem:root={tmp_path / 'rows'},capture=requests",
        f"duckdb:path={tmp_path / 'rows.duckdb'},site=post_block:1,vectors=true,positions=all_generated",
    ]
    generated = {"hooks": {"post_block": "all"}, "positions": "all_generated"}

    def ask(name):
        params = capflow.sampling_params(id=name, capture=generated, max_tokens=6, **GREEDY)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        return output

    with engine(tiny, consumers=consumers, **CACHING) as llm:
        if not hasattr(llm.llm_engine, "set_weight_version"):
            pytest.skip("vLLM below 0.27 has no names of weights")
        outputs = {name: ask(name) for name in ("first", "again")}
        reload(llm, directory)
        llm.llm_engine.set_weight_version("step-100")
        outputs |= {name: ask(name) for name in ("trained", "trained again")}
        llm.llm_engine.set_weight_version("step-200")  # set elsewhere, by a worker extension
        outputs["named"] = ask("named")
        llm.llm_engine.set_weight_version("step-200")
        reload(llm, tiny)
        reload(llm, tiny)
        outputs["back"] = ask("back")
    expected = {
        "first": (reference, 0, 0, ""),
        "again": (reference, 96, 0, ""),
        "trained": (after, 0, 1, "step-100"),
        "trained again": (after, 96, 1, "step-100"),
        "named": (after, 0, 2, "step-200"),
        "back": (reference, 0, 3, ""),
    }
    data = capflow.open(tmp_path / "rows")
    with duckdb.connect(str(tmp_path / "rows.duckdb"), read_only=True) as database:
        table = database.sql("SELECT request_id, weights, weights_label FROM requests").fetchall()
    assert {name: (versions, label) for name, versions, label in table} == {
        name: ([version], label or None) for name, (_, _, version, label) in expected.items()
    }
    for name, (model, cached, version, label) in expected.items():
        output = outputs[name]
        assert output.num_cached_tokens == cached, name
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        check_rows(data[name], tokens, model, positions=list(range(104, 109)))
        weights = (Weights(version, label, 104),)
        assert data[name].weights == output.capture_results["filesystem"].weights == weights


def test_a_request_that_runs_on_has_rows_of_both_and_its_result_says_where_they_begin(tiny, trained, versions):
    directory, after = trained
    before = Reference(tiny)
    with engine(tiny, hub=versions.address, sites=["post_block:*"]) as llm:
        params = capflow.sampling_params(id="r", capture=ALL, max_tokens=12, **GREEDY)
        llm.enqueue(prompts([20])[0], params, use_tqdm=False)
        for _ in range(5):
            llm.llm_engine.step()
        reload(llm, directory)
        (output,) = llm.wait_for_completion(use_tqdm=False)
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    start = 24  # a step for the prompt, and four for generated tokens
    assert versions.versions["r"] == {p: int(p >= start) for p in range(31)}
    assert output.capture_results["keeper"].weights == (Weights(0), Weights(1, start=start))
    expected = _continued(before, after, tokens[:-1], start)
    for site in SITES:
        rows = np.stack([versions.rows["r"][site][p][1] for p in range(31)])
        assert relative_error(rows, expected[site.layer]) < FLOAT32_BOUND, site


def _continued(before, after, tokens, start):
    """Return `[layers, tokens, hidden]`: what one model computes, and from `start` on another, with its cache."""
    caught = [[] for _ in range(LAYERS)]
    cache = None
    for reference, part in ((before, tokens[:start]), (after, tokens[start:])):
        hooks = [
            layer.register_forward_hook(
                lambda _, __, output, n=n: caught[n].append((output if torch.is_tensor(output) else output[0])[0])
            )
            for n, layer in enumerate(reference.layers)
        ]
        with torch.no_grad():
            cache = reference.model(torch.tensor([part]), past_key_values=cache, use_cache=True).past_key_values
        for hook in hooks:
            hook.remove()
    return np.stack([torch.cat(parts).numpy() for parts in caught])
