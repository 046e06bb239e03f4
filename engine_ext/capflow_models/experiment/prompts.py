"""Texts with labels, from JSON Lines, CSV, or a data set of Hugging Face on the disk."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
    for source, begin in zip(experiment.prompts, _begins(experiment.prompts), strict=True):
        counts: Counter[str] = Counter()
        for number, (place, row) in enumerate(read_rows(experiment.relative(source.path), source.split)):
            text = str(_field(row, source.label, place))
            labels[text] = None
            label = _label(source, text)
            if label is None or (source.limit is not None and counts[label] >= source.limit):
                continue
            counts[label] += 1
            named = row.get(source.id)
            name = f"{begin}-{number}" if named is None else str(named)
            prompts.append(LabelledPrompt(len(prompts), name, str(_field(row, source.prompt, place)), label))
    for name, count in Counter(prompt.id for prompt in prompts).items():
        if count > 1:
            raise experiment.wrong(("prompts",), got=f"the id {name} {count} times", expected="each once")
    for wanted in ("target", "benign"):
        if not any(prompt.label == wanted for prompt in prompts):
            do = f'write {wanted} = ["…"], the labels of the file that count as {wanted}'
            got = f"no {wanted} prompts; the labels found: {_listed(labels)}"
            raise experiment.wrong(("prompts",), got=got, expected="prompts of both kinds", do=do)
    return prompts


def _begins(sources: Sequence[PromptSource]) -> list[str]:
    """Return how the ids of prompts without one begin: with the file's name, and with what tells it from others."""
    stems = [Path(source.path).stem for source in sources]
    begins = [
        f"{stem}-{source.split}" if source.split and stems.count(stem) > 1 else stem
        for stem, source in zip(stems, sources, strict=True)
    ]
    return [f"{begin}-{n}" if begins.count(begin) > 1 else begin for n, begin in enumerate(begins)]


def read_texts(path: Path, prompt: str, label: str, positive: Sequence[str], split: str = "") -> list[tuple[str, bool]]:
    """Return the texts of a file, each with whether its label is positive.

    Raises UsageError for an empty text, and unless there are two or more texts of each kind: one is held out.
    """
    texts = []
    labels: dict[str, None] = {}
    for place, row in read_rows(path, split):
        text, name = str(_field(row, prompt, place)), str(_field(row, label, place))
        if not text:
            raise UsageError(explain(f"{place}: {prompt}", got=text, expected="a text"))
        labels[name] = None
        texts.append((text, name in positive))
    count = sum(is_positive for _, is_positive in texts)
    if min(count, len(texts) - count) < 2:
        got = f"{count} positive and {len(texts) - count} other texts; the labels found: {_listed(labels)}"
        do = 'write positive = ["…"], the labels for which the probe fires'
        raise UsageError(explain(str(path), got=got, expected="2 or more of each", do=do))
    return texts


def read_rows(path: Path, split: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a file, each with its place for errors. Raises UsageError for what cannot be read."""
    if path.is_dir():
        yield from _hugging_face(path, split)
        return
    try:
        # A text may hold any other line separator, such as U+2028. Excel begins files with a byte order mark.
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(explain(str(path), got=str(e), expected="a readable text file")) from e
    if path.suffix == ".csv":
        yield from _csv(path, text)
    elif path.suffix in (".jsonl", ".json"):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    yield f"{path}, line {number}", jsontext.decode(line.encode(), dict[str, Any])
                except msgspec.MsgspecError as e:
                    raise UsageError(explain(f"{path}, line {number}", got=str(e), expected="a JSON object")) from e
    else:
        raise UsageError(explain(str(path), got=path.suffix, expected=".jsonl, .csv, or a directory of a data set"))


def _csv(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a CSV file, each with the line at which it begins."""
    reader = csv.reader(io.StringIO(text, newline=""))
    line = 1
    try:
        names = next(reader, [])
        line = reader.line_num + 1
        for values in reader:
            if len(values) > len(names):
                got, do = f"{len(values)} fields", "put a text with a comma in quotes"
                raise UsageError(explain(f"{path}, line {line}", got=got, expected=f"at most {len(names)}", do=do))
            if values:
                yield f"{path}, line {line}", dict(zip(names, values, strict=False))
            line = reader.line_num + 1
    except csv.Error as e:
        raise UsageError(explain(f"{path}, line {line}", got=str(e), expected="a row of CSV")) from e


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


def _listed(labels: Collection[str]) -> str:
    return json.dumps(list(labels)[:8], ensure_ascii=False)[1:-1] or "none"


def _label(source: PromptSource, value: str) -> Label | None:
    if value in source.target:
        return "target"
    return "benign" if value in source.benign else None
