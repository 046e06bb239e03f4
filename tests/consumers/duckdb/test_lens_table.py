"""The duckdb consumer with a lens: the tokens that each layer would predict after each token, once for each."""

import re

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

import capflow
from capflow import limits
from capflow.capture.frame import Frame
from capflow.capture.site import Site
from capflow.errors import RetryError, UsageError
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from tests.kit.checked import checked
from tests.kit.databases import Clock, Counts, done, opened, probe_file, query
from tests.kit.lenses import assert_tokens, save_model, save_translators
from tests.kit.sources import ROOT

TEXTS = {f"t{number}": number for number in range(96)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    made = save_model(directory, "llama")
    tokenizer = Tokenizer(models.BPE(vocab=TEXTS, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return made


def lines_of(tmp_path, request="r1"):
    """Return the lines of a request, by layer and position: token, text, probability."""
    sql = "SELECT layer, position, token_id, text, probability FROM lens_tokens"
    lines = {}
    for layer, position, *token in query(tmp_path, f"{sql} WHERE request_id = '{request}' ORDER BY ALL"):
        lines.setdefault((layer, position), []).append(tuple(token))
    return {place: sorted(tokens, key=lambda token: -token[2]) for place, tokens in lines.items()}


@pytest.mark.parametrize(("batch_rows", "rows", "dtype"), [(1, 3, "bfloat16"), (50_000, 1024, "float32")])
def test_every_token_has_what_each_layer_predicts_once(tmp_path, monkeypatch, model, batch_rows, rows, dtype):
    monkeypatch.setattr(limits, "LENS_ROWS", rows)
    probe_file(tmp_path, "p", Site(1, "post_block"), width=model.info.hidden_size)
    consumer = opened(tmp_path, "p", lens="logit", lens_tokens=4, batch_rows=batch_rows, model=model.info)
    frames = [
        model.frame("r1", positions=(0, 4), dtype=dtype, seq=1),
        model.frame("r2", positions=(0, 6), dtype=dtype, seq=2),
        model.frame("r1", positions=(4, 6), dtype=dtype, seq=3),
    ]
    for frame in frames:
        consumer.on_frame(frame)
    layers, count = len(model.rows), len(model.tokens)
    for request in ("r1", "r2"):
        assert consumer.on_request_done(done(request, count, count, rows=layers * count)).status == "ok"
    consumer.close()
    stream = model.rows.astype(np.dtype(dtype)).astype(np.float32)
    lens = capflow.open_lens(model.directory)
    for request in ("r1", "r2"):
        lines = lines_of(tmp_path, request)
        assert lines.keys() == {(layer, position) for layer in range(layers) for position in range(count)}
        for layer in range(layers):
            reading = lens.top(stream[layer], layer, k=4)
            for position, expected in enumerate(model.lens(stream[layer])):
                tokens = lines[layer, position]
                assert_tokens([(token, odds) for token, _, odds in tokens], expected, k=4)
                assert [token for token, *_ in tokens] == reading.ids[position].tolist()
                np.testing.assert_allclose([odds for *_, odds in tokens], reading.probabilities[position], rtol=1e-5)
                assert [text for _, text, _ in tokens] == [f"t{n}" if n < 96 else None for n, *_ in tokens]
    ranks = query(tmp_path, "SELECT rank, count(*), count(DISTINCT (request_id, layer, position)) FROM lens_tokens "
                            "GROUP BY rank ORDER BY rank")  # fmt: skip
    assert ranks == [(rank, 2 * layers * count, 2 * layers * count) for rank in (1, 2, 3, 4)]
    falling = "SELECT bool_and(probability <= before) FROM (SELECT probability, lag(probability) OVER (PARTITION BY "
    falling += "capture, layer, position ORDER BY rank) AS before FROM lens_tokens)"
    assert query(tmp_path, falling) == [(True,)]
    assert query(tmp_path, "SELECT count(*) FROM scores") == [(2 * 2 * count,)]
    assert query(tmp_path, "SELECT name, kind, model, file FROM lenses") == [("logit", "logit", model.directory, "")]
    for sql in re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "lenses.md").read_text(), re.DOTALL):
        assert query(tmp_path, sql)


def test_a_lens_file_reads_the_layers_that_are_named(tmp_path, model):
    save_translators(tmp_path / "jac.safetensors", model, "jacobian")
    file = str(tmp_path / "jac.safetensors")
    consumer = opened(tmp_path, lens=file, lens_layers="0+-1", lens_tokens=3, model=model.info)
    assert consumer.spec().hooks == {"post_block": [-1, 0]}
    assert consumer.look()[1].startswith("capflow query 'FROM lens_tokens LIMIT 20' --path ")
    consumer.on_frame(model.frame("r1"))
    consumer.on_request_done(done("r1", 6, 6, rows=len(model.rows) * 6))
    consumer.close()
    lens = capflow.open_lens(model.directory, file)
    last = len(model.rows) - 1
    lines = lines_of(tmp_path)
    assert {layer for layer, _ in lines} == {0, last}
    for layer in (0, last):
        reading = lens.top(model.rows[layer], layer, k=3)
        assert [[n for n, *_ in lines[layer, p]] for p in range(6)] == reading.ids.tolist()
    assert query(tmp_path, "SELECT DISTINCT lens FROM lens_tokens") == [("jac",)]
    assert query(tmp_path, "SELECT name, kind, file FROM lenses") == [("jac", "jacobian", file)]


def test_rows_without_numbers_have_no_tokens(tmp_path, model):
    frame = model.frame("r1", layers=[0], positions=(0, 3))
    rows = np.frombuffer(bytes(frame.payload), np.float32).reshape(3, -1).copy()
    rows[1, 5] = np.nan
    consumer = opened(tmp_path, lens="logit", lens_tokens=2, model=model.info)
    consumer.on_frame(Frame.seal(frame.header, rows.view(np.uint8).reshape(-1)))
    consumer.on_request_done(done("r1", 6, 3, rows=3))
    consumer.close()
    assert lines_of(tmp_path).keys() == {(0, 0), (0, 2)}


def test_what_is_given_again_after_a_kill_or_a_failed_write_is_there_once(tmp_path, model, monkeypatch):
    frames = [model.frame("r1", positions=(0, 4), seq=1), model.frame("r1", positions=(4, 6), seq=2)]
    killed = opened(tmp_path, lens="logit", lens_tokens=2, batch_rows=1, model=model.info)
    killed.on_frame(frames[0])
    killed.config = msgspec.structs.replace(killed.config, batch_rows=50_000)
    killed.on_frame(frames[1])
    killed._database.close()  # with what is pending
    killed._port.close()
    consumer = opened(tmp_path, lens="logit", lens_tokens=2, model=model.info)
    for frame in frames:
        consumer.on_frame(frame)
    append = consumer._database.append

    def fails(*_):
        raise RetryError("no room")

    monkeypatch.setattr(consumer._database, "append", fails)
    ends = done("r1", 6, 6, rows=6 * len(model.rows))
    for _ in range(2):
        with pytest.raises(RetryError):
            consumer.on_request_done(ends)
    monkeypatch.setattr(consumer._database, "append", append)
    assert consumer.on_request_done(ends).status == "ok"
    consumer.close()
    lines = lines_of(tmp_path)
    assert {len(tokens) for tokens in lines.values()} == {2}
    assert len(lines) == 6 * len(model.rows)
    # The rows that the first one wrote were not read again, and no retry reads rows again.
    assert consumer._context.counts["working"] == 1
    assert query(tmp_path, "SELECT count(*) FROM lenses") == [(1,)]


def joins(tmp_path, info, options):
    consumer = DuckdbConsumer(DuckdbConfig(str(tmp_path / "scores.duckdb"), **options), Clock())
    checked(consumer)
    consumer.open(Counts())
    try:
        consumer.on_session("engine-1", info)
    finally:
        consumer.close()


def refused(tmp_path, message, info=None, **options):
    with pytest.raises(UsageError) as caught:
        joins(tmp_path, info, options)
    assert message in str(caught.value)


def test_what_lenses_and_models_are_refused(tmp_path, model):
    info, own = model.info, str(tmp_path / "own.safetensors")
    save_translators(own, model, "tuned")
    refused(tmp_path, "consumers.duckdb.lens_tokens: got 0, expected 1..1024", lens="logit", lens_tokens=0)
    refused(tmp_path, "consumers.duckdb.lens_layers: got x, expected", lens="logit", lens_layers="x")
    refused(tmp_path, "consumers.duckdb.lens: ", lens=str(tmp_path / "nothing.safetensors"))
    gone = msgspec.structs.replace(info, name="nobody/nothing")
    refused(tmp_path, "got nobody/nothing, which is not here", gone, lens="logit")
    wide = msgspec.structs.replace(info, hidden_size=info.hidden_size + 1)
    refused(tmp_path, f"expected those of the engine's model: {info.num_layers} or more", wide, lens="logit")
    refused(tmp_path, "consumers.duckdb.lens_layers.hooks.post_block", info, lens="logit", lens_layers=[99])
    few = str(tmp_path / "few.safetensors")
    save_translators(few, model, "jacobian", layers=[0])
    refused(tmp_path, "few.safetensors: rows: got post_block:1", info, lens=few, lens_layers=[1])
    strange = str(tmp_path / "strange.safetensors")
    save_translators(strange, model, "jacobian", fingerprint="0123")
    refused(tmp_path, "accept them with other_weights", info, lens=strange)
    opened(tmp_path, lens=strange, other_weights=True, model=info).close()

    consumer = opened(tmp_path, lens="logit", model=info)
    other = save_model(tmp_path / "other", "llama", tied=True)
    with pytest.raises(UsageError, match=r"got a second model, .*other, expected .*model"):
        consumer.on_session("engine-2", other.info)
    with pytest.raises(UsageError, match="a second model"):
        consumer.on_frame(other.frame("r9", engine="engine-2"))
    consumer.on_frame(model.frame("r1"))
    consumer.close()
    refused(tmp_path, "lens logit: the database has tokens of another lens of this name", other.info, lens="logit")
    save_translators(own, model, "tuned", scale=0.2)
    consumer = opened(tmp_path, lens=own, model=info)
    consumer.on_frame(model.frame("r1", engine="engine-1", seq=9))
    consumer.close()
    save_translators(own, model, "tuned")
    refused(tmp_path, "another lens of this name", info, lens=own)
