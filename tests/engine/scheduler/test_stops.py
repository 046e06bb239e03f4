"""Answers that end by a stop string: every row of their tokens, none after them, and the status that the answer has."""

from types import SimpleNamespace

import pytest

import capflow
from capflow_engine.scheduler.stops import Stops
from tests.kit.engines import GREEDY, engine, prompts
from tests.kit.rows import ALL, check_rows

LENGTHS = (5, 70, 9)
ANSWER = 24
ENGINES = {"skip_tokenizer_init": False}


@pytest.fixture(scope="module")
def tokenizer(tiny_with_words):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_with_words)


def request(stop, prompt=(5, 6, 7), **params):
    """Return a request as a scheduler has it."""
    from vllm import SamplingParams

    params = SamplingParams(stop=stop, **params)
    return SimpleNamespace(
        request_id="r",
        sampling_params=params,
        prompt_token_ids=list(prompt),
        prompt_embeds=None,
        resumable=False,
        num_tokens=len(prompt),
        status=SimpleNamespace(name="RUNNING"),
    )


def searched(tokenizer, asked, *portions, ended="RUNNING"):
    """Return where the answer of a request ends whose tokens come in these portions."""
    stops = Stops(lambda: tokenizer)
    stops.watch(asked)
    for number, tokens in enumerate(portions, start=1):
        asked.num_tokens += len(tokens)
        asked.status.name = ended if number == len(portions) else "RUNNING"
        stops.take(asked, list(tokens))
    return stops.end("r")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("stop", "portions", "params", "generated"),
    [
        ("w20", [[10], [20], [30]], {}, 2),
        ("w20", [[10, 20, 30, 31]], {}, 2),  # drafts after it
        ("w20 w3", [[10], [20], [30], [31]], {}, 3),  # of two tokens
        (["w30", "w20"], [[10, 20, 30]], {}, 2),
        ("w20", [[10, 20, 30], [20]], {"min_tokens": 3}, 4),
        ("w20", [[10, 20, 30, 31]], {"include_stop_str_in_output": True}, 2),
        ("w99", [[10, 20], [30]], {}, None),
        ("w20", [[10, 20]], {"detokenize": True, "max_tokens": 2}, 2),
    ],
)
def test_an_answer_ends_behind_the_token_that_completes_its_stop_string(tokenizer, stop, portions, params, generated):
    end = searched(tokenizer, request(stop, **params), *portions)
    assert end == (None if generated is None else 3 + generated - 1)


@pytest.mark.engine
def test_the_text_of_a_stop_token_is_not_searched(tokenizer):
    assert searched(tokenizer, request("w20"), [10], [20], ended="FINISHED_STOPPED") is None


@pytest.mark.engine
def test_without_a_tokenizer_nothing_is_searched():
    assert searched(None, request("w20"), [20]) is None


@pytest.fixture(scope="module")
def runs(tiny_with_words, tmp_path_factory):
    """Return the outputs of one engine in a process of its own, by id, and the directory of their rows."""
    root = tmp_path_factory.mktemp("rows")
    consumer = f"filesystem:root={root},capture=requests"
    with engine(tiny_with_words, in_process=False, consumers=[consumer], **ENGINES) as llm:
        batch = prompts(LENGTHS)
        plain = llm.generate(batch, capflow.sampling_params(**asks(max_tokens=ANSWER)), use_tqdm=False)
        words = [[f"w{token}" for token in output.outputs[0].token_ids] for output in plain]
        wanted = {
            "one": (0, {"stop": [words[0][7]]}),
            "two": (1, {"stop": [" ".join(words[1][8:10])]}),
            "included": (2, {"stop": [words[2][6]], "include_stop_str_in_output": True}),
            "late": (0, {"stop": words[0][:20], "min_tokens": 12}),
            "at-the-end": (1, {"stop": [words[1][-1]], "min_tokens": ANSWER - 1}),
            "never": (2, {"stop": ["nothing"]}),
            "samples": (0, {"stop": ["7 "], "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 60}),
        }
        params = [capflow.sampling_params(id=name, capture=ALL, **asks(**more)) for name, (_, more) in wanted.items()]
        outputs = llm.generate([batch[number] for number, _ in wanted.values()], params, use_tqdm=False)
    return dict(zip(wanted, outputs, strict=True)), root


def asks(**more):
    return {**GREEDY, "detokenize": True, "max_tokens": ANSWER, **more}


@pytest.mark.engine
@pytest.mark.parametrize("name", ["one", "two", "included", "late", "at-the-end", "never", "samples"])
def test_rows_are_those_of_the_answer_s_tokens_and_the_status_is_the_answer_s(runs, reference, name):
    outputs, root = runs
    data = capflow.open(root)
    output = outputs[name]
    for sample in output.outputs:
        kept = data[name if len(output.outputs) == 1 else f"{name}#{sample.index}"]
        assert kept.sidecar.status == sample.finish_reason == ("length" if name == "never" else "stop")
        tokens = [*output.prompt_token_ids, *sample.token_ids]
        assert kept.sidecar.computed_length == len(tokens) - 1
        check_rows(kept, tokens, reference)
