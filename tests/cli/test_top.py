"""`capflow top` and `capflow status`: on a real hub, in a real terminal, while the hub is killed and comes back."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from capflow.cli.fitted import SortOrder
from capflow.cli.hub.rates import History, Rates, RecentRate
from capflow.cli.hub.screen import Screen, ordered
from capflow.cli.hub.view import OLDEST_FIRST, SORTS, clean, sections, stacked, view
from capflow.cli.units import human_bytes, human_count, human_seconds
from capflow.hub.hub import Hub
from capflow.protocol.message import CpuTime
from capflow.transport.client import Client
from capflow.transport.links.worker import Staged
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import Recorder, address, configured, running_hub, worker_link
from tests.kit.screens import shown
from tests.kit.servers import environment
from tests.kit.waiting import eventually

__all__ = ["address"]

EVIL = "e\x1b[2J\x07\u202egine"
REQUEST = "r2\x1b[2J" + "-with-a-long-name" * 4
TITLES = ("worker", "consumer", "request")


def send(link, *args, **kwargs):
    frame = make_frame(*args, **kwargs)
    assert link.send(frame.header, frame.payload) is None


def capflow(tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "capflow", *arguments],
        env=environment(tmp_path, COLUMNS="80"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def table(text, title):
    """Return the lines of a table: its titles, its rows, and its caption."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if re.match(rf"{title}( [▾▴])?  ", line))
    return list(itertools.takewhile(str.strip, lines[first:]))


def words_of(line):
    return re.split(r" {2,}", re.sub(r"([━─]) +", r"\1 ", line).strip())


@pytest.fixture(scope="module")
def statuses(tmp_path_factory):
    """Two statuses of a hub that has one of everything; more frames passed before the second."""
    full = Recorder("full", held=True)
    bad = Recorder("a-consumer-with-a-long-name", fails_on=["r1", REQUEST])
    cpu = {"worker": CpuTime(900_000, 10), "scheduler": CpuTime(300_000, 10), "sender": CpuTime(5_000_000)}
    staged = Staged(1000, 5000, {"queue_full": 12_345_678}, cpu=cpu)
    with (
        running_hub(f"ipc://{tmp_path_factory.mktemp('h')}/h", bad, configured(full, "drop", 1)) as hub,
        worker_link(hub.address, make_hello(EVIL), staged=lambda: staged) as link,
        Client(hub.address) as client,
    ):
        send(link, engine=EVIL)
        assert full.waiting.wait(20)
        before = client.status()
        for step in range(1, 5):
            send(link, [("r1", 4, step * 4, 4)], engine=EVIL, step=step)
        send(link, [(REQUEST, 4, 0, 4)], engine=EVIL, step=5)
        eventually(lambda: hub.lanes[0].frames == 6)
        eventually(lambda: any(s["role"] == "worker" and s["worker"] for s in client.status()["sessions"]))
        yield before, client.status()


class TestTheView:
    def test_fits_80_columns_whatever_there_is(self, statuses):
        text = shown(view(statuses[1], Rates(*statuses)))
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
        for words in (
            "not ready",
            "a-consumer-with-a-long-name  block",
            "full",
            "12.3M",
            "consumer_queue_full",
            "0/0/0",
            "test-model",
            "block",
        ):
            assert words in text
        assert "failed at each of its last 3 frames" in text

    @pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 200])
    def test_leaves_out_whole_columns_where_there_is_no_room(self, statuses, width):
        wide, text = (shown(view(statuses[1], Rates(*statuses)), columns) for columns in (1000, width))
        assert max(map(len, text.splitlines())) <= width
        for title in TITLES:
            all_titles, titles = (words_of(table(each, title)[0]) for each in (wide, text))
            assert set(titles) <= set(all_titles)
            assert titles == all_titles or width < 200
            for every, row in zip(table(wide, title)[1:], table(text, title)[1:], strict=True):
                cells = dict(zip(all_titles, words_of(every), strict=True))
                assert words_of(row)[1:] == [cells[each] for each in titles[1:]]

    def test_has_what_matters_most_in_60_columns_and_more_in_wider_ones(self, statuses):
        titles = {
            (width, title): words_of(table(shown(view(statuses[1], Rates(*statuses)), width), title)[0])
            for width in (60, 80)
            for title in TITLES
        }
        assert titles[60, "worker"] == ["worker", "rows/s", "its queue", "dropped"]
        assert titles[60, "consumer"] == ["consumer", "rows/s", "queue", "dropped", "errors"]
        assert titles[60, "request"] == ["request", "age", "tokens", "tok/s", "rows"]
        assert titles[80, "worker"] == [
            "worker",
            "pp/dp/tp",
            "rows/s",
            "credit used",
            "its queue",
            "dropped",
            "last",
        ]
        assert titles[80, "request"] == ["request", "engine", "age", "tokens", "tok/s", "rows", "rows/s"]

    def test_has_the_processor_time_that_capflow_takes_in_a_step(self, statuses):
        titles, row = table(shown(view(statuses[1], None), 300), "worker")[:2]
        assert dict(zip(words_of(titles), words_of(row), strict=True))["µs a step"] == "120"

    def test_shows_nothing_that_a_terminal_obeys(self, statuses):
        text = shown(view(statuses[1], Rates(*statuses)), 200)
        assert r"e\x1b[" in text
        assert all(c.isprintable() or c == "\n" for c in text)

    def test_of_requests(self, statuses):
        seconds = statuses[1]["uptime_s"] - statuses[0]["uptime_s"]
        first, second = (words_of(row) for row in table(shown(view(statuses[1], Rates(*statuses)), 200), "request")[1:])
        assert (first[0], second[0]) == ("r1", clean(REQUEST))
        assert first[3:] == ["4", "20", human_count(16 / seconds), "20", human_count(16 / seconds)]
        assert second[3:] == ["4", "4", "0", "4", "0"]

    def test_of_a_thousand_requests_lists_some_and_counts_the_others(self, statuses):
        (first, _) = statuses[1]["running_requests"]
        many = {
            **statuses[1],
            "requests": {**statuses[1]["requests"], "open": 1000},
            "running_requests": [{**first, "id": f"q{n}"} for n in range(50)],
        }
        rows = table(shown(view(many, None)), "request")
        assert [row.split()[0] for row in rows[1:-1]] == [f"q{n}" for n in range(10)]
        assert rows[-1].strip() == "and 40 more, 950 newer ones that are not listed"

    def test_of_a_hub_that_lists_no_requests(self, statuses):
        old = {key: value for key, value in statuses[1].items() if key not in ("running_requests", "notices")}
        text = shown(view(old, Rates(old, old)))
        assert "requests 2 open" in text
        assert "tokens" not in text

    def test_of_names_in_characters_that_are_two_cells_wide(self, statuses):
        (first, _) = statuses[1]["running_requests"]
        named = {**statuses[1], "running_requests": [{**first, "id": "長" * 60}]}
        text = shown(view(named, Rates(*statuses)), 60)
        assert max(map(cell_len, text.splitlines())) <= 60
        assert re.search(r"^長+ ?… +\d", text, re.MULTILINE)

    def test_of_an_address_that_is_longer_than_a_line_has_all_of_it(self, statuses):
        address = f"tcp://{'8674530f' * 8}@hub.example:7000"
        text = shown(view({**statuses[1], "address": address}, None), 60)
        assert max(map(len, text.splitlines())) <= 60
        assert address in text.replace("\n", "")

    def test_of_nothing(self, address):
        with running_hub(address, Recorder()) as hub:
            text = shown(view(hub.status(), None))
        assert "ready" in text
        assert "last frame never" in text
        assert "0 engines, 0 workers" in text
        assert "worker  " not in text

    def test_of_more_workers_than_lines(self, statuses):
        now = statuses[1]
        (worker,) = [s for s in now["sessions"] if s["role"] == "worker"]
        many = {**now, "sessions": [{**worker, "rank": [0, n, 0]} for n in range(50)]}
        text = shown(stacked(sections(many, None, rows_max=5).values()))
        assert text.count("test-model") == 1
        assert len(re.findall(r"0/\d+/0", text)) == 5
        assert "and 45 more" in text

    def test_of_spools_when_there_are_any(self, statuses):
        spool = {"records": 7, "bytes": 3_000_000, "bytes_max": 4_000_000, "records_lost": 2, "failures": 0}
        full = statuses[1]["consumers"]["full"]
        with_spool = {**statuses[1], "consumers": {"full": {**full, "spool": spool}}}
        text = shown(view(with_spool, None))
        assert re.search(r"full +7 +━+─+ +75% +2\.9 MiB +2 +0", text)
        assert "spool of" not in shown(view(statuses[1], None))

    def test_of_taps_when_there_are_any(self, statuses):
        tap = {"tap": "client 00ff", "frames": 7, "bytes": 3_000_000, "skipped_frames": 2, "skipped_bytes": 9}
        text = shown(view({**statuses[1], "taps": [tap]}, None))
        assert re.search(r"client 00ff +7 +2\.9 MiB +2\n", text)
        assert "skipped" not in shown(view(statuses[1], None))

    def test_of_features_that_are_off_for_an_engine_names_each_once(self, statuses):
        scheduler = {"role": "scheduler", "engine": EVIL, "rank": [0, 0, 0], "off": {"KV offloading": "x: missing"}}
        sessions = [*statuses[1]["sessions"], scheduler, {**scheduler, "rank": [0, 1, 0]}]
        text = shown(view({**statuses[1], "sessions": sessions}, None))
        assert text.count("off with this vLLM: KV offloading: x: missing") == 1
        assert "off with" not in shown(view(statuses[1], None))


class TestTheScreen:
    @pytest.fixture
    def history(self, statuses):
        history = History(5)
        for status in statuses:
            history.add(status)
        return history

    def drawn(self, history, gone=None, order=OLDEST_FIRST, size=(80, 24)):
        width, height = size
        console = Console(width=width, height=height, file=io.StringIO(), color_system=None, legacy_windows=False)
        console.print(Screen("ipc:///x", history, gone, order), end="")
        return console.file.getvalue()

    def test_of_a_hub_that_is_gone_keeps_what_it_was(self, history):
        text = self.drawn(history, (75.0, "why"))
        assert "no answer for 1 m 15 s; waiting" in text
        assert "consumer_queue_full" in text
        assert "why" in self.drawn(History(5), (75.0, "why"))
        assert "connecting" in self.drawn(History(5))

    @pytest.mark.parametrize("size", [(60, 24), (80, 24), (120, 40), (200, 50), (40, 12), (20, 5)])
    def test_has_the_size_of_the_terminal_and_the_keys_in_its_last_line(self, history, size):
        lines = self.drawn(history, size=size).split("\n")
        assert len(lines) == size[1]
        assert max(map(len, lines)) <= size[0]
        assert lines[-1].startswith("q leaves")
        assert lines[0].startswith("capflow ")

    def test_gives_the_requests_the_room_that_is_left(self, statuses, history):
        (first, _) = statuses[1]["running_requests"]
        history.add(
            {
                **statuses[1],
                "uptime_s": statuses[1]["uptime_s"] + 1,
                "requests": {**statuses[1]["requests"], "open": 50},
                "running_requests": [{**first, "id": f"q{n}"} for n in range(50)],
                "notices": ["a notice"],
            }
        )
        least, small, tall = (self.drawn(history, size=(80, height)) for height in (22, 24, 100))
        assert "a notice" not in small
        assert "a notice" in tall
        shown_in_small, shown_in_tall = (len(re.findall(r"^q\d+ ", text, re.MULTILINE)) for text in (small, tall))
        assert 5 <= shown_in_small < 50
        assert f"and {50 - shown_in_small} more" in small
        assert all(text.split("\n")[-3].startswith("and ") for text in (least, small))
        assert shown_in_tall == 50

    def test_sorts_by_each_column_in_turn(self, statuses, history):
        (one, _), sorts = statuses[1]["running_requests"], []
        values = {"a": (9.0, 30, 5), "b": (5.0, 20, 40), "c": (1.0, 10, 30)}
        history.add(
            {
                **statuses[1],
                "uptime_s": statuses[1]["uptime_s"] + 1,
                "running_requests": [
                    {**one, "id": name, "age_s": age, "tokens": tokens, "rows": rows}
                    for name, (age, tokens, rows) in values.items()
                ],
            }
        )
        order = OLDEST_FIRST
        for _ in SORTS:
            text = self.drawn(history, order=order)
            names = "".join(row.split()[0] for row in table(text, "request")[1:])
            backwards = self.drawn(history, order=ordered(order, "r"))
            sorts.append((order.by, names, "".join(row.split()[0] for row in table(backwards, "request")[1:])))
            assert f"s sorts: {order.by} ▾" in text
            assert f"s sorts: {order.by} ▴" in backwards
            order = ordered(order, "s")
        assert order == OLDEST_FIRST
        assert sorts == [
            ("age", "abc", "cba"),
            ("tokens", "abc", "cba"),
            ("rows/s", "abc", "abc"),
            ("rows", "bca", "acb"),
            ("dropped", "abc", "abc"),
            ("queue", "abc", "abc"),
            ("name", "abc", "cba"),
        ]
        assert ordered(order, "x") == order

    def test_sorts_consumers_too(self, history):
        names = [row.split()[0] for row in table(self.drawn(history, order=SortOrder("dropped")), "consumer")[1:]]
        assert [name[:4] for name in names] == ["full", "a-co"]
        names = [row.split()[0] for row in table(self.drawn(history, order=SortOrder("rows/s")), "consumer")[1:]]
        assert [name[:4] for name in names] == ["a-co", "full"]


class TestRates:
    def test_are_what_went_through_by_the_hubs_own_clock(self, statuses):
        before, now = statuses
        rates, seconds = Rates(before, now), now["uptime_s"] - before["uptime_s"]
        assert rates.hub.rows == pytest.approx(20 / seconds, rel=1e-3)
        assert rates.hub.bytes == pytest.approx(20 * 32 / seconds, rel=1e-3)
        (worker,) = [s for s in now["sessions"] if s["role"] == "worker"]
        assert rates.worker(worker).rows == pytest.approx(20 / seconds, rel=1e-3)
        assert rates.consumer("full").rows == 0
        assert json.loads(json.dumps(rates.as_json()))["hub"]["rows"] == rates.hub.rows

    def test_begin_again_with_another_hub(self, statuses):
        history = History(5)
        history.add(statuses[0])
        history.add(statuses[1])
        assert history.rates is not None
        history.add(statuses[0])  # a hub that began later
        assert history.rates is None

    def test_are_over_the_last_seconds(self, statuses):
        history = History(5)
        for second in range(100):
            history.add({**statuses[1], "uptime_s": 100.0 + second, "rows": 10 * second})
        assert history.rates.hub.rows == 10
        assert len(history._statuses) < 10


class TestRecentRate:
    @pytest.fixture
    def rates_of(self):
        """Return a function: the tokens a second at each of the samples, which are pairs of a time and a count."""
        before = Hub("ipc:///never", []).snapshot()

        def rates(*samples):
            recent = RecentRate(5)
            return [recent.update(at, msgspec.structs.replace(before, tokens=tokens)).tokens for at, tokens in samples]

        return rates

    def test_is_over_the_last_seconds(self, rates_of):
        assert rates_of((0, 0), (1, 100), (2, 200)) == [0, 100, 100]
        assert rates_of(*((at, 100 * at) for at in range(50)), (50, 4900), (52, 4900), (54, 4900))[-4:] == [
            100,
            80,
            40,
            0,
        ]

    def test_is_that_since_the_last_sample_if_that_is_longer_ago(self, rates_of):
        assert rates_of((0, 0), (1, 1000), (100, 1000), (200, 1500)) == [0, 1000, 0, 5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (human_count(0), "0"),
        (human_count(999), "999"),
        (human_count(999.9), "1.0k"),
        (human_count(12_345), "12.3k"),
        (human_count(999_600), "1.0M"),
        (human_count(5e12), "5.0T"),
        (human_seconds(0.04), "0.0 s"),
        (human_seconds(61), "1 m 1 s"),
        (human_seconds(3 * 3600 + 61), "3 h 1 m"),
        (human_seconds(50 * 3600), "2 d 2 h"),
        (human_bytes(1536), "1.5 KiB"),
    ],
)
def test_numbers_as_people_read_them(text, expected):
    assert text == expected


class TestForScripts:
    def test_once_and_json_and_status(self, address, tmp_path):
        with running_hub(address, Recorder()) as hub, worker_link(address) as link:
            send(link, finished=[make_finished()])
            eventually(lambda: hub.counts.frames == 1)
            once = capflow(tmp_path, "top", "--address", address)  # no terminal: the same as --once
            assert (once.returncode, once.stderr) == (0, "")
            assert "rows/s" in once.stdout
            assert "\x1b" not in once.stdout
            status = json.loads(capflow(tmp_path, "top", "--json", "--address", address).stdout)
            assert status["rows"] == 4
            assert status["rates"]["hub"]["rows"] == 0
            assert list(status["rates"]["consumers"]) == ["recorder"]
            assert "recorder" in capflow(tmp_path, "status", "--address", address).stdout

    def test_without_a_hub(self, address, tmp_path):
        done = capflow(tmp_path, "top", "--once", "--address", address)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"capflow: no hub answers at {address}; start one")
        assert len(done.stderr.splitlines()) == 1

    def test_several_hubs_in_one_table_and_one_that_is_away(self, address, tmp_path):
        other, away = f"{address}2", f"{address}3"
        addresses = [word for each in (address, other, away) for word in ("--address", each)]
        with running_hub(address, Recorder()) as hub, running_hub(other, Recorder()), worker_link(address) as link:
            send(link, finished=[make_finished()])
            eventually(lambda: hub.counts.frames == 1)
            both = capflow(tmp_path, "top", "--json", *addresses[:4])
            once = capflow(tmp_path, "top", *addresses)
        assert both.returncode == 0
        assert {each: hub["rows"] for each, hub in json.loads(both.stdout)["hubs"].items()} == {address: 4, other: 0}
        assert (once.returncode, once.stderr) == (1, "")
        assert "2 of 3 hubs answer" in once.stdout
        rows = {words[0]: words for line in table(once.stdout, "hub") if (words := words_of(line))[0] != "hub"}
        assert list(rows) == [address, other, away]
        assert (rows[address][3], rows[other][3]) == ("1", "0")
        assert f"{away}: no answer for" in once.stdout


class Terminal:
    """`capflow top` in a terminal. `text` is what it wrote, without what moves the cursor."""

    def __init__(self, address, home, *arguments, width=80, height=24):
        self.end, end_of_it = os.openpty()
        ioctl(end_of_it, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.before = termios.tcgetattr(end_of_it)
        self.text = ""
        variables = {k: v for k, v in environment(home, TERM="xterm-256color").items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "capflow", "top", "--address", address, *arguments],
            env=variables,
            stdin=end_of_it,
            stdout=end_of_it,
            stderr=end_of_it,
            start_new_session=True,
        )
        self.other = end_of_it
        os.set_blocking(self.end, False)

    def shows(self, words):
        with contextlib.suppress(BlockingIOError, OSError):
            self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self.end, 1 << 16).decode(errors="replace"))
        return words in self.text

    def sees(self, words):
        self.text = ""
        eventually(lambda: self.shows(words))

    def left(self):
        """Wait for its end; return its exit code, the terminal being as it was."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            self.shows("")
        assert termios.tcgetattr(self.other) == self.before
        return self.process.poll()

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.end)
        os.close(self.other)


@contextlib.contextmanager
def hub_process(address, home):
    process = subprocess.Popen(
        [sys.executable, "-m", "capflow", "run", "--address", address, "--consumer", "log"],
        env=environment(home),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "listening" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


class TestLive:
    @pytest.fixture
    def terminal(self, address, tmp_path):
        started = Terminal(address, tmp_path)
        yield started
        started.close()

    def test_waits_for_a_hub_sees_it_killed_and_come_back_and_leaves_on_q(self, terminal, address, tmp_path):
        terminal.sees("waiting")
        with hub_process(address, tmp_path) as hub, worker_link(address) as link:
            send(link)
            terminal.sees("test-model")
            hub.kill()
            terminal.sees("no answer for")
        with hub_process(address, tmp_path):
            terminal.sees("0 workers")
        terminal.sees("no answer for")
        os.write(terminal.end, b"\x1b[A")  # an arrow
        terminal.sees("no answer for")
        os.write(terminal.end, b"q")
        assert terminal.left() == 0

    def test_shows_several_hubs(self, address, tmp_path):
        with (
            running_hub(address, Recorder()),
            contextlib.closing(Terminal(address, tmp_path, "--address", f"{address}2")) as terminal,
        ):
            terminal.sees("1 of 2 hubs answer")
            with running_hub(f"{address}2", Recorder()):
                terminal.sees("2 of 2 hubs answer")
            os.write(terminal.end, b"q")
            assert terminal.left() == 0

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_leaves_on_a_signal_with_the_terminal_as_it_was(self, terminal, number):
        terminal.sees("capflow")
        terminal.process.send_signal(number)
        assert terminal.left() == 0
        assert "Traceback" not in terminal.text

    @pytest.mark.parametrize("width", [60, 120])
    def test_lists_requests_in_the_terminals_width_and_sorts_them_by_a_key(self, address, tmp_path, width):
        with (
            hub_process(address, tmp_path),
            worker_link(address) as link,
            contextlib.closing(Terminal(address, tmp_path, width=width)) as terminal,
        ):
            send(link, [("first", 4, 0, 2), ("second", 4, 0, 4)])
            terminal.sees("second ")
            eventually(lambda: terminal.shows("s sorts: age ▾"))
            os.write(terminal.end, b"ss")
            terminal.sees("s sorts: rows/s ▾")
            os.write(terminal.end, b"s")
            terminal.sees("s sorts: rows ▾")
            terminal.sees("r reverses")
            assert re.search(r"second .*\n.*first ", terminal.text)
            assert max(map(len, terminal.text.splitlines())) <= width
            os.write(terminal.end, b"q")
            assert terminal.left() == 0
