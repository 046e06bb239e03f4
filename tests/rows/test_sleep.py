"""Sleep: rows and the global state are right before it, across it and after it, at each level.

vLLM's workers for CPUs keep the weights and the cache where they are. The rest of sleep runs here: the pause of the
scheduler, the end or the wait of running requests, the reset of the prefix cache, and the levels of the executor.
"""

import json
import urllib.request

import pytest

import capflow
from capflow.capture.frame import Weights
from capflow.errors import UsageError
from capflow.steering.request import Steering
from tests.kit.doors import PROMPT as WORDS
from tests.kit.doors import STEERING_KEY, TOKENS
from tests.kit.engines import GREEDY, engine, prompts, vector
from tests.kit.hubs import free_port
from tests.kit.rows import ALL, check_rows
from tests.kit.servers import environment, healthy, post, process, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT = prompts([104], seed=8)[0]
CACHING = {"block_size": 32, "max_num_seqs": 4, "enable_prefix_caching": True}
EVERYWHERE = {1: 7}
GLOBAL = {"steering_vectors": {"post_block": {1: vector(7).tolist()}}}
GENERATED = {"hooks": {"post_block": "all"}, "positions": "all_generated"}


@pytest.mark.parametrize("level", [0, 1, 2])
def test_requests_before_across_and_after_sleep_have_their_rows_and_the_global_state(tiny, reference, keeper, level):
    def ask(name, prompt, capture):
        params = capflow.sampling_params(id=name, capture=capture, max_tokens=8, **GREEDY)
        llm.enqueue(prompt, params, use_tqdm=False)

    def answered():
        (output,) = llm.wait_for_completion(use_tqdm=False)
        return output

    outputs = {}
    with engine(tiny, hub=keeper.address, sites=["post_block:*"], **CACHING) as llm:
        llm.steering.set_global(Steering.parse(GLOBAL))
        ask("before", PROMPT, GENERATED)
        outputs["before"] = answered()
        ask("across", prompts([20])[0], ALL)
        for _ in range(4):
            llm.llm_engine.step()
        llm.sleep(level=level, mode="keep")
        assert llm.llm_engine.is_sleeping()
        assert llm.wake_up(["scheduling"] if level == 0 else None)
        assert not llm.llm_engine.is_sleeping()
        outputs["across"] = answered()
        ask("after", PROMPT, GENERATED)
        outputs["after"] = answered()
    for name, output in outputs.items():
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        positions = None if name == "across" else list(range(104, 111))
        keeper.hold(name, tokens, reference, EVERYWHERE, positions)
        weights = {
            "before": (Weights(0, start=104),),
            "across": (Weights(0), Weights(1, start=23)) if level == 2 else (Weights(0),),
            "after": (Weights(int(level == 2), start=104),),
        }
        assert output.capture_results["keeper"].weights == weights[name], name
    assert outputs["after"].num_cached_tokens == (96 if level == 0 else 0)


def test_a_cpu_has_no_sleep_mode_and_the_error_is_vllms(tiny):
    words = r"vLLM refuses it: .*Sleep mode is not supported on current platform"
    with pytest.raises(UsageError, match=words), engine(tiny, enable_sleep_mode=True):
        pass


@pytest.fixture(scope="module")
def serving(tiny_with_words, tmp_path_factory):
    """The port of a server whose engine can be sent to sleep, and the directory of its rows."""
    home, port = tmp_path_factory.mktemp("home"), free_port()
    command = ["serve", tiny_with_words, "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += [
        "--steering-api-key",
        STEERING_KEY,
        "--max-model-len",
        "512",
        "--consumer",
        f"filesystem:root={home}/rows,capture=requests",
    ]
    with process(*command, environment=environment(home, VLLM_SERVER_DEV_MODE="1")) as (server, lines):
        try:
            wait_until(lambda: healthy(port), 200, server)
            yield port, home / "rows"
        finally:
            server.terminate()
    assert not any("Traceback" in line for line in lines)


def _call(port, path, body=None):
    """Return the answer of a route; a body, if only an empty one, makes it a POST."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {STEERING_KEY}"}
    call = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(call, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_server_that_slept_has_rows_and_the_global_state(serving, reference, level):
    port, root = serving
    _call(port, "/v1/steering/set", {**GLOBAL, "replace": True})
    names = [f"{when} {level}" for when in ("before", "after")]
    tokens = {}
    for name in names:
        body = {"prompt": WORDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = post(port, {**body, "capture": ALL, "capture_id": name, "capture_wait": True})
        tokens[name] = [*TOKENS, *answer["choices"][0]["token_ids"]]
        if name == names[0]:
            _call(port, f"/sleep?level={level}", {})
            assert _call(port, "/is_sleeping") == {"is_sleeping": True}
            assert _call(port, "/wake_up", {})["status"] == "awake"
            assert _call(port, "/is_sleeping") == {"is_sleeping": False}
    data = capflow.open(root)
    for name in names:
        check_rows(data[name], tokens[name], reference, EVERYWHERE)


@pytest.mark.parametrize("level", [0, 1])
def test_an_answer_that_sleep_ends_has_the_rows_of_what_was_computed(serving, reference, level):
    port, root = serving
    _call(port, "/v1/steering/set", {**GLOBAL, "replace": True})
    body = {"prompt": WORDS, "max_tokens": 480, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream": True, "capture": ALL, "capture_id": f"ended {level}", "capture_wait": True}
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    chunks = []
    with urllib.request.urlopen(call, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line.removeprefix(b"data: ")))
                if len(chunks) == 3:
                    _call(port, f"/sleep?level={level}", {})
    _call(port, "/wake_up", {})
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"] or ()]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "abort"
    assert 3 <= len(tokens) < body["max_tokens"]
    assert chunks[-1]["capture_results"]["filesystem"]["status"] == "ok"
    check_rows(capflow.open(root)[body["capture_id"]], [*TOKENS, *tokens], reference, EVERYWHERE)
