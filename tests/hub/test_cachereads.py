"""A consumer whose own positions keep every request from reading the prefix cache is named, with the remedy."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from capflow.capture.positions import Positions
from capflow.capture.spec import CaptureSpec
from capflow.cli.hub.view import view
from capflow.hub.cache_reads import notice
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit.hubs import Recorder, address, configured, running_hub
from tests.kit.servers import environment

__all__ = ["address"]

READS_NOTHING = ["all", "all_prompt", {"every": 8}, 0, [0, -1], ["last_prompt", {"every": 100}]]
READS_ALL = ["last_prompt", "all_generated", {"generated": [0, 4]}, -1, {"last": 16}, [-3, {"generated": [2, None]}]]


def spec_of(positions, max_rows=None):
    return CaptureSpec.parse({"hooks": {"post_block": "all"}, "positions": positions, "max_rows": max_rows})


@pytest.mark.parametrize("positions", READS_NOTHING)
@pytest.mark.parametrize("max_rows", [None, 3])
def test_positions_that_begin_every_prompt_are_named(positions, max_rows):
    message = notice("recorder", Recorder(), spec_of(positions, max_rows))
    assert "consumer recorder captures positions " in message
    assert "read nothing from the prefix cache" in message
    assert "have its spec() name all_generated or last_prompt" in message


@pytest.mark.parametrize("positions", READS_ALL)
def test_positions_near_the_end_of_a_prompt_are_not(positions):
    assert notice("recorder", Recorder(), spec_of(positions)) is None
    assert notice("recorder", Recorder(), None) is None


def test_a_fixed_position_is_named_with_what_may_be_read():
    message = notice("recorder", Recorder(), spec_of([40, -1]))
    assert "positions [-1,40] of every request: prompts read only what lies before position 40" in message
    assert Positions.parse([40, -1]).at(100).first() == 40


def test_the_remedy_is_made_of_the_consumers_own_options(tmp_path):
    def said(**options):
        consumer = FilesystemConsumer(FilesystemConfig(str(tmp_path), **options))
        return notice("filesystem", consumer, consumer.spec())

    assert said().endswith("set positions=all_generated or positions=last_prompt or capture=requests")
    assert said(positions="all_generated") is None
    assert said(capture="requests") is None


def test_a_hub_says_so_in_its_status_and_top_shows_it(address):
    generated = configured(Recorder("generated", spec_of("all_generated")), "block")
    with running_hub(address, Recorder("whole", spec_of("all")), generated) as hub:
        (message,) = hub.status()["notices"]
        assert "consumer whole" in message
        console = Console(width=80, file=StringIO(), color_system=None)
        console.print(view(hub.status(), None))
        assert " ".join(console.file.getvalue().split()).count(message) == 1


def test_a_run_says_so_when_it_starts(tmp_path):
    command = [sys.executable, "-m", "capflow", "run", "--until-eof", "--consumer", f"filesystem:root={tmp_path}/rows"]
    done = subprocess.run(
        command,
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "capflow: consumer filesystem captures positions all of every request: prompts read nothing" in done.stderr
