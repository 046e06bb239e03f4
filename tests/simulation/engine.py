"""Honest workers: real links, on the simulation's network, that send what the oracle knows."""

from __future__ import annotations

import os

import numpy as np

from capflow import limits
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Block, Finished, FrameHeader, Rank, RequestRows, Span
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.protocol.message import Hello
from capflow.transport.links.former import FormerLink
from capflow.transport.links.worker import WorkerLink
from capflow.transport.outbox import Outbox, left_behind
from tests.simulation.oracle import Sent, rows_of

ADDRESS = "tcp://127.0.0.1:5555"
LARGE = (150, 600, 1200)  # tokens of a prompt; up to 300 KiB in a frame
REFUSED_LATER_S = 0.2  # until what was not taken is tried again
SECOND = "got a second worker"  # what a hub says that takes the last life, which was killed, for a live one


def model_of(layers, hidden, stages, dtype="float32"):
    """Return a model with one site a layer."""
    return ModelInfo("m", layers, hidden, dtype, tuple(Site(layer, "post_block") for layer in range(layers)), stages)


class Engine:
    """One life of an engine: a worker for each pipeline stage."""

    def __init__(
        self, world, oracle, process, name, boot, model, *, policy, outbound_bytes, steps, pause_s, ends, large, root
    ):
        self.world, self.oracle, self.process = world, oracle, process
        self.name, self.boot, self.model = name, boot, model
        self.policy, self.outbound_bytes, self.steps, self.pause_s = policy, outbound_bytes, steps, pause_s
        # How likely a request ends in a step.
        self.ends = ends
        # How likely a prompt has a frame that a small queue, inbox or credit does not hold.
        self.large = large
        # The directory of what it spills.
        self.root = root
        self.links = []
        # Links for what earlier lives left there.
        self.former = []
        self.running = []
        # The requests of this life.
        self.requests = []
        # Whether everything was sent and the links are closed.
        self.ended = False
        per = -(-model.num_layers // model.stages)
        self.sites = {stage: model.sites[stage * per : (stage + 1) * per] for stage in range(model.stages)}
        process.on_kill.append(self.died)

    def main(self):
        """Serve requests, then end well."""
        world, choose = self.world, self.world.choose
        for outbox in left_behind(self.root):
            self.former.append(FormerLink(ADDRESS, outbox))
            self.former[-1].start()
        for stage in range(self.model.stages):
            hello = Hello("worker", self.name, self.boot, Rank(stage, 0, 0), self.model)
            outbox = Outbox.of(self.root, hello, limits.MIB) if self.policy == "spill" else None
            link = WorkerLink(
                ADDRESS,
                hello,
                outbound_bytes_max=self.outbound_bytes,
                policy=self.policy,
                block_s_max=2.0,
                outbox=outbox,
            )
            link.start()
            self.links.append(link)
        for link in self.links:
            while link.wait_welcome(5.0) is None:
                if link.refusal is not None and SECOND not in link.refusal:
                    self.oracle.fail(f"{self.name} is refused: {link.refusal}")
                    return
                world.sleep(REFUSED_LATER_S)  # the link asks again by itself
        for step in range(self.steps):
            self._turn(step)
            world.sleep(choose.expovariate(1 / self.pause_s))
        for request in list(self.running):
            self._step(self.steps, [], [request])
        for link in self.links:
            link.close(600.0)
            if not link.drained:
                self.oracle.fail(f"{self.name}: its link was not drained in 600 s")
        for link in self.former:
            while link._thread.is_alive():
                link._thread.join(1.0)
        self.ended = True

    def died(self):
        """Note what went with the process."""
        for link in self.links:
            if link.outbox is not None and link.outbox.promises._fd >= 0:
                os.close(link.outbox.promises._fd)  # what is in the file stays
                link.outbox.promises._fd = -1
        for request in self.requests:
            acked = [link.acked for link in self.links]
            if any(request.ends.get(stage, 1 << 60) > acked[stage] for stage in self.sites):
                request.cut = True
                request.kept = self.policy == "spill"
        unsent = {link.outbox.hello.boot for link in self.former if not link._leaves_nothing()}
        for request in self.oracle.sent.values():
            if request.cut and request.boot != self.boot and (request.boot in unsent or not self.links):
                request.late = True

    def _turn(self, step):
        choose = self.world.choose
        while len(self.running) < 3 and choose.random() < 0.5:
            name = f"{self.boot}-r{len(self.requests)}"
            length = choose.choice(LARGE) if choose.random() < self.large else choose.randrange(1, 9)
            request = Sent(self.name, self.boot, name, self.model.hidden_size, self.sites, length)
            self.oracle.sent[request.key] = request
            self.requests.append(request)
            self.running.append(request)
        parts = []
        for request in self.running:
            if choose.random() < 0.8:
                first = not request.computed[0]
                length = request.prompt_length if first else choose.choice([1, 1, 1, 2])
                if first and request.prompt_length > 4 and choose.random() < 0.5:
                    length = 4  # a prompt in two chunks
                parts.append((request, request.computed[0], length))
        over = [request for request in self.running if request.computed[0] and choose.random() < self.ends]
        self._step(step, [part for part in parts if part[0] not in over], over)

    def _step(self, step, parts, over):
        for stage, link in enumerate(self.links):
            self._send(stage, link, step, parts)
        for request in over:
            self.running.remove(request)
            for stage, link in enumerate(self.links):
                self._end(stage, link, step, request)

    def _send(self, stage, link, step, parts):
        if not parts:
            return
        sites, model = self.sites[stage], self.model
        total = sum(length for _, _, length in parts)
        rows = np.empty((len(sites), total, model.hidden_size), DTYPES[model.dtype])
        spans, named, row = [], [], 0
        for number, (request, start, length) in enumerate(parts):
            for index, site in enumerate(sites):
                rows[index, row : row + length] = rows_of(
                    self.name, request.id, site, start, length, model.hidden_size, model.dtype
                )
            spans.append(Span(number, start, length, row))
            named.append(RequestRows(request.id, request.prompt_length, start, tuple(range(start, start + length))))
            row += length
        header = self._header(stage, step, tuple(named), (Block(sites, total, tuple(spans)),))
        for request, _, length in parts:
            request.computed[stage] += length
        reason = link.send(header, rows.reshape(-1).view(np.uint8))
        for request, start, length in parts:
            if reason is None:
                request.sent[stage] += length * len(sites)
                if rows.nbytes > self.oracle.fits_bytes:
                    request.large += length * len(sites)
                request.lasts[stage] = link.counters["frames"]
            else:
                request.losses(stage).add(reason, sites, start, start + length)

    def _end(self, stage, link, step, request):
        end = Finished(
            request.id,
            "stop",
            request.prompt_length,
            request.computed[stage],
            request.sent[stage],
            request.losses(stage).dropped,
        )
        header = self._header(stage, step, (), (), (end,))
        request.ending = True
        while (reason := link.send(header, b"")) is not None:
            if reason in ("closed", "refused"):
                self.oracle.fail(f"{self.name}: the end of {request.id} is not taken: {reason} {link.refusal}")
                return
            self.world.sleep(REFUSED_LATER_S)
        request.ends[stage] = link.counters["frames"]

    def _header(self, stage, step, requests, blocks, finished=()):
        return FrameHeader(
            engine=self.name,
            boot=self.boot,
            rank=Rank(stage, 0, 0),
            seq=0,
            step=step,
            time_ns=0,
            dtype=self.model.dtype,
            hidden_size=self.model.hidden_size,
            requests=requests,
            blocks=blocks,
            finished=finished,
            step_tokens=sum(len(request.token_ids) for request in requests),
        )
