"""`capflow lens read`: tables, JSON, Parquet and DuckDB of a data set, and refusals before rows are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import duckdb
import numpy as np
import pytest

pytest.importorskip("torch")

import pyarrow.parquet as pq
from click.testing import CliRunner

import capflow
from capflow import limits
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.cli import cli
from capflow.errors import CapflowError, UsageError
from capflow.lenses.captured import read_capture
from capflow_consumers.dataset.layout import SIDECAR_NAME
from tests.kit.lenses import log_softmax, save_model, save_translators, store

WORDS = {"model": {"type": "WordLevel", "vocab": {f"w{n}": n for n in range(320)}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    saved = save_model(tmp_path_factory.mktemp("model"), "llama")
    Path(saved.directory, "tokenizer.json").write_text(json.dumps(WORDS))
    return saved


@pytest.fixture(scope="module")
def rows(model, tmp_path_factory):
    return store(model, tmp_path_factory.mktemp("data") / "rows", ("r1", "r2"))


def run(*words):
    done = CliRunner().invoke(cli, ["lens", "read", *map(str, words)], catch_exceptions=True)
    if done.exception is not None:
        raise done.exception
    return done.output


def best(model, layer):
    """Return the most likely token after each position at a layer, and its probability."""
    odds = np.exp(log_softmax(model.exact(model.rows[layer])))
    return odds.argmax(axis=1), odds.max(axis=1)


def test_the_table_has_layers_and_positions(model, rows):
    lines = run(rows, "--request", "r1").splitlines()
    assert lines[0] == f"r1: logit lens of {model.directory.rpartition('/')[2]}"
    assert [line.split()[0] for line in lines[1:]] == ["position", "token", *(f"post_block:{n}" for n in (2, 1, 0))]
    assert lines[1].split()[1:] == list("012345")
    assert lines[2].split()[1:] == [f"#{token}" for token in model.tokens]
    for line in lines[3:]:
        tokens, odds = best(model, int(line.split()[0][-1]))
        cells = [f"'w{token}' {p:.2f}" for token, p in zip(tokens, odds, strict=True)]
        assert re.split(r"\s{2,}", line)[1:] == cells


def test_columns_that_do_not_fit_follow_in_another_block(rows, monkeypatch):
    from capflow.cli.lens import command

    monkeypatch.setattr(command, "_WIDTH", 45)
    lines = run(rows, "--request", "r1").splitlines()
    assert max(map(len, lines[1:])) <= 45
    assert [line.split()[1:] for line in lines if line.startswith("position")] == [["0", "1"], ["2", "3"], ["4", "5"]]


def test_one_position_has_the_k_most_likely_tokens(model, rows):
    lines = run(rows, "--request", "r1", "--positions", "5", "--k", "3", "--token", "w17").splitlines()
    assert lines[1] == "position 5, after #140"
    for line, layer in zip(lines[2:], (2, 1, 0), strict=True):
        logits = model.exact(model.rows[layer])[5]
        order = np.argsort(-logits)[:3]
        assert [f"'w{token}'" in line for token in order] == [True] * 3
        assert f"rank {1 + (logits > logits[17]).sum()} " in line
    assert lines[2].endswith("KL 0.00")


def test_every_request_has_its_table_and_many_are_counted(model, tmp_path, monkeypatch):
    from capflow.cli.lens import command

    monkeypatch.setattr(command, "_TABLES_MAX", 2)
    root = store(model, tmp_path / "rows", ("a", "b", "c"))
    output = run(root, "--positions", "last_prompt")
    assert [line.partition(":")[0] for line in output.splitlines() if "logit lens of" in line] == ["a", "b"]
    assert "capflow: 1 more requests; --request ID shows one" in output


@pytest.mark.parametrize("rows_at_once", [1024, 7, 2])
def test_json_has_what_python_reads(model, rows, rows_at_once, monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "LENS_ROWS", rows_at_once)
    path = tmp_path / "j.safetensors"
    save_translators(path, model, "jacobian")
    output = run(rows, "--request", "r2", "--lens", path, "--json", "--k", 4, "--token", "next")
    lines = {(line["site"], line["position"]): line for line in map(json.loads, output.splitlines())}
    assert len(lines) == 18
    lens = capflow.open_lens(model.directory, path)
    following = np.array([*model.tokens[1:], -1])
    for layer in range(3):
        reading = lens.top(model.rows[layer], layer, 4, token=following, last=model.rows[-1])
        for position in range(6):
            line = lines[f"post_block:{layer}", position]
            assert (line["request"], line["token_id"]) == ("r2", model.tokens[position])
            assert [token["id"] for token in line["tokens"]] == reading.ids[position].tolist()
            assert [token["text"] for token in line["tokens"]] == [f"w{n}" for n in reading.ids[position]]
            odds = [token["probability"] for token in line["tokens"]]
            np.testing.assert_allclose(odds, reading.probabilities[position], rtol=1e-5)
            assert line["divergence"] == pytest.approx(reading.divergences[position], rel=1e-4, abs=1e-6)
            if position < 5:
                assert line["chosen"]["rank"] == reading.token_ranks[position]
                assert line["chosen"]["id"] == model.tokens[position + 1]
            else:
                assert "chosen" not in line


def test_parquet_and_duckdb_have_a_row_for_each_token(model, rows, tmp_path):
    from capflow_consumers.duckdb.schema import TABLES

    files = ("--parquet", tmp_path / "lens.parquet", "--duckdb", tmp_path / "lens.duckdb")
    assert run(rows, "--k", 3, *files, "--token", "#9").startswith("capflow: 108 rows of 2 requests in ")
    table = pq.read_table(tmp_path / "lens.parquet").to_pylist()
    assert len(table) == 2 * 3 * 6 * 3
    reading = capflow.open_lens(model.directory).top(model.rows[1], 1, 3, token=9, last=model.rows[-1])
    some = [row for row in table if row["request_id"] == "r1" and row["layer"] == 1 and row["position"] == 4]
    assert [row["rank"] for row in some] == [1, 2, 3]
    assert [row["token_id"] for row in some] == reading.ids[4].tolist()
    assert [row["text"] for row in some] == reading.texts[4]
    np.testing.assert_allclose([row["logit"] for row in some], reading.logits[4], rtol=1e-5)
    np.testing.assert_allclose([row["probability"] for row in some], reading.probabilities[4], rtol=1e-5)
    assert {row["chosen_rank"] for row in some} == {reading.token_ranks[4]}
    assert {row["chosen_id"] for row in table} == {9}
    with duckdb.connect(str(tmp_path / "lens.duckdb")) as database:
        assert database.execute("SELECT count(*) FROM lens").fetchone() == (108,)
        top = database.execute(
            "SELECT layer, token_id FROM lens WHERE request_id = 'r1' AND position = 5 AND rank = 1 ORDER BY layer"
        ).fetchall()
    assert top == [(layer, best(model, layer)[0][5]) for layer in range(3)]
    # Keys are named as in the consumer's tables, so that they join.
    assert {"engine", "request_id", "position"} <= {name for name, _ in TABLES["tokens"]}


def test_a_second_lens_adds_rows_and_the_same_one_replaces_its_own(model, rows, tmp_path):
    path, database = tmp_path / "j.safetensors", tmp_path / "lens.duckdb"
    save_translators(path, model, "jacobian")
    for options in ((), ("--lens", path), ("--k", 2), ("--request", "r1", "--k", 1)):
        run(rows, "--duckdb", database, *options)
    with duckdb.connect(str(database)) as opened:
        query = "SELECT lens, request_id, count(*) FROM lens GROUP BY ALL ORDER BY ALL"
        counts = opened.execute(query).fetchall()
    assert counts == [("j", "r1", 90), ("j", "r2", 90), ("logit", "r1", 18), ("logit", "r2", 36)]
    # `capflow query` reads it.
    asked = CliRunner().invoke(cli, ["query", "SELECT max(rank) AS most FROM lens", "--path", str(database)])
    assert asked.exception is None
    assert re.search(r"most.*\b5\b", asked.output, re.DOTALL)


def test_rows_that_enter_the_next_layer_are_read_too(model, tmp_path):
    root = store(model, tmp_path / "rows", layers=[1, 2], hook="pre_attn")
    path = tmp_path / "t.safetensors"
    save_translators(path, model, "tuned", hook="pre_attn", layers=[1])
    lens = capflow.open_lens(model.directory, path)
    (line,) = [json.loads(each) for each in run(root, "--lens", path, "--json", "--positions", 2).splitlines()]
    assert line["site"] == "pre_attn:1"
    assert line["divergence"] is None
    assert [token["id"] for token in line["tokens"]] == lens.top(model.rows[1][2], 0).ids[0].tolist()


def test_a_row_with_nan_is_named_and_has_no_rows_in_tables(model, tmp_path):
    broken = save_model(tmp_path / "model", "llama")
    broken.rows[1, 3, 0] = np.nan
    root = store(broken, tmp_path / "rows")
    assert "  NaN  " in run(root)
    run(root, "--parquet", tmp_path / "lens.parquet")
    rows = pq.read_table(tmp_path / "lens.parquet").to_pylist()
    assert len(rows) == 17 * 5
    assert (1, 3) not in {(row["layer"], row["position"]) for row in rows}
    lines = [json.loads(line) for line in run(root, "--json", "--layers", 1).splitlines()]
    assert [len(line["tokens"]) for line in lines] == [5, 5, 5, 0, 5, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--request", "none"), "no such request: got none"),
        (("--layers", "3"), "got layer 3, expected 0..2"),
        (
            ("--layers", "1", "--hook", "pre_attn"),
            "request r1: sites: got post_block:0, post_block:1, post_block:2, exp",
        ),
        (("--positions", "many"), "--positions: got many, expected one of last_prompt"),
        (("--positions", "40"), "request r1: positions: got none, expected captured rows at these positions"),
        (("--token", "Paris"), "token: got 'Paris', which is no token, expected the text of one token; give the id"),
        (("--token", "#400"), "token: got 400, expected 0..319"),
        (("--model", "nowhere"), "lens: the model's files: got nowhere, which is not here, expected a directory"),
        (("--lens", "none.safetensors"), "none.safetensors: got no such file, expected a lens file"),
        (("--parquet", "none/x.parquet"), "--parquet: got none/x.parquet, expected a file in a directory that exists"),
        (("--duckdb", "."), "--duckdb: got ., expected a file in a directory that exists"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(rows, options, message):
    with pytest.raises(UsageError) as error:
        run(rows, *options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_rows_of_another_model_and_other_hooks_are_refused(model, rows, tmp_path):
    wide = save_model(tmp_path / "wide", "llama", hidden_size=96)
    with pytest.raises(UsageError, match=r"request r1: got rows of width 64, expected 96, as "):
        run(rows, "--model", wide.directory)
    root = store(model, tmp_path / "rows", hook="mlp_out")
    with pytest.raises(UsageError, match=r"^lens: rows: got mlp_out:0, expected the stream between two blocks"):
        run(root)
    database = tmp_path / "other.duckdb"
    with duckdb.connect(str(database)) as opened:
        opened.execute("CREATE TABLE lens (a INTEGER)")
    with pytest.raises(UsageError, match=r"other\.duckdb, whose table lens has a, expected a table of lens, engine"):
        run(rows, "--duckdb", database)
    (tmp_path / "text.duckdb").write_text("x" * 9000)
    with pytest.raises(UsageError, match="expected a DuckDB file that no process uses"):
        run(rows, "--duckdb", tmp_path / "text.duckdb")


def test_a_damaged_data_set_is_refused(model, tmp_path):
    root = store(model, tmp_path / "rows")
    (sidecar,) = root.glob(f"*/{SIDECAR_NAME}")
    sidecar.write_text("{}")
    with pytest.raises(CapflowError):
        run(root)


def test_python_reads_a_capture_as_the_command_does(model, rows):
    lens = capflow.open_lens(model.directory)
    capture = capflow.open(rows)["r1"]
    readings = list(read_capture(lens, capture, 2, sites=[Site(1, "post_block")], positions=Positions.LAST_PROMPT))
    assert [(each.site, each.positions.tolist()) for each in readings] == [(Site(1, "post_block"), [3])]
    assert readings[0].reading.ids.tolist() == lens.top(model.rows[1][3], 1, 2).ids.tolist()


def test_info_shows_the_origin_of_a_lens(model, tmp_path):
    path = tmp_path / "j.safetensors"
    save_translators(path, model, "jacobian", model="org/m", texts=40)
    output = CliRunner().invoke(cli, ["lens", "info", str(path)]).output
    assert [line.split() for line in output.splitlines()] == [
        ["kind", "jacobian"],
        ["num_layers", "3"],
        ["hidden_size", "64"],
        ["model", "org/m"],
        ["texts", "40"],
        ["translators", "2:", "post_block:0", "…", "post_block:1"],
    ]
    about = json.loads(CliRunner().invoke(cli, ["lens", "info", str(path), "--json"]).output)
    assert about["translators"] == ["post_block:0", "post_block:1"]
