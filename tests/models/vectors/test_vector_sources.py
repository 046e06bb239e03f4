"""Vectors of features, of probes and of published contrast sets."""

import json

import msgspec
import numpy as np
import pytest
from safetensors import safe_open

import capflow
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.probes.probe import Probe
from capflow_models.jobs import fitjob
from capflow_models.jobs.fitjob import FitJob, fit
from capflow_models.jobs.vectorjob import VectorJob, work
from capflow_models.vectors.file import load_sites
from capflow_models.vectors.sets import ContrastPrompt, as_prompts, in_chat, read_caa, read_pairs, read_reading
from capflow_models.vectors.sources import load_directions, of_length, probe_vector, sae_vector
from tests.kit.autoencoders import COUNT, WIDTH, gemma_scope, saelens, sparsify, weights
from tests.kit.engines import save_tiny, save_words

SITE = Site(2, "post_block")


def header(path):
    with safe_open(path, "numpy") as file:
        return file.metadata()


# Features.


@pytest.mark.parametrize("kind", ["saelens", "sparsify", "gemma_scope", "transcoder"])
def test_a_vector_is_the_sum_of_decoder_rows_at_the_target(tmp_path, kind):
    tensors = weights(jumps=kind == "gemma_scope")
    if kind == "transcoder":
        hooks = {"hook": "blocks.1.hook_resid_mid", "hook_out": "blocks.1.hook_mlp_out"}
        source = saelens(tmp_path / "sae", tensors, "transcoder", **hooks)
    else:
        source = {"saelens": saelens, "sparsify": sparsify, "gemma_scope": gemma_scope}[kind](tmp_path / "sae", tensors)
    site = "" if kind in ("saelens", "transcoder") else "post_block:1"
    out = tmp_path / "v.safetensors"
    work(VectorJob("sae", [str(source)], str(out), site, {3: 2.0, 7: -0.5}))
    expected = 2.0 * tensors["W_dec"][3].astype(np.float64) - 0.5 * tensors["W_dec"][7]
    target = Site(1, "mlp_out" if kind == "transcoder" else "post_block")
    assert list(load_sites(out)) == [target]
    assert np.array_equal(load_sites(out)[target], expected.astype(np.float32))
    origin = header(out)
    assert (origin["source"], origin["features"], origin["method"]) == ("sae", "3=2,7=-0.5", "sae")
    assert origin["made_by"] == f"capflow {capflow.__version__}"


def test_a_feature_that_is_none_is_refused(tmp_path):
    sae = capflow.load_sae(saelens(tmp_path / "sae", weights()))
    with pytest.raises(UsageError, match=f"feature: got {COUNT}, expected a feature of .*, 0..{COUNT - 1}"):
        sae_vector(sae, {COUNT: 1.0})
    with pytest.raises(UsageError, match="feature: got none"):
        sae_vector(sae, {})
    with pytest.raises(UsageError, match=r"got .*e\+39, expected numbers of float32's range"):
        sae_vector(sae, {0: 3e39})


# Probes.


def probe_file(path, count=1):
    weight = np.random.default_rng(4).normal(size=(count, WIDTH))
    Probe.make(SITE, weight, names=[f"p{n}" for n in range(count)]).save(path)
    return path, weight.astype(np.float32)


def test_a_vector_is_the_weight_of_a_probe(tmp_path):
    path, weight = probe_file(tmp_path / "p.safetensors", 3)
    out = tmp_path / "v.safetensors"
    work(VectorJob("probe", [str(path)], str(out), name="p1", length=5.0))
    unit = weight[1].astype(np.float64) / np.linalg.norm(weight[1].astype(np.float64))
    assert np.allclose(load_sites(out)[SITE], 5 * unit, rtol=1e-6)
    assert (header(out)["probe"], len(header(out)["source_sha256"])) == ("p1", 64)
    probe = Probe.load(path)
    vector = probe_vector(probe, "p1")
    row = np.random.default_rng(5).normal(size=(1, WIDTH)).astype(np.float32)
    gain = probe.scores(row + vector)[0, 1] - probe.scores(row)[0, 1]
    assert gain == pytest.approx(np.linalg.norm(vector) ** 2, rel=1e-4)


def test_a_probe_without_one_direction_is_refused(tmp_path):
    path, _ = probe_file(tmp_path / "p.safetensors", 2)
    with pytest.raises(UsageError, match="name: got 2 probes, expected one; name one of p0, p1"):
        probe_vector(Probe.load(path))
    with pytest.raises(UsageError, match="name: got x, expected one of p0, p1"):
        probe_vector(Probe.load(path), "x")
    saelens(tmp_path / "sae", weights())
    from click.testing import CliRunner

    from capflow.cli.probe.command import probe

    made = CliRunner().invoke(probe, ["sae", str(tmp_path / "sae"), "--out", str(tmp_path / "f.safetensors")])
    assert made.exit_code == 0
    with pytest.raises(UsageError, match=r"got a probe of kind sae.* `capflow vectors sae` makes a vector"):
        work(VectorJob("probe", [str(tmp_path / "f.safetensors")], str(tmp_path / "v.safetensors")))
    with pytest.raises(UsageError, match="v: got a vector of zeros"):
        of_length(np.zeros(3, np.float32), 1.0, "v")
    with pytest.raises(UsageError, match=r"--out: got v.npz, expected a .safetensors file in a directory"):
        work(VectorJob("probe", [str(path)], "v.npz"))


def test_directions_come_from_either_kind_of_file(tmp_path):
    path, weight = probe_file(tmp_path / "p.safetensors")
    assert np.array_equal(load_directions(path)[SITE], weight[0])
    work(VectorJob("probe", [str(path)], str(tmp_path / "v.safetensors")))
    assert np.array_equal(load_directions(tmp_path / "v.safetensors")[SITE], weight[0])


# Contrast sets.

QUESTION = "I like tea. Is tea the best?\n\nChoices:\n (A) Yes, it is\n (B) That depends"
CAA = [
    {"question": QUESTION, "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(B)"},
    {"question": "Is it?\n\nAnswer:", "answer_matching_behavior": " No", "answer_not_matching_behavior": " Yes",
     "statement": "it is", "label_confidence": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("lines", [False, True])
def test_a_set_of_caa_ends_with_the_letter_of_the_answer(tmp_path, lines):
    path = tmp_path / "set.json"
    path.write_text("\n".join(map(json.dumps, CAA)) if lines else json.dumps(CAA, indent=2))
    assert as_prompts(read_caa(path)) == [
        (f"{QUESTION}\n\nAnswer: (A", f"{QUESTION}\n\nAnswer: (B"),
        ("Is it?\n\nAnswer: No", "Is it?\n\nAnswer: Yes"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "got no questions"),
        ("", "got no lines"),
        ('[{"question": "a"}]', r"missing required field `answer_matching_behavior` - at `\$\[0\]`"),
        ("[" * 100_000, "expected a list of objects of question, answer_matching_behavior"),
        ('{"question": 1}', "line 1: got Expected `str`"),
        (json.dumps([CAA[0] | {"answer_not_matching_behavior": " (A)"}]), "question 1: answers: got '.A.' and ' .A.'"),
        (json.dumps([CAA[0] | {"answer_matching_behavior": " "}]), "expected a question, and two different answers"),
    ],
)
def test_a_set_of_caa_that_is_none_is_refused(tmp_path, content, message):
    path = tmp_path / "set.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as raised:
        read_caa(path)
    assert "\n" not in str(raised.value)


def test_texts_are_put_in_both_templates(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("The sky is blue.\n\nFire is {cold}.\n")
    pairs = as_prompts(read_reading(path, "Honestly: {text}", "Lie: {text}"))
    assert pairs == [
        ("Honestly: The sky is blue.", "Lie: The sky is blue."),
        ("Honestly: Fire is {cold}.", "Lie: Fire is {cold}."),
    ]
    with pytest.raises(UsageError, match=r"--negative-template: got Lie, expected a text with {text} in it"):
        read_reading(path, "{text}", "Lie")
    with pytest.raises(UsageError, match="--negative-template: got the positive one"):
        read_reading(path, "{text}", "{text}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_words(directory)
    return save_tiny(directory)


def test_chat_needs_a_template_and_adds_no_second_beginning(tiny, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "pairs.jsonl").write_text('{"positive": "w5", "negative": "w6"}\n')
    with pytest.raises(
        UsageError, match=r"--chat: got .* has no chat template, expected a chat model; leave --chat out"
    ):
        as_prompts(read_pairs(tmp_path / "pairs.jsonl"), tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = (
        "w2{% for m in messages %} w3 {{ m.content }}{% endfor %}{% if add_generation_prompt %} w4 {% endif %}"
    )
    assert in_chat(tokenizer, ContrastPrompt("w7 w8", "w9")) == [2, 3, 7, 8, 4, 9]
    assert in_chat(tokenizer, ContrastPrompt("w7")) == [2, 3, 7, 4]


def reading_direction(model, tokenizer, pairs, layer):
    """Return the reading vector of Zou et al., by scikit-learn, and the mean difference along it, in float64.

    The differences are taken in both orders, which is what their shuffling of pairs comes to, so that they are centred.
    """
    import torch
    from sklearn.decomposition import PCA

    rows = []
    with torch.no_grad():
        for text in (text for pair in pairs for text in pair):
            ids = torch.tensor([tokenizer(text).input_ids])
            rows.append(model(ids, output_hidden_states=True).hidden_states[layer + 1][0, -1].double().numpy())
    differences = np.stack(rows[::2]) - np.stack(rows[1::2])
    direction = PCA(1, svd_solver="full").fit(np.concatenate([differences, -differences])).components_[0]
    along = float((differences @ direction).mean())
    return direction * along, differences.mean(0)


def test_layers_are_checked_before_a_model_is_loaded(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(fitjob, "open_model", None)
    (tmp_path / "pairs.jsonl").write_text('{"positive": "w5", "negative": "w6"}\n')
    job = FitJob(tiny, "transformers", str(tmp_path / "out.safetensors"), pairs=str(tmp_path / "pairs.jsonl"))
    for layers, message in (("9", "--layers: got layer 9, expected 0"), ("x", "--layers: got x, expected")):
        with pytest.raises(UsageError, match=f"^{message}"):
            fit(msgspec.structs.replace(job, layers=layers))


def test_a_fit_from_templates_is_the_reading_vector(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"w{n} w{n + 30}\n" for n in range(10, 18)))
    templates = "w200 w201 {text} w50", "w210 {text} w50"
    job = FitJob(
        tiny, "transformers", str(tmp_path / "v.safetensors"), texts=str(texts), positive_template=templates[0],
        negative_template=templates[1], method="pca", layers="1-2", arguments={"dtype": "float32"},
    )  # fmt: skip
    fit(job)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    pairs = [[template.replace("{text}", text) for template in templates] for text in texts.read_text().splitlines()]
    for site, vector in load_sites(job.out).items():
        expected, mean = reading_direction(model, tokenizer, pairs, site.layer)
        assert np.allclose(vector, expected, atol=1e-4)
        assert not np.allclose(vector, mean, atol=1e-2)
    assert (header(job.out)["method"], header(job.out)["model"]) == ("pca", tiny)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_model_has_the_vectors_of_both_papers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(capflow.demo_model())
    items = [
        {
            "question": f"Do you agree that {claim}?\n\nChoices:\n (A) I agree\n (B) I do not agree",
            "answer_matching_behavior": "(A)" if number % 2 else "(B)",
            "answer_not_matching_behavior": "(B)" if number % 2 else "(A)",
        }
        for number, claim in enumerate(("tea is best", "cats are kind", "rain is fun", "red is loud"))
    ]
    caa, texts = tmp_path / "caa.json", tmp_path / "texts.txt"
    caa.write_text(json.dumps(items))
    texts.write_text("The sky is\nParis lies in\nMy mother is\nThe moon is\nBread is\n")
    templates = "Pretend you are an honest person: {text}", "Pretend you are a dishonest person: {text}"
    common = {"layers": "9", "arguments": {"dtype": "float32"}}
    fit(FitJob("demo", "transformers", str(tmp_path / "caa.safetensors"), caa=str(caa), **common))
    fit(
        FitJob("demo", "transformers", str(tmp_path / "repe.safetensors"), texts=str(texts), method="pca",
               positive_template=templates[0], negative_template=templates[1], **common)
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    choices = [
        [f"{item['question']}\n\nAnswer: {item[field][:2]}" for field in
         ("answer_matching_behavior", "answer_not_matching_behavior")] for item in items
    ]  # fmt: skip
    _, mean = reading_direction(model, tokenizer, choices, 9)
    ours = load_sites(tmp_path / "caa.safetensors")[Site(9, "post_block")]
    assert np.linalg.norm(ours - mean) < 1e-4 * np.linalg.norm(mean)
    pairs = [[template.replace("{text}", text) for template in templates] for text in texts.read_text().splitlines()]
    expected, _ = reading_direction(model, tokenizer, pairs, 9)
    ours = load_sites(tmp_path / "repe.safetensors")[Site(9, "post_block")]
    assert np.linalg.norm(ours - expected) < 1e-4 * np.linalg.norm(expected)
