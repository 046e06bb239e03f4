"""Texts with labels, from JSON Lines, CSV, or a data set of Hugging Face on the disk."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow.text import jsontext
from capflow_models.experiment.file import Experiment, PromptSource

Label = Literal["target", "benign"]


class LabelledPrompt(msgspec.Struct, frozen=True):
    """One prompt.

    number: its place in the experiment.
    """

    number: int
    id: str
    prompt: str
    label: Label


def read_prompts(experiment: Experiment) -> list[LabelledPrompt]:
    """Return the prompts of all sources. Raises UsageError for an id that comes twice, and for a missing label."""
    prompts: list[LabelledPrompt] = []
    labels: dict[str, None] = {}
    for source in experiment.prompts:
        counts: Counter[str] = Counter()
        for number, (place, row) in enumerate(read_rows(experiment.relative(source.path), source.split)):
            text = str(_field(row, source.label, place))
            labels[text] = None
            label = _label(source, text)
            if label is None or (source.limit is not None and counts[label] >= source.limit):
                continue
            counts[label] += 1
            named = row.get(source.id)
            name = f"{Path(source.path).stem}-{number}" if named is None else str(named)
            prompts.append(LabelledPrompt(len(prompts), name, str(_field(row, source.prompt, place)), label))
    for name, count in Counter(prompt.id for prompt in prompts).items():
        if count > 1:
            raise experiment.wrong(("prompts",), got=f"the id {name} {count} times", expected="each once")
    for wanted in ("target", "benign"):
        if not any(prompt.label == wanted for prompt in prompts):
            listed = json.dumps(list(labels)[:8], ensure_ascii=False)[1:-1] or "none"
            do = f'write {wanted} = ["…"], the labels of the file that count as {wanted}'
            got = f"no {wanted} prompts; the labels found: {listed}"
            raise experiment.wrong(("prompts",), got=got, expected="prompts of both kinds", do=do)
    return prompts


def read_texts(path: Path, prompt: str, label: str, positive: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the texts of a file, each with whether its label is positive.

    Raises UsageError if all labels are alike.
    """
    texts = [
        (str(_field(row, prompt, place)), str(_field(row, label, place)) in positive) for place, row in read_rows(path)
    ]
    if len({is_positive for _, is_positive in texts}) < 2:
        raise UsageError(
            explain(str(path), got=f"{len(texts)} texts of one kind", expected="positive and other labels")
        )
    return texts


def read_rows(path: Path, split: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a file, each with its place for errors. Raises UsageError for what cannot be read."""
    if path.is_dir():
        yield from _hugging_face(path, split)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(explain(str(path), got=str(e), expected="a readable text file")) from e
    if path.suffix == ".csv":
        for number, row in enumerate(csv.DictReader(text.splitlines(keepends=True)), 2):
            yield f"{path}, line {number}", dict(row)
    elif path.suffix in (".jsonl", ".json"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield f"{path}, line {number}", jsontext.decode(line.encode(), dict[str, Any])
                except msgspec.MsgspecError as e:
                    raise UsageError(explain(f"{path}, line {number}", got=str(e), expected="a JSON object")) from e
    else:
        raise UsageError(explain(str(path), got=path.suffix, expected=".jsonl, .csv, or a directory of a data set"))


def _hugging_face(path: Path, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    require("files", f"{path}", "pyarrow")
    import pyarrow as pa

    try:
        if (splits := path / "dataset_dict.json").is_file():
            names = json.loads(splits.read_bytes())["splits"]
            chosen = split or (names[0] if len(names) == 1 else "")
            if chosen not in names:
                got = split or "none"
                raise UsageError(explain(f"{path}: split", got=got, expected=f"one of {', '.join(names)}"))
            path = path / chosen
        files = [each["filename"] for each in json.loads((path / "state.json").read_bytes())["_data_files"]]
        number = 0
        for file in files:
            with pa.memory_map(str(path / Path(file).name)) as source, pa.ipc.open_stream(source) as reader:
                for batch in reader:
                    for row in batch.to_pylist():
                        yield f"{path}, row {number}", row
                        number += 1
    except (OSError, KeyError, ValueError, pa.ArrowException) as e:
        if isinstance(e, UsageError):
            raise
        expected = "a directory of Dataset.save_to_disk"
        raise UsageError(explain(str(path), got=f"{type(e).__name__}: {e}", expected=expected)) from e


def _field(row: dict[str, Any], name: str, place: str) -> Any:
    if row.get(name) is None:
        raise UsageError(explain(f"{place}: no field {name}", got=", ".join(map(str, row)), expected=name))
    return row[name]


def _label(source: PromptSource, value: str) -> Label | None:
    if value in source.target:
        return "target"
    return "benign" if value in source.benign else None
