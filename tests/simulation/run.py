"""One seed: who takes part, which faults occur, and the checks."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import capflow.hub.hub
import capflow.transport.links.link
import capflow.transport.outbox
from capflow import limits
from capflow.buffers.spool import Spool
from capflow.errors import CapflowError
from capflow.hub.hub import Hub
from capflow.plugins.configure import ConfiguredConsumer
from tests.simulation.bounds import checked
from tests.simulation.consumers import Filing, Listening, Shelf
from tests.simulation.database import SITE, Base
from tests.simulation.engine import ADDRESS, SECOND, Engine, model_of
from tests.simulation.hostile import WAYS, Hostile
from tests.simulation.network import Dealer, Network, Router, Waker
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import LivelockError, Process, Scheduler
from tests.simulation.threads import installed
from tests.simulation.volume import Kept, Volume

STAGES_MAX = 2
LIMITS = {  # small, so that they are reached
    "SESSIONS_MAX": 100,
    "AWAITED_MAX": 1000,
    "MESSAGES_UNSENT_MAX": 1500,
    "RESULTS_KEPT_MAX": 400,
    "SLICE_REQUESTS": 2,
}
OWNERS_MAX = 64
MEMORY_BYTES_MAX = 16 * limits.MIB  # of a hub: 16 KiB of its state for each owner, and 1 MiB for whoever comes first
DUCKDB, HOSTILE, LARGE = 0.2, 0.4, 0.1  # how likely they take part: LARGE, an engine's long prompts
HEADER_BYTES = 8 * limits.KIB  # of a frame with long prompts, at most
QUIET_S_MAX = 600.0  # of virtual time, until everything is handled once faults have ended
SYNCED_S_MAX = 60.0  # of virtual time, from then until everything is durable
# Of virtual time, from the kill of an engine until the hub has read its last messages and they are too old to count.
REPLACED_S_MAX = limits.NAME_KEPT_S + 1.0


@dataclass
class Report:
    """The result of a seed.

    digest: equal in two runs that made the same steps.
    """

    seed: int
    off: list
    digest: int
    steps: int
    seconds: float
    counts: dict
    faults: list


class _Failures(logging.Handler):
    """Tells the oracle what the product only logs: that it failed at something, and went on."""

    def __init__(self, oracle):
        super().__init__(logging.ERROR)
        self._oracle = oracle

    def emit(self, record):
        if getattr(record, "event", "") in ("hub_failed", "inbox_failed", "link_failed"):
            error = record.exc_info[1] if record.exc_info else None
            self._oracle.fail(f"{record.getMessage()}: {error!r}")


class Simulation:
    """One run."""

    def __init__(self, seed, root, *, stop_at=None, on_line=None):
        self.seed, self.root = seed, root
        self.world = world = Scheduler(seed)
        world.stop_at, world.on_line = stop_at, on_line
        self.inbox_bytes = world.choose.choice([64, 256, 1024]) * limits.KIB
        self.oracle = Oracle(world, self.inbox_bytes // 2 - HEADER_BYTES)
        self.network = Network(world)
        self.shelf = Shelf()
        self.base = Base(world) if world.choose.random() < DUCKDB else None
        self.batch_rows = world.choose.choice([1, 10, 100])
        # Disks of inboxes, by consumer.
        self.volumes = {}
        self.hub = None
        self.hub_process = None
        self.lives = 0
        # The lives that run or ended well.
        self.engines = []
        # The names of honest engines.
        self.honest = set()
        # When the last life of an engine was killed, by its name.
        self.killed_at = {}
        # The hostile peers.
        self.peers = []
        # The faults, for the report.
        self.faults = []
        # Set when no more faults come.
        self.quiet = False
        self.done = False
        choose = world.choose
        self.kinds = choose.sample(
            ["kill", "power", "engine", "both", "cut", "disk", "shelf", "starve", "wall", "stop"],
            choose.randrange(0, 5),
        )
        self.beside = choose.sample(["block", "drop", "skip"], choose.randrange(0, 3))
        self.ways = choose.sample(WAYS, choose.randrange(1, 4)) if choose.random() < HOSTILE else []
        self.queue_bytes = choose.choice([4 * limits.KIB, 64 * limits.KIB, None])
        self.slow_s = choose.choice([0.0, 0.0, 0.01, 0.2])

    # Processes.

    def start_hub(self):
        """Start a hub in a process of its own."""
        self.lives += 1
        process = self.hub_process = Process(self.world, f"hub{self.lives}")
        process.spawn(self.hub_main, "main", self.lives)

    def hub_main(self, life):
        """Run a hub until it is killed."""
        world, oracle = self.world, self.oracle
        lasting = [Filing(world, oracle, self.shelf)]
        if self.base is not None:
            lasting.append(self.base.consumer(self.root, batch_rows=self.batch_rows))
        consumers = [
            ConfiguredConsumer.of(
                each,
                spool_dir=self.root,
                spool_bytes=self.inbox_bytes,
                spill_fallback="block",
                queue_bytes_max=self.queue_bytes,
            )
            for each in lasting
        ]
        for policy in self.beside:
            listening = Listening(world, oracle, policy, policy, life, self.slow_s)
            consumers.append(
                ConfiguredConsumer.of(listening, queue_bytes_max=8 * limits.KIB if policy != "block" else None)
            )
        hub = Hub(ADDRESS, consumers, memory_bytes_max=MEMORY_BYTES_MAX, on_refused=self.note_refused)
        for lane in hub.lanes:
            if lane.durable:
                lane.inbox._files = lane.dead._files = self.volumes.setdefault(lane.name, Volume(world))
            self.watch_results(lane, life)
        process = world.process
        try:
            hub.start()
        except CapflowError as e:
            if not {"disk", "shelf", "starve"}.intersection(self.kinds):
                oracle.fail(f"the hub does not start: {e}")
            world.outside.spawn(self.start_again, "supervisor", process)
            return
        self.hub = hub

    def start_again(self, process):
        """Start a hub that a full disk kept from it, unless someone else does."""
        self.world.sleep(0.5)
        if self.hub_process is process and not process.dead:
            self.end_hub(power=False)
            self.start_hub()

    def note_excuses(self):
        """Excuse what a hub says itself that it cannot keep: an inbox is smaller than what its open requests hold.

        Where the end of the inbox was torn as well, nobody knows why the rows are missing, and both may be said.
        """
        keepers = () if self.hub is None else [lane for lane in self.hub.lanes if lane.durable]
        if any(lane.requests_unkept for lane in keepers):
            self.oracle.excused.add("earlier_hub")
        if "earlier_hub" in self.oracle.excused and any(lane._lost_unknown for lane in keepers):
            self.oracle.excused.add("spool_damaged")

    def note_refused(self, engine, reason):
        """Have the oracle know that the hub refused an engine.

        It may refuse the next life of one that was killed lately: it cannot know yet that the last one is gone.
        """
        self.world.trace(f"refuse {engine} {reason}")
        killed_s = self.world.now - self.killed_at.get(engine, -math.inf)
        if engine in self.honest and not (SECOND in reason and killed_s < REPLACED_S_MAX):
            self.oracle.fail(f"{engine} is honest, and refused: {reason}")

    def watch_results(self, lane, life):
        """Have the oracle know what a lane says of requests."""
        tell = lane._on_result

        def on_result(request, consumer, result):
            key = request.engine, request.id
            self.world.trace(f"result {lane.name} {key} {result.status}")
            self.oracle.took[lane.name, 0 if lane.durable else life][key].results.append(result)
            tell(request, consumer, result)

        lane._on_result = on_result

    def end_hub(self, *, power):
        """Kill the hub, and find out what is left on its disk."""
        self.hub_process.kill()
        self.note_excuses()
        self.hub = None
        self.volumes = {name: volume.after(power=power) for name, volume in self.volumes.items()}

    def start_engine(self, slot):
        """Start an engine, again under the name of its slot."""
        choose, world = self.world.choose, self.world
        name, model, policy = slot
        boot, root = f"b{choose.getrandbits(32):08x}", self.root / "spilled" / name
        if policy == "spill":  # what an earlier life left is sent beside this one, in its name
            name += f"-{boot}"
        process = Process(world, f"{name}-{boot}")
        process.files = Kept(process)
        engine = Engine(
            world,
            self.oracle,
            process,
            name,
            boot,
            model,
            policy=policy,
            root=root,
            outbound_bytes=choose.choice([4, 64, 1024]) * limits.KIB,
            steps=choose.randrange(5, 45),
            pause_s=choose.choice([0.001, 0.02, 0.2]),
            ends=choose.choice([0.02, 0.1, 0.3]),
            large=0.2 if choose.random() < LARGE else 0.0,
        )
        self.engines.append((slot, engine))
        self.honest.add(name)
        process.spawn(engine.main, "main")

    def start_hostile(self, number, way):
        """Start a hostile peer, a little later."""
        process = Process(self.world, f"x{number}")
        peer = Hostile(self.world, self.network, self.oracle, process, number, way)
        self.peers.append(peer)
        self.faults.append((0, way))
        self.world.at(self.world.choose.expovariate(1.0), lambda: process.spawn(peer.main, "main"))

    # Faults.

    def nemesis(self):
        """Do harm for a while, then see everything to its end."""
        world, choose = self.world, self.world.choose
        for _ in range(choose.randrange(1, 8) if self.kinds else 0):
            world.sleep(choose.expovariate(1 / choose.choice([0.05, 0.5, 3.0])))
            kind = choose.choice(self.kinds)
            self.faults.append((round(world.now, 3), kind))
            world.trace(f"fault {kind}")
            getattr(self, f"do_{kind}")()
        self.quiet = True
        while not all(one.ended for one in (*self.peers, *(engine for _, engine in self.engines))):
            world.sleep(0.5)
        give_up = world.now + QUIET_S_MAX
        while not self.settled():
            if world.now > give_up:
                self.oracle.fail(f"not done after {QUIET_S_MAX:g} s: {self.standing()}")
                break
            world.sleep(0.5)
        else:
            self.check_hub()
            if not self.in_hub(lambda: self.hub.stop(60.0)):
                self.oracle.fail("the hub did not stop well")
        self.done = True

    def in_hub(self, call):
        """Return what something answers that runs in the hub's process."""
        answers = []
        task = self.hub_process.spawn(lambda: answers.append(call()), "asked")
        while not task.done:
            self.world.sleep(0.05)
        return answers[0] if answers else None

    def await_hub(self):
        """Wait until the hub runs."""
        while self.hub is None and not self.hub_process.dead:
            self.world.sleep(0.05)

    def do_kill(self, *, power=False):
        """Kill the hub at a scheduling point, and start it again."""
        process = self.hub_process
        process.deaths_in = self.world.choose.choice([1, 10, 100, 1000])
        process.deaths_in = self.world.choose.randrange(process.deaths_in) + 1
        until = self.world.now + 2.0
        while not process.dead and self.world.now < until:
            self.world.sleep(0.02)
        self.end_hub(power=power)
        self.world.sleep(self.world.choose.choice([0.0, 0.3, 12.0]))
        self.start_hub()
        if self.world.choose.random() < 0.7:
            self.await_hub()

    def do_power(self):
        """Cut the power of the hub's machine."""
        self.do_kill(power=True)

    def do_stop(self):
        """Stop the hub as a user does, and start it again."""
        self.await_hub()
        if self.hub is None:
            return
        leave = self.world.choose.random() < 0.7
        self.in_hub(lambda: self.hub.stop(5.0, leave=leave))
        self.end_hub(power=False)
        self.start_hub()

    def do_engine(self):
        """Kill an engine, and start it again."""
        slot = self.kill_engine()
        if slot is not None:
            self.world.sleep(self.world.choose.choice([0.0, 1.0, 8.0]))
            self.start_engine(slot)

    def kill_engine(self):
        """Kill an engine that has not ended; return its slot, None when all have."""
        alive = [one for one in self.engines if not one[1].ended]
        if not alive:
            return None
        slot, engine = self.world.choose.choice(alive)
        engine.process.kill()
        self.killed_at[engine.name] = self.world.now
        self.engines.remove((slot, engine))
        return slot

    def do_both(self):
        """Kill the hub and an engine at the same moment, and start them again."""
        self.await_hub()
        slot = self.kill_engine()
        self.hub_process.kill()
        self.end_hub(power=self.world.choose.random() < 0.5)
        self.world.sleep(self.world.choose.choice([0.0, 1.0]))
        if slot is not None and self.world.choose.random() < 0.5:
            self.start_engine(slot)
            slot = None
        self.start_hub()
        if slot is not None:
            self.start_engine(slot)

    def do_cut(self):
        """Cut a connection."""
        self.network.cut_one()

    def do_disk(self):
        """Break the inbox's disk for a while."""
        broken = self.world.choose.choice([errno.ENOSPC, errno.EIO])
        for volume in self.volumes.values():
            volume.broken = broken
        self.world.sleep(self.world.choose.choice([0.1, 2.0, 5.0]))
        for volume in self.volumes.values():
            volume.broken = None

    def do_shelf(self):
        """Break the consumer's disk for a while."""
        self.break_data(broken=True)
        self.world.sleep(self.world.choose.choice([0.1, 2.0, 5.0]))
        self.break_data(broken=False)

    def do_starve(self):
        """Break the consumer's disk for a moment, then kill the hub."""
        pace_s = self.world.choose.choice([0.01, 0.05, 0.2])
        self.break_data(broken=True)
        self.world.sleep(self.world.choose.expovariate(1 / pace_s))
        self.break_data(broken=False)
        self.world.sleep(self.world.choose.expovariate(1 / pace_s))
        self.do_kill()

    def break_data(self, *, broken):
        """Have the disks of the consumers' data full, or not any more."""
        self.shelf.broken = errno.ENOSPC if broken else None
        if self.base is not None:
            self.base.broken = broken

    def do_wall(self):
        """Set the wall clock."""
        self.world.wall_offset += self.world.choose.choice([-1e8, -3600.0, 3600.0, 1e8])

    # The end.

    def settled(self):
        """Whether everything was handled."""
        hub = self.hub
        return hub is not None and not hub.index.requests_open and all(self.idle(lane) for lane in hub.lanes)

    @staticmethod
    def idle(lane):
        """Whether a lane has nothing to do."""
        if lane.durable:
            return not len(lane.queue) and not lane.inbox.unread and not lane._open and not lane._long
        return not len(lane.queue)

    def standing(self):
        """Return what is not handled, for a report."""
        if self.hub is None:
            return "no hub"
        lanes = {
            lane.name: (len(lane.queue), lane.durable and (lane.inbox.unread, list(lane._open)))
            for lane in self.hub.lanes
        }
        return f"{self.hub.index.requests_open} open, {lanes}"

    def given_bytes(self):
        """Return the credit that connected workers have."""
        sources = (peer.source for peer in self.hub.roster.peers.values())
        return sum(source.intake.credit_bytes for source in sources if source is not None)

    def check_hub(self):
        """Check the hub's bounds once all is quiet."""
        hub, pool = self.hub, self.hub.roster.pool
        give_up = self.world.now + SYNCED_S_MAX
        while pool.committed_bytes != (given := self.given_bytes()):  # a frame may be handled before it is durable
            if self.world.now > give_up:
                self.oracle.fail(f"{pool.committed_bytes} bytes of credit are committed, and {given} given")
                break
            self.world.sleep(0.5)
        if hub.counts.protocol_errors and not self.ways:
            self.oracle.fail(f"protocol errors of honest peers: {dict(hub.counts.refused)}")
        for lane in hub.lanes:
            if lane.queue.nbytes:
                self.oracle.fail(f"{lane.name}: {lane.queue.nbytes} bytes in an idle queue")

    def run(self):
        """Run it; return the report."""
        world, choose = self.world, self.world.choose
        router = lambda *args, **kwargs: Router(self.network, *args, **kwargs)  # noqa: E731
        dealer = lambda *args, **kwargs: Dealer(self.network, *args, **kwargs)  # noqa: E731
        with contextlib.ExitStack() as stack:
            failures = _Failures(self.oracle)
            logger = logging.getLogger("capflow")
            logger.addHandler(failures)
            stack.callback(logger.removeHandler, failures)
            for module, name, value in (
                *((limits, name, value) for name, value in LIMITS.items()),
                (capflow.hub.hub, "Router", router),
                (
                    capflow.transport.outbox,
                    "Spool",
                    lambda *args, **kwargs: Spool(*args, files=world.process.files, **kwargs),
                ),
                (capflow.transport.links.link, "Dealer", dealer),
                (capflow.transport.links.link, "Waker", lambda: Waker(world)),
            ):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
            stack.enter_context(checked(self.oracle, OWNERS_MAX))
            if self.base is not None:
                stack.enter_context(self.base.installed())
            stack.enter_context(installed(world))
            self.start_hub()
            for number in range(choose.choice([1, 1, 2, 3])):
                self.start_engine(
                    (
                        f"e{number}",
                        model_of(choose.choice([2, 4]), choose.choice([8, 16]), choose.choice([1, 1, STAGES_MAX])),
                        choose.choice(["block", "drop", "spill"]),
                    )
                )
            for number, way in enumerate(self.ways):
                self.start_hostile(number, way)
            world.outside.spawn(self.nemesis, "nemesis")
            try:
                world.run(lambda: self.done or world.failures)
            except LivelockError as e:
                self.oracle.fail(f"it does not end: {e}: {self.standing()}")
            for task, error in world.failures:
                self.oracle.fail(f"{task.process.name}.{task.name}: {type(error).__name__}: {error}")
            self.note_excuses()
            if self.done and world.stop_at is None:
                lasting = {"filing": None}
                if self.base is not None:
                    self.base.check(self.oracle)
                    lasting["duckdb"] = SITE
                self.oracle.check(lasting)
            self.hub_process.kill()
            for _, engine in self.engines:
                engine.process.kill()
            world.stop_at = None
            with contextlib.suppress(LivelockError):
                world.run(lambda: not world._ready)
        return Report(
            self.seed, self.oracle.off, world.digest, world.steps, world.now, dict(self.oracle.counts), self.faults
        )


def simulate(seed, *, stop_at=None, on_line=None):
    """Run a seed; return the report."""
    logging.getLogger("capflow").setLevel(logging.ERROR)
    logging.getLogger("capflow").propagate = False
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        return Simulation(seed, Path(directory), stop_at=stop_at, on_line=on_line).run()
