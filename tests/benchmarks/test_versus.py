"""`make versus`: who is compared, what is refused, and what is written. Contenders are small programs of the tests."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.kit.sources import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from versus import check, contenders, drive, environments, report, run

TOKENS = [[7, 8], [9, 8]]
ROWS = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
PROGRAM = """
import os, subprocess, sys, time
import numpy as np
from child import nothing, serve

class Fake:
    def __init__(self, job):
        self.job, self.mode = job, job["mode"]
        print("a library prints this")
        if self.mode == "refuses":
            raise NotImplementedError("no such model")

    def turn(self, number):
        with open("turns.txt", "a") as file:
            print(self.mode, file=file)
        if self.mode == "hangs":
            # It is ended long before.
            time.sleep(60)
        if self.mode == "dies":
            with open("child.pid", "w") as file:
                print(subprocess.Popen(["sleep", "60"], process_group=0).pid, file=file)
            print("RuntimeError: out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        return [[1, 1], [1, 1]] if self.mode == "answers" else self.job["right"]

    def rows(self):
        rows = np.load(self.job["rows"])
        if self.mode == "wrong":
            rows[1, 2, 3, 4] += 0.5
        if self.mode == "nan":
            rows[0, 0] = np.nan
        if self.mode == "fewer":
            rows = rows[:, :, :-1]
        return nothing() if self.mode == "plain" else rows

serve(Fake)
"""


@pytest.fixture
def main(monkeypatch, tmp_path):
    """Return a function that runs the benchmark with contenders of these modes and returns what `--json` wrote."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("fake", "with_vllm", "with_capflow"):
        (programs / f"{name}.py").write_text(PROGRAM)
    path = f"{Path(drive.__file__).parent / 'programs'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(drive, "PROGRAMS", programs)

    def prepare(self):
        directory = self.work / "reference"
        directory.mkdir()
        np.save(directory / "rows.npy", ROWS)
        np.save(directory / "weight.npy", np.ones(5, np.float32))
        (directory / "answers.json").write_text(json.dumps({"plain": TOKENS, "steered": TOKENS}))
        self._job = {"right": TOKENS, "rows": str(directory / "rows.npy")}
        self._reference = run.Reference(directory, 1)

    monkeypatch.setattr(run.Run, "prepare", prepare)

    def main(*modes, rounds=1, alive=4, limit=20, environment="", status=0):
        for mode in modes:
            contender = contenders.Contender(mode, f"peer {mode}", "rows", "fake", mode, environment, 0.5)
            monkeypatch.setitem(contenders.CONTENDERS, mode, contender)
        result = tmp_path / "result.json"
        command = ["--only", ",".join(modes), "--rounds", rounds, "--alive", alive, "--limit", limit, "--prompts", 2]
        assert run.main([*map(str, command), "--build", str(tmp_path / "build"), "--json", str(result)]) == status
        return {outcome["name"]: outcome for outcome in json.loads(result.read_text())}

    return main


def test_each_turn_is_beside_one_of_plain_vllm_and_follows_one_of_its_own(main, capsys, tmp_path):
    outcomes = main("right", "again", "third", rounds=2, alive=2)
    assert list(outcomes) == ["plain", "right", "again", "third"]
    # Plain vLLM runs in both groups.
    assert {name: len(outcome["turns"]) for name, outcome in outcomes.items()} == {
        "plain": 4, "right": 2, "again": 2, "third": 2
    }  # fmt: skip
    for outcome in outcomes.values():
        assert outcome["reason"] == ""
        assert outcome["peak_bytes"] > 1_000_000
    assert (outcomes["right"]["rows"], outcomes["right"]["rows_wrong"]) == (24, 0)
    order = [line.split(":")[0] for line in capsys.readouterr().err.splitlines() if " s of CPU" in line]
    # The first three warm up.
    assert order[3:9] == ["plain", "right", "again", "plain", "again", "right"]
    every = (tmp_path / "build" / "logs" / "turns.txt").read_text().split()
    assert every[::2] == every[1::2] == order


def test_a_run_that_is_ended_prints_the_turns_that_it_has(main, monkeypatch):
    whole = run.Run.group

    def ended(self, some):
        if some[0].name == "later":
            raise KeyboardInterrupt
        whole(self, some)

    monkeypatch.setattr(run.Run, "group", ended)
    outcomes = main("right", "later", alive=1, status=130)
    assert {name: len(outcome["turns"]) for name, outcome in outcomes.items()} == {"plain": 1, "right": 1}


def test_a_child_does_not_outlive_a_contender_that_dies(main, tmp_path):
    assert main("dies")["dies"]["reason"] == "RuntimeError: out of luck"
    pid = int((tmp_path / "build" / "logs" / "child.pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("wrong", "1 of 24 rows differ from Transformers"),
        ("nan", "4 of 24 rows differ from Transformers"),
        ("fewer", "24 of 24 rows differ from Transformers"),
        ("answers", "2 of 2 answers differ from Transformers"),
        ("refuses", "NotImplementedError: no such model"),
        ("dies", "RuntimeError: out of luck"),
        ("hangs", "no answer within 2 s"),
    ],
)
def test_who_fails_is_named_and_the_others_go_on(main, mode, reason, capsys):
    outcomes = main(mode, "right", limit=2 if mode == "hangs" else 20)
    assert outcomes[mode]["reason"] == reason
    assert outcomes[mode]["turns"] == []
    assert len(outcomes["right"]["turns"]) == 1
    assert f"| peer {mode} | not measured: {reason} |" in capsys.readouterr().out


def test_a_row_beside_much_larger_numbers_is_not_taken_for_right(tmp_path):
    right = ROWS.copy()
    right[:, :, 0] *= 1e5
    right[..., 0] *= 1e3
    rows = right + 1e-4
    assert check.differing(rows, right) == (0, 24)
    rows[1, 2, 3, 4] += 0.1
    assert check.differing(rows, right) == (1, 24)


def test_scores_are_compared_with_those_of_the_right_rows(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    np.save(tmp_path / "weight.npy", np.arange(5, dtype=np.float32))
    (tmp_path / "answers.json").write_text(json.dumps({"plain": TOKENS, "steered": [[1, 2], [3, 4]]}))
    reference = check.Reference(tmp_path, 1)
    scores = ROWS[:, 1] @ np.arange(5, dtype=np.float32)
    assert reference.wrong("probe", TOKENS, scores) == (0, 0, 8)
    assert reference.wrong("probe", TOKENS, scores[:, :3]) == (0, 8, 8)
    scores[1, 2] += 1
    assert reference.wrong("probe", TOKENS, scores) == (0, 1, 8)
    assert reference.wrong("steer", [[1, 2], [3, 4]], np.empty(0)) == (0, 0, 0)
    assert reference.wrong("steer", TOKENS, np.empty(0)) == (2, 0, 0)


def test_an_environment_that_cannot_be_made_is_named(main, monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "HERE", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "gone.txt").write_text("gone @ file:///nowhere.whl\n")
    outcomes = main("right", environment="gone")
    assert outcomes["right"]["reason"] == "nowhere.whl is not a valid wheel filename."
    assert len(outcomes["plain"]["turns"]) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--only", "plain,vlm-lens"], "versus: --only: got vlm-lens, expected some of plain, idle, disk"),
        (["--rounds", "0"], "versus: --rounds: got 0, expected 1 or more"),
        (["--lengths", "128"], "versus: --lengths: got 128, expected two numbers above 1, as 128,32"),
        (["--model", "/nowhere"], "versus: --model: got /nowhere, expected demo, llama or a directory"),
    ],
)
def test_a_wrong_option_is_one_line(options, error):
    command = [sys.executable, str(ROOT / "benchmarks" / "versus.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(error)
    assert done.stderr.count("\n") == 1


def test_a_name_is_enough_and_plain_vllm_is_always_there():
    assert [contender.name for contender in contenders.chosen("hooks, disk")] == ["plain", "disk", "hooks"]
    assert [contender.name for contender in contenders.chosen("")] == list(contenders.CONTENDERS)


def test_every_contender_has_its_program_and_its_pins():
    folder = ROOT / "benchmarks" / "versus"
    for contender in contenders.CONTENDERS.values():
        assert (folder / "programs" / f"{contender.program}.py").is_file()
        assert contender.task in contenders.TASKS
    named = {contender.environment for contender in contenders.CONTENDERS.values()} - {""}
    assert named == {path.stem for path in (folder / "requirements").glob("*.txt")}
    for path in (folder / "requirements").glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert all("==" in line or "@" in line.partition("git+")[2] for line in lines), path


def outcome(name, wall, **fields):
    turn, plain = drive.Turn(1 / wall, 2 / wall), drive.Turn(1.0, 2.0)
    made = report.Outcome(contenders.CONTENDERS[name], turns=[(turn, plain)] * 3, peak_bytes=2_000_000_000)
    return dataclasses.replace(made, **fields)


ROWS_OF = {"row_bytes": 90_000_000, "rows": 10}


def test_the_table_says_where_capflow_is_behind():
    some = [
        outcome("plain", 1.0),
        outcome("disk", 0.9, disk_bytes=90_000_000, **ROWS_OF),
        outcome("vllm-lens", 0.8, peak_bytes=1_500_000_000, **ROWS_OF),
        outcome("extract", 0.7, reason="ValueError: a | b"),
    ]
    lines = report.tables(some).splitlines()
    assert lines[4] == "| **capflow**, to disk | 0.90 | 0.90 to 0.90 | 0.90 | 81 | 2.00 | 90 | 0 of 10 | 0.93 |"
    assert lines[5] == "| vllm-lens | 0.80 | 0.80 to 0.80 | 0.80 | 72 | 1.50 | 0 | 0 of 10 | 0.85 |"
    assert {line.count("|") for line in lines[2:7]} == {10, 11}  # the reason of `extract` has one
    assert "| not measured: ValueError: a \\| b |" in lines[6]
    behind = "Behind: peak memory, GB (2.00 against 1.50 of vllm-lens); on disk, MB a turn (90 against 0 of vllm-lens)."
    assert behind in lines
    some[2] = outcome("vllm-lens", 0.8, disk_bytes=95_000_000, **ROWS_OF)
    assert "No peer is ahead of capflow in any column." in report.tables(some).splitlines()


def rounds(name, *walls):
    turns = [(drive.Turn(1 / wall, 1 / wall), drive.Turn(1.0, 1.0)) for wall in walls]
    return outcome(name, 1.0, turns=turns, **ROWS_OF)


def test_the_table_says_over_whom_the_lead_is_certain():
    some = [
        outcome("plain", 1.0),
        rounds("memory", 0.70, 0.80, 0.82, 0.83, 0.90),
        rounds("disk", 0.75, 0.88, 0.90, 0.92, 1.05),
        rounds("vllm-lens", 0.60, 0.66, 0.70, 0.71, 0.89),
        rounds("hooks", 0.40, 0.43, 0.45, 0.50, 0.60),
        rounds("extract", 0.95, 0.96, 0.97, 0.98, 0.99),
    ]
    lines = report.tables(some).replace("\n", " ")
    assert "| **capflow**, to disk | 0.90 | 0.75 to 1.05 |" in lines
    assert "the lead of **capflow**, to disk is certain (rank sums, p < 0.01) over: Transformers with hooks." in lines
    # A peer that is ahead is named as ahead.
    assert lines.endswith("is not certain over: vllm-lens (p = 0.02); run more rounds.")


@pytest.mark.parametrize(
    ("ours", "peers", "share"),
    [
        ([5, 6, 7, 8], [1, 2, 3, 4], 1 / 70),
        ([4, 6, 7, 8], [1, 2, 3, 5], 2 / 70),
        ([1, 2], [3, 4], 1),
        ([2, 2], [2, 2], 1),
        ([2, 3], [1, 2], 2 / 6),
        ([6, 7, 8, 9, 10], [1, 2, 3, 4, 5], 1 / 252),
    ],
)
def test_a_lead_is_as_likely_as_the_divisions_that_show_one_like_it(ours, peers, share):
    assert report.chance(ours, peers) == pytest.approx(share)


def test_the_documents_get_tables_and_a_plot(tmp_path):
    (tmp_path / "docs").mkdir()
    page, readme = tmp_path / "docs" / "performance.md", tmp_path / "README.md"
    page.write_text("before\n<!-- versus:begin -->\nold\n<!-- versus:end -->\nafter\n")
    readme.write_text("<!-- versus:begin -->\n<!-- versus:end -->\n")
    args = run.parsed(["--only", "disk,vllm-lens", "--rounds", "3"])
    some = [outcome("plain", 1.0), outcome("disk", 0.9, **ROWS_OF), outcome("vllm-lens", 0.8, **ROWS_OF)]
    for _ in range(2):
        report.write_docs(some, args, idle_cpu_share=0.01, root=tmp_path)
        text = page.read_text()
        assert text.startswith("before\n<!-- versus:begin -->\nGemma-3-270m in float32")
        assert text.endswith("images/versus.svg)\n<!-- versus:end -->\nafter\n")
        assert "old" not in text
        assert "| **capflow**, to disk | 0.90 | 0.90 | 81 | 2.00 |" in readme.read_text()
    plot = (tmp_path / "docs" / "images" / "versus.svg").read_text()
    assert "vllm-lens" in plot
    assert len(plot) < 60_000
    with pytest.raises(ValueError, match="versus-llama:begin"):
        report.documents(run.parsed(["--model", "llama"]), tmp_path)


def test_the_cause_of_a_failure_is_the_last_one_that_does_not_follow_from_another(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "ERROR 11-29 RuntimeError: Unsupported device type: cpu\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    message = "RuntimeError: Engine core initialization failed. See root cause above."
    assert drive.reason_of(message, log) == "RuntimeError: Unsupported device type: cpu"
    assert drive.reason_of("its process ended with -9", tmp_path / "none") == "its process ended with -9"
    log.write_text(
        "ERROR 11-29 Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.\n"
        "RuntimeError: Executor failed.\n"
    )
    message = "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
    assert drive.reason_of(message, log).startswith("VllmWorker-0 died unexpectedly (exit code: -9): killed")


@pytest.mark.engine
@pytest.mark.long
def test_capflow_and_hooks_beside_plain_vllm(tmp_path):
    """The real programs with a tiny model: rows on disk and of hooks are those of the reference."""
    from tests.kit.engines import save_tiny

    model, result = save_tiny(tmp_path / "model"), tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "versus.py"), "--model", model, "--eager", "--rounds", "1"]
    command += ["--only", "plain,disk,hooks", "--prompts", "3", "--lengths", "20,6", "--limit", "500"]
    command += ["--build", str(tmp_path / "build"), "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = {each["name"]: each for each in json.loads(result.read_text())}
    assert list(outcomes) == ["plain", "disk", "hooks"]
    for each in outcomes.values():
        assert (each["reason"], each["answers_wrong"], each["rows_wrong"]) == ("", 0, 0)
        assert len(each["turns"]) == 1
    assert outcomes["disk"]["rows"] == 3 * 4 * 25
    assert outcomes["disk"]["disk_bytes"] >= outcomes["disk"]["row_bytes"] == 3 * 4 * 25 * 64 * 4
