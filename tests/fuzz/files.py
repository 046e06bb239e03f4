"""Targets that read files. An input is the name of a file in a valid directory, and the content that replaces it."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import xxhash

import capflow
from capflow.buffers.spool import Spool
from capflow.buffers.spool.report import inspect
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.hub.lanes.inbox import Inbox, Known
from capflow.plugins.configure import configure_all, load_plugins
from capflow.probes.kinds import load_probe
from capflow.probes.probe import Probe
from capflow.protocol import recording
from capflow.testing import MemoryHub
from capflow.transport.keys import AllowList, KeyPair, read_key, write_key
from capflow_consumers.dataset.reader import DirectoryCapture
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.fuzz.mutator import mutated
from tests.kit.frames import make_finished, make_frame, make_model

NAME = b"\n"
"""Between the name and what the file holds, in one input."""

_BYTES_MAX = 1 << 20


class Files:
    """A directory that is right, made once, and how it is read."""

    taken = True

    def __init__(self, root):
        self.right = Path(tempfile.mkdtemp(dir=root))
        self.here = Path(tempfile.mkdtemp(dir=root)) / "here"
        with mock.patch("os.urandom", bytes):  # the corpus stays valid for the directory that the next run makes
            self.make(self.right)
        paths = sorted(path.relative_to(self.right) for path in self.right.rglob("*") if path.is_file())
        self.inputs = [bytes(path) + NAME + (self.right / path).read_bytes() for path in paths]

    def mutate(self, choose, data, others):
        """Return an input whose name is the same."""
        name, _, content = data.partition(NAME)
        return name + NAME + mutated(choose, content, [other.partition(NAME)[2] for other in others])

    def make(self, directory):
        """Write what is right."""
        raise NotImplementedError

    def look(self, directory):
        """Read it."""
        raise NotImplementedError

    def read(self, data):
        """Read a directory in which one file holds this."""
        name, _, content = data.partition(NAME)
        shutil.copytree(self.right, self.here)
        try:
            path = self.here / name.decode()
            if path.is_file():  # else it is of another version's files
                path.write_bytes(content)
            self.look(self.here)
        finally:
            shutil.rmtree(self.here)


class SpoolFiles(Files):
    """A spool of a worker or a consumer."""

    def make(self, directory):
        """Write some records, and acknowledge two."""
        spool = Spool(directory / "s", bytes_max=_BYTES_MAX, segment_bytes=500)
        spool.open()
        for number in range(12):
            spool.append(b"head %d" % number, b"body" * number)
        for _ in range(2):
            spool.read(1)
        spool.acknowledge(2)
        spool.close()

    def look(self, directory):
        """Look at it from outside, then open it, read all and go on writing."""
        inspect(directory / "s", verify=True)
        spool = Spool(directory / "s", bytes_max=_BYTES_MAX, segment_bytes=500)
        with spool:
            list(spool.heads())
            while spool.read(0) is not None:
                pass
            spool.append(b"more", b"")


class InboxFiles(Files):
    """An inbox of a consumer."""

    def _inbox(self, directory):
        return Inbox(directory, "i", _BYTES_MAX, on_synced=lambda _: None)

    def make(self, directory):
        """Write an engine, frames and a checkpoint."""
        inbox = self._inbox(directory)
        inbox.open()
        inbox.put(Known("engine-1", make_model(1)))
        for seq in range(1, 6):
            finished = [make_finished()] if seq == 5 else []
            inbox.put_frame(make_frame([("r1", 4, seq * 4, 4)], seq=seq, finished=finished), 1.0)
        inbox.take(1.0)
        inbox.forget(1, lambda _: [], at_once=True)
        inbox.close(1, lambda _: [], keep=True)

    def look(self, directory):
        """Open it, and take all out."""
        inbox = self._inbox(directory)
        inbox.open()
        try:
            while inbox.take(0) is not None:
                pass
        finally:
            inbox.close(0, lambda _: [], keep=True)


class Recording(Files):
    """A recording."""

    def make(self, directory):
        """Record an engine, frames and an end."""
        with recording.Recorder(directory / "r") as recorder:
            recorder.engine("engine-1", make_model(1))
            for seq in range(1, 4):
                recorder.frame(make_frame([("r1", 4, seq * 4, 4)], seq=seq))
            recorder.done(RequestDone("engine-1", "r1", "stop", 4, 12, 12, 12, ()), sync=False)

    def look(self, directory):
        """Read it, and go on with it."""
        recording.is_recording(directory / "r")
        list(recording.read(directory / "r"))
        with recording.Recorder(directory / "r") as recorder:
            recorder.engine("engine-2", make_model(1))


class Dataset(Files):
    """A data set in one layout."""

    layout = "packed"

    def make(self, directory):
        """Write two requests."""
        consumer = FilesystemConsumer(FilesystemConfig(str(directory / "d"), layout=self.layout))
        with MemoryHub(consumer) as hub:
            engine = hub.engine(sites=[(0, "post_block"), (1, "post_block")])
            for name in ("r1", "r2"):
                engine.step([(name, 4, 0, 4)], texts=True)
                engine.step([(name, 4, 4, 1)])
                engine.finish(name)
                hub.result(name)
            engine.settle()

    def mutate(self, choose, data, others):
        """Return an input; half of the sidecars get a correct checksum, so that the checks after it are reached."""
        data = super().mutate(choose, data, others)
        name, _, content = data.partition(NAME)
        match = re.fullmatch(rb'(.*),"xxh3_64":"[0-9a-f]*"\}', content, re.DOTALL)
        if match is None or choose.random() < 0.5:
            return data
        return name + NAME + match[1] + b',"xxh3_64":"' + xxhash.xxh3_64_hexdigest(match[1]).encode() + b'"}'

    def look(self, directory):
        """Read every row."""
        data = capflow.open(directory / "d")
        for request in data.walk():
            if isinstance(request, tuple):  # damaged
                continue
            with contextlib.suppress(capflow.CapflowError):
                request.verify()
            with contextlib.suppress(capflow.CapflowError):
                for site in request.sites:
                    request[site]
            if isinstance(request, DirectoryCapture):
                str(request)
        list(data.verify_shards())
        data.running()


class PerFile(Dataset):
    """One file a site."""

    layout = "per_file"


class Sharded(Dataset):
    """Shards."""

    layout = "sharded"


class Probes(Files):
    """Probe files."""

    def make(self, directory):
        """Write a linear probe."""
        weight = np.arange(16, dtype=np.float32).reshape(2, 8)
        Probe.make(Site(0, "post_block"), weight, names=("a", "b")).save(directory / "p.safetensors")

    def look(self, directory):
        """Load it, and score rows of its width."""
        scorer = load_probe(directory / "p.safetensors")
        if scorer.hidden_size <= 1 << 16:
            scorer.scores(np.ones((3, scorer.hidden_size), np.float32))


class Keys(Files):
    """A key, and the list of who may connect."""

    def make(self, directory):
        """Write both."""
        directory.chmod(0o700)
        AllowList(directory).allow("ab" * 32, ("read", "capture"), "one")
        write_key(directory, "k", KeyPair("ab" * 32, "cd" * 32))

    def look(self, directory):
        """Read both, and revoke."""
        allowed = AllowList(directory)
        allowed.refresh()
        allowed.entries()
        read_key(directory / "k.key")


class Options(Files):
    """A file of consumers' options."""

    def make(self, directory):
        """Write one."""
        filesystem = 'name = "filesystem"\nroot = "x"\npositions = "all"\nhooks = ["post_block"]'
        (directory / "c.toml").write_text(f'[[consumer]]\n{filesystem}\n\n[[consumer]]\nname = "log"\n')
        self.known = load_plugins()

    def look(self, directory):
        """Read it, and make consumers of it."""
        configure_all([], directory / "c.toml", self.known)


FILES = {
    "spool": SpoolFiles,
    "inbox": InboxFiles,
    "recording": Recording,
    "packed": Dataset,
    "per_file": PerFile,
    "sharded": Sharded,
    "probes": Probes,
    "keys": Keys,
    "options": Options,
}
