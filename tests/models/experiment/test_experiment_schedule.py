"""Cells, their order, and the rules by which gates steer."""

import csv
import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from capflow.errors import UsageError
from capflow_models.experiment.arms import Setting
from capflow_models.experiment.file import ArmOptions, GateOptions
from capflow_models.experiment.gating import first_firing, steered_positions
from capflow_models.experiment.prompts import LabelledPrompt, read_rows
from capflow_models.experiment.records import ROWS, Cell, OutputLines, done_of, encoded, read_cells
from capflow_models.experiment.schedule import blocks, key_of
from capflow_models.runs.lines import LineFile
from capflow_models.runs.output import remove_leftovers

PROMPTS = [LabelledPrompt(n, f"p{n}", f"w{n}", "target" if n < 6 else "benign") for n in range(12)]
SETTINGS = [
    Setting("baseline-0", "baseline", "baseline"),
    *(Setting(f"always_on-{n}", "always_on", "always_on", scale=float(n), layer=2) for n in range(1, 4)),
]


def test_every_cell_is_in_one_block_and_every_block_has_all_arms_on_the_same_prompts():
    made = list(blocks(SETTINGS, PROMPTS, [0, 1], 4))
    keys = [key_of(t.setting, p.id, block.seed) for block in made for t in block.turns for p in t.prompts]
    assert len(keys) == len(set(keys)) == len(SETTINGS) * len(PROMPTS) * 2
    for block in made:
        assert {turn.setting for turn in block.turns} == set(SETTINGS)
        assert all(turn.prompts == block.prompts for turn in block.turns)
        assert {prompt.label for prompt in block.prompts} == {"target", "benign"}


def test_the_order_of_arms_is_shuffled_and_the_same_in_every_run():
    orders = [tuple(turn.setting.name for turn in block.turns) for block in blocks(SETTINGS, PROMPTS, range(8), 4)]
    assert orders == [tuple(t.setting.name for t in b.turns) for b in blocks(SETTINGS, PROMPTS, range(8), 4)]
    firsts = {order[0] for order in orders}
    assert firsts == {setting.name for setting in SETTINGS}


def test_finished_cells_are_not_in_the_blocks_and_do_not_change_the_order_of_the_others():
    everything = list(blocks(SETTINGS, PROMPTS, [0], 4))
    done = {key_of(t.setting, p.id, 0) for t in everything[0].turns for p in t.prompts}
    done.add(key_of(everything[1].turns[0].setting, everything[1].prompts[0].id, 0))
    rest = list(blocks(SETTINGS, PROMPTS, [0], 4, done))
    assert [block.number for block in rest] == [1, 2]
    assert [t.setting for t in rest[0].turns] == [t.setting for t in everything[1].turns]
    assert len(rest[0].turns[0].prompts) == 3
    assert len(rest[0].turns[1].prompts) == 4


SCORES = np.array([0.0, 3.0, 0.0, 0.0, 5.0, 0.0])


@pytest.mark.parametrize(
    ("kind", "sharpness", "latch", "positions", "expected"),
    [
        ("always_on", None, True, range(6), [1, 1, 1]),
        ("baseline", None, True, range(6), [0, 0, 0]),
        ("gated_sync", None, True, range(6), [1, 1, 1]),
        ("gated_sync", None, False, range(6), [0, 0, 1]),
        ("in_graph", np.inf, True, range(6), [1, 1, 1]),
        ("in_graph", np.inf, False, range(6), [0, 1, 0]),
        ("in_graph", 1.0, False, range(6), [1 / (1 + np.exp(2)), 1 / (1 + np.exp(-3)), 1 / (1 + np.exp(2))]),
        ("gated_async", None, True, range(6), [0, 0, 1]),
    ],
)
def test_a_vector_acts_where_its_tier_says(kind, sharpness, latch, positions, expected):
    """Three tokens of the prompt and three generated inputs; scores from 2 on fire."""
    setting = Setting("x-0", "x", kind, threshold=2.0, sharpness=sharpness, scale=1.0, layer=2)
    actions = [{"kind": "steer", "position": 5}] if kind == "gated_async" else []
    gate = GateOptions(latch=latch)
    steered = steered_positions(setting, ArmOptions(), gate, list(positions), SCORES, 3, 3, actions)
    assert steered == pytest.approx(expected)


def test_the_first_firing_is_counted_from_the_first_generated_position():
    assert first_firing(range(6), SCORES, 2.0, 3) == -2
    assert first_firing(range(6), SCORES, 4.0, 3) == 1
    assert first_firing(range(6), SCORES, 9.0, 3) is None


def test_rows_come_from_json_lines_csv_and_hugging_face_data_sets(tmp_path):
    import datasets

    rows = [{"prompt": f"say, {n}", "label": "target" if n % 2 else "benign"} for n in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "label"])
        writer.writeheader()
        writer.writerows(rows)
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([4])}).save_to_disk(tmp_path / "split")
    for name, split in (("a.jsonl", ""), ("a.csv", ""), ("one", ""), ("split", "train")):
        assert [row for _, row in read_rows(tmp_path / name, split)] == rows
    assert len(list(read_rows(tmp_path / "split", "test"))) == 1
    with pytest.raises(UsageError, match="split: got none, expected one of train"):
        list(read_rows(tmp_path / "split"))
    with pytest.raises(UsageError, match="expected a directory of Dataset"):
        list(read_rows(tmp_path))
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\nno\n')
    with pytest.raises(UsageError, match="line 2: got"):
        list(read_rows(tmp_path / "bad.jsonl"))


def test_files_of_excel_and_texts_with_any_line_separator_are_read(tmp_path):
    texts = ["a\u2028b\x85c", "d\ne, f"]
    rows = [{"prompt": text, "label": "target"} for text in texts]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text(f'\ufeffprompt,label\n{texts[0]},target\n"{texts[1]}",target\nlast,target\n')
    assert [row for _, row in read_rows(tmp_path / "a.jsonl")] == rows
    read = list(read_rows(tmp_path / "a.csv"))
    assert [row["prompt"] for _, row in read] == [*texts, "last"]
    assert [place.rpartition(" ")[2] for place, _ in read] == ["2", "3", "5"]
    assert list(read[0][1]) == ["prompt", "label"]


def test_a_row_of_csv_that_cannot_be_read_is_refused_with_its_line(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,label\nhello, you,target\n")
    with pytest.raises(
        UsageError, match=r"line 2: got 3 fields, expected at most 2; put a text with a comma in quotes"
    ):
        list(read_rows(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text(f"prompt,label\n{'a' * 200_000},target\n")
    with pytest.raises(UsageError, match=r"line 2: got field larger than field limit"):
        list(read_rows(tmp_path / "a.csv"))


def make_cell(**fields):
    base = {
        "arm": "in_graph", "kind": "in_graph", "threshold": 0.5, "sharpness": float("inf"), "scale": 1.0, "layer": 2,
        "prompt_id": "p0", "label": "target", "seed": 0, "digest": "d", "prompt": "w5", "text": "w6", "tokens": [6],
        "prompt_tokens": 1, "finish": "stop", "block": 0, "turn": 0,
    }  # fmt: skip
    return Cell(**(base | fields))


def test_cells_come_back_as_they_were_written_a_hard_sharpness_too(tmp_path):
    cells = [make_cell(), make_cell(prompt_id="p1", sharpness=2.0, kl=[0.5])]
    with LineFile(tmp_path / "cells.jsonl") as file:
        file.add(encoded(cells))
        assert read_cells(file) == cells


def test_values_that_are_no_numbers_come_back(tmp_path):
    cell = make_cell(kl=[float("nan"), float("inf"), 0.5], scores=[-float("inf")], held_out=float("nan"))
    with LineFile(tmp_path / "cells.jsonl") as file:
        file.add(encoded([cell]))
        (read,) = read_cells(file)
    assert np.array_equal(read.kl, cell.kl, equal_nan=True)
    assert read.scores == cell.scores
    assert np.isnan(read.held_out)


def test_only_the_rows_of_killed_runs_are_removed_from_an_output(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    (tmp_path / f"{ROWS}x" / "rows").mkdir(parents=True)
    remove_leftovers(tmp_path, ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
    assert (tmp_path / "work" / "thesis.txt").read_text() == "mine"


def test_an_output_that_another_run_writes_is_refused_with_what_to_do(tmp_path):
    with OutputLines(tmp_path / "cells.jsonl"), pytest.raises(UsageError) as e, OutputLines(tmp_path / "cells.jsonl"):
        pass
    assert str(e.value).endswith("another run writes it; wait for it, or choose another directory with --out")


def test_cells_with_other_settings_are_refused_and_those_of_other_arms_left_out(tmp_path):
    cell = make_cell()
    assert done_of([cell], {cell.key: "d"}, tmp_path) == {cell.key: cell}
    assert done_of([cell], {}, tmp_path) == {}
    with pytest.raises(UsageError, match="arm in_graph, prompt p0, seed 0: got a cell with other settings"):
        done_of([cell], {cell.key: "other"}, tmp_path)


def test_reading_a_file_needs_no_engine():
    code = "import sys, capflow_models.experiment.file, capflow_models.experiment.dry; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert msgspec.structs.fields(Cell)
