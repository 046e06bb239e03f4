"""Requests to the HTTP servers of one engine, which has one or several, and their rows held against a reference."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.kit.engines import prompts, vector
from tests.kit.rows import ALL
from tests.kit.servers import post
from tests.kit.waiting import eventually


def completion(node, name, seed, **fields):
    """Ask a node for a completion of random words; return all tokens of the request."""
    (prompt,) = prompts((9 + 3 * seed,), seed=seed)
    words = " ".join(f"w{token}" for token in prompt["prompt_token_ids"])
    body = {"model": "tiny", "prompt": words, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "capture": ALL, "capture_id": name, "capture_wait": True, **fields}
    answer = post(node.port, body)
    status = answer["capture_results"]["keeper"]["status"]
    assert status == "ok" or (status == "pending" and not body["capture_wait"]), answer
    return prompt["prompt_token_ids"] + answer["choices"][0]["token_ids"]


def end_during_a_step(node, keeper):
    """Tell the engine core of a node to end while `r1` runs, as a supervisor does that signals all processes.

    Return the future of its tokens: the request may end, and its rows count.
    """
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(completion, node, "r1", 1, max_tokens=100, capture_wait=False)
    pool.shutdown(wait=False)
    eventually(lambda: keeper.rows)
    below = psutil.Process(node.process.pid).children(recursive=True)
    [core] = [each for each in below if "EngineCore" in each.name()]
    core.terminate()
    return asked


def plain(values, layer=1):
    return {"post_block": {str(layer): values.tolist()}}


def call(node, path, body=None, method=None):
    """Return the code and the body of an answer."""
    data = None if body is None else json.dumps(body).encode()
    url = f"http://127.0.0.1:{node.port}/v1/steering{path}"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def hold_all(keeper, reference, fronts):
    """Run six requests, one of them steered, and hold their rows against the reference; return each one's ranks."""
    ranks = set()
    for number in range(6):
        fields = {"steering_vectors": plain(vector(3))} if number == 3 else {}
        tokens = completion(fronts[number % len(fronts)], f"r{number}", number, **fields)
        keeper.hold(f"r{number}", tokens, reference, {1: 3} if number == 3 else None)
        ranks |= {(rank.pp, rank.dp, rank.tp) for each in keeper.ranks[f"r{number}"].values() for rank in each}
    return ranks


def steered_alike(keeper, reference, first, second):
    """Hold what one front end changes against requests of the other."""
    assert call(first, "/modules", {"name": "calm", "vectors": plain(vector(4))})[0] == 200
    tokens = completion(second, "by-module", 1, steering_name="calm")
    keeper.hold("by-module", tokens, reference, {1: 4})
    assert call(second, "/set", {"vectors": plain(vector(5), 2)})[0] == 200
    for node, name in ((first, "global-1"), (second, "global-2")):
        keeper.hold(name, completion(node, name, 2), reference, {2: 5})
    assert call(first, "/freeze", {})[0] == 200
    assert [call(node, "")[1]["frozen"] for node in (first, second)] == [True, True]
    keeper.hold("frozen", completion(second, "frozen", 2), reference)
    assert call(second, "/unfreeze", {})[0] == 200
    assert [call(node, "")[1]["frozen"] for node in (first, second)] == [False, False]
    assert call(second, "/clear", {})[0] == 200
    keeper.hold("cleared", completion(first, "cleared", 2), reference)
    assert call(first, "/modules/calm", method="DELETE")[0] == 200
    assert call(second, "/modules")[1]["modules"] == []
    eventually(lambda: len(keeper.done) == len(keeper.rows))
