"""`capflow.AsyncLLM` in a process of its own, as a program uses it: requests at once, captured, steered, aborted."""

import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import AsyncGenerator

import pytest

import capflow
from tests.kit.engines import GREEDY, environment, prompts, relative_error, vector
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

STEERING = {"post_block": {1: vector(1)}}


async def drive(model, root):
    """Run requests at once, and print their outputs."""
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    from capflow_engine.compat.engine import running_requests

    llm = capflow.AsyncLLM.start(
        model, consumers=[f"filesystem:root={root},capture=requests"], dtype="float32", enforce_eager=True,
        skip_tokenizer_init=True, max_model_len=128,
    )  # fmt: skip
    message = {}
    async with llm:

        async def yielded(prompt, **options):
            params = capflow.sampling_params(**{**GREEDY, "max_tokens": 6, **options})
            if isinstance(prompt, AsyncGenerator):
                params.output_kind = RequestOutputKind.DELTA  # as vLLM wants it of streaming input
            return [output async for output in llm.generate(prompt, params)]

        async def last(prompt, **options):
            return (await yielded(prompt, **options))[-1]

        first, second = prompts([9, 30])
        capture = {"hooks": {"post_block": "all"}}
        two = functools.partial(yielded, second, capture=capture, n=2, temperature=1.0, seed=1)
        plain, steered, together, other = await asyncio.gather(
            last(first, id="plain", capture=capture),
            last(first, id="steered", capture=capture, steering_vectors=STEERING),
            two(id="two"),
            last(second),
        )
        outputs = [plain, steered, together[-1], other]
        # In a batch with others, vLLM 0.26 draws other tokens with the same seed.
        samples = samples_of(await two(id="alone"))
        stop = next(token for token in samples[0].token_ids[:-1] if token not in samples[1].token_ids)
        apart = await two(id="apart", stop_token_ids=[stop])  # the first sample ends before the second
        message["tokens"] = [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
        message["results"] = [
            {name: result.status for name, result in output.capture_results.items()} for output in (*outputs, apart[-1])
        ]
        message["each"] = [
            [sample.capture_results["filesystem"].status for sample in samples_of(ones)] for ones in (together, apart)
        ]
        message["lengths"] = [len(sample.token_ids) for sample in samples_of(apart)]
        llm.steering.set_global(capflow_steering(), replace=True)
        message["global"] = list((await last(first)).outputs[0].token_ids)
        collector = await llm.add_request("added", first, capflow.sampling_params(**GREEDY, max_tokens=6))
        added = []
        while not (added and added[-1].finished):
            added.append(await collector.get())
        message["added"] = list(added[-1].outputs[0].token_ids)
        llm.steering.clear_global()
        ones = await asyncio.gather(*(last(first, decode_steering_vectors=STEERING, max_tokens=n) for n in (1, 2)))
        message["applied"] = [None if one is None else [one.prefill, one.decode] for one in (
            *(output.steering_applied for output in ones), outputs[0].steering_applied, outputs[1].steering_applied,
        )]  # fmt: skip
        far = {"post_block": {1: {"positions": [14], "vector": vector(1)}}}  # the prompt has 9 tokens
        message["reach"] = []
        for run in (last(first, steering_patches=far), llm.add_request("far", first, capflow.sampling_params(
            **GREEDY, max_tokens=6, steering_patches=far,
        )), last(first, steering_patches=far, max_tokens=7)):  # fmt: skip
            try:
                message["reach"].append(len((await run).outputs))
            except capflow.UsageError as e:
                message["reach"].append(str(e))
        own = llm.input_processor.process_inputs("own", first, SamplingParams(**GREEDY), supported_tasks=("generate",))
        message["own"] = []
        for run in (last(own), llm.add_request("own", own, SamplingParams(**GREEDY))):
            try:
                await run
            except capflow.UsageError as e:
                message["own"].append(str(e))
        message["shared"] = []
        for wrong in ({"post_block": {1: [1.0]}}, {"mlp_out": {1: [1.0] * 64}}):
            steering = capflow_steering(wrong)
            for change in (functools.partial(llm.steering.register, "wrong"), llm.steering.set_global):
                try:
                    change(steering)
                except capflow.UsageError as e:
                    message["shared"].append(str(e).partition(":")[0])
        try:
            await last(first, steering_vectors={"post_block": {1: [1.0]}})
        except capflow.UsageError as e:
            message["refused"] = str(e)

        async def parts(**options):
            yield StreamingInput({"prompt_token_ids": [*first["prompt_token_ids"]]})  # which vLLM makes longer
            yield StreamingInput(second, SamplingParams(**GREEDY, output_kind=RequestOutputKind.DELTA))
            if options:
                yield StreamingInput(second, capflow.sampling_params(**GREEDY, **options))

        message["parts"] = len((await last(parts(), steering_vectors=STEERING)).outputs)
        try:
            await last(parts(steering_vectors=STEERING))
        except capflow.UsageError as e:
            message["part"] = str(e)
        twice = await asyncio.gather(last(first, id="x"), last(second, id="x"), return_exceptions=True)
        message["twice"] = [str(one) for one in twice if isinstance(one, capflow.UsageError)]
        task = asyncio.create_task(last(first, id="gone", max_tokens=100))
        await asyncio.to_thread(eventually, lambda: running_requests(llm))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        message["after"] = [list((await last(first)).outputs[0].token_ids)]
    print("SAID " + json.dumps(message))


def samples_of(outputs):
    """Return the last state of each sample of a request; one that ends before the others is in no later output."""
    samples = {sample.index: sample for output in outputs for sample in output.outputs}
    return [samples[index] for index in sorted(samples)]


def capflow_steering(vectors=STEERING):
    from capflow.steering.request import Steering

    return Steering.parse({"steering_vectors": vectors})


@pytest.fixture(scope="module")
def report(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("rows")
    with environment(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1"):
        done = subprocess.run(
            [sys.executable, __file__, tiny, str(root)], capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("SAID ")[2]) | {"stderr": done.stderr}, root


def test_the_end_is_silent(report):
    output, _ = report
    words = ("Traceback", "Exception ignored", "leaked", "force kill")
    lines = output["stderr"].splitlines()
    assert [lines[n : n + 30] for n, line in enumerate(lines) if any(word in line for word in words)] == []


def test_requests_at_once_are_captured_and_steered(report, reference):
    output, root = report
    (plain,), (steered,), _, _ = output["tokens"]
    data = capflow.open(root)
    prompt = prompts([9, 30])[0]["prompt_token_ids"]
    for name, tokens, steering in (("plain", plain, None), ("steered", steered, STEERING)):
        ids = [*prompt, *tokens[:-1]]
        expected = reference.post_block(ids, steering and {1: (STEERING["post_block"][1], 0)})
        for layer, rows in enumerate(expected):
            got = data[name][capflow.Site(layer, "post_block")].rows
            assert relative_error(got, rows) < 1e-5
    assert output["global"] == output["added"] == steered != plain


def test_each_output_and_each_sample_says_what_became_of_its_rows(report):
    output, _ = report
    assert output["results"] == [{"filesystem": "ok"}] * 3 + [{"filesystem": "not_requested"}, {"filesystem": "ok"}]
    assert output["each"] == [["ok", "ok"]] * 2
    assert output["lengths"][0] < output["lengths"][1] == 6


def test_each_last_output_says_what_steered_it(report):
    output, _ = report
    here = {"post_block:1": 1}
    assert output["applied"] == [[{}, {}], [{}, here], None, [here, here]]


def test_what_does_not_fit_the_prompt_or_the_model_is_refused(report):
    output, _ = report
    words = "steering_patches.post_block.1.positions: got 14, expected below 14, "
    assert [one if isinstance(one, int) else one.startswith(words) for one in output["reach"]] == [True, True, 1]
    assert [one.partition(",")[0] for one in output["own"]] == ["prompt: got an EngineCoreRequest"] * 2
    assert output["shared"] == ["steering_vectors.post_block.1"] * 2 + ["steering_vectors.mlp_out.1"] * 2


def test_what_is_wrong_is_refused_and_what_is_cancelled_leaves_nothing_behind(report):
    output, _ = report
    assert output["refused"].startswith("steering_vectors.post_block.1")
    assert output["parts"] == 1
    assert output["part"].startswith("sampling_params of a part")
    assert output["after"] == output["tokens"][0]
    assert output["twice"] == ["id: got x, expected one that no running request has"]


if __name__ == "__main__":
    asyncio.run(drive(*sys.argv[1:]))
