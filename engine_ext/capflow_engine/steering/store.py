"""The store: named modules, and the global state that steers every request; shared by the processes of one server.

A store without a directory belongs to one process. All processes with a store of the same directory share its content:
each sees a change of another at its next access. The directory holds

| file | content |
|---|---|
| `generation` | one byte per change; only its size is read |
| `index` | msgpack: the digest of the global state, and of each module by name; and their versions |
| `DIGEST.steering` | msgpack of one `Steering`, named by its content; never written twice |
| `lock` | locked by the process that changes something |

Each part, that is a module or the global state, has a version, which stays when the part is removed. So stores without
a common directory can exchange parts: the larger version holds (`capflow_engine.steering.sharing`).

Invariant: the files that an index names exist until the next index is written. A `StoreState` is complete and does not
change. The creator of a store decides, with `check`, what fits the model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.errors import CapflowError, UsageError, explain
from capflow.files import write_whole
from capflow.protocol.message import Version
from capflow.steering.compiler import GLOBAL, REQUEST, module_owner, program_of
from capflow.steering.gate import SteeringGate
from capflow.steering.program import SteeringProgram
from capflow.steering.request import NOTHING, ModuleUse, Steering, Tier

_PROGRAMS_KEPT_MAX = 256
_DIGEST_BYTES = 16


class UnknownModuleError(UsageError):
    """No module of this name is registered."""


THE_GLOBAL_STATE = ""
"""The name of the global state among the parts of a store."""


class StoreState(msgspec.Struct, frozen=True):
    """The content of a store at one time.

    generation: the number of changes before.
    everywhere: the global state.
    modules: the modules by name.
    versions: the version of each part that was ever changed, by its name.
    """

    generation: int = 0
    everywhere: Steering = NOTHING
    modules: Mapping[str, Steering] = msgspec.field(default_factory=dict)
    versions: Mapping[str, Version] = msgspec.field(default_factory=dict)

    def part(self, name: str) -> Steering | None:
        """Return a part; None if it was removed, or never was. name: of a module, or `THE_GLOBAL_STATE`."""
        if name == THE_GLOBAL_STATE:
            return None if self.everywhere == NOTHING else self.everywhere
        return self.modules.get(name)

    def with_part(self, name: str, steering: Steering | None, version: Version) -> StoreState:
        """Return the content with another part in a version."""
        state = msgspec.structs.replace(self, versions=_with_version(self, name, version))
        if name == THE_GLOBAL_STATE:
            return msgspec.structs.replace(state, everywhere=NOTHING if steering is None else steering)
        modules = {other: module for other, module in self.modules.items() if other != name}
        return msgspec.structs.replace(state, modules=modules if steering is None else {**modules, name: steering})

    def changed_by(self, writer: str, before: StoreState) -> StoreState:
        """Return the content in which each part that differs from an earlier content has a new version."""
        names = [name for name in {*before.modules, *self.modules} if before.part(name) is not self.part(name)]
        if self.everywhere is not before.everywhere:
            names.append(THE_GLOBAL_STATE)
        state = self
        for name in sorted(names):
            count = 1 + max((version.count for version in state.versions.values()), default=0)
            versions = _with_version(state, name, Version(count, writer))
            state = msgspec.structs.replace(state, versions=versions)
        return state

    def module(self, name: str, where: str = "steering_name") -> Steering:
        """Return a module; raise UnknownModuleError if there is none of this name.

        where: the field that named it, for the error.
        """
        try:
            return self.modules[name]
        except KeyError:
            names = ", ".join(sorted(self.modules)) or "none is registered"
            raise UnknownModuleError(
                explain(where, got=name, expected=f"a registered module ({names})", do="see GET /v1/steering/modules")
            ) from None

    def parts(self, asked: Steering) -> list[tuple[str, Steering]]:
        """Return the parts of a request's steering with their owners, in order.

        They are the global state, the request's scaled modules, and its own vectors.
        """
        parts = [(GLOBAL, self.everywhere)] if self.everywhere != NOTHING else []
        parts += [(module_owner(use.name), _scaled(self.module(use.name), use.scale)) for use in asked.modules]
        own = msgspec.structs.replace(asked, modules=()) if asked.modules else asked
        return [*parts, (REQUEST, own)] if own != NOTHING else parts


def _with_version(state: StoreState, name: str, version: Version) -> dict[str, Version]:
    """Return the versions of a store with another one; the oldest removal is forgotten if there are too many."""
    versions = {**state.versions, name: version}
    if len(versions) > limits.SHARED_PARTS_MAX:
        removed = [other for other in versions if other != name and state.part(other) is None]
        del versions[min(removed, key=versions.__getitem__)]
    return versions


Check = Callable[[Steering, Steering], None]
"""Raises UsageError for a module or a global state that must not be stored.

The first argument is the state to store, the second the user's steering that it was made of.
"""


class SteeringStore:
    """Modules by name, and the global state.

    directory: an existing directory that processes share; None for a store of this process alone.
    check: raises UsageError for steering that does not fit the model; by default, all fits.
    resolve: resolves the features of autoencoders in what is stored.
    check_part: raises UsageError for a part that must not be stored, given its name.
    on_change: called after a change by this process, with the names of the parts.
    """

    def __init__(
        self,
        directory: Path | None = None,
        check: Check = lambda _new, _asked: None,
        resolve: Callable[[Steering], Steering] = lambda steering: steering,
    ) -> None:
        self.check_part: Callable[[str, Steering], None] = lambda _name, _steering: None
        self.on_change: Callable[[list[str]], None] = lambda _names: None
        self._check = check
        self._resolve = resolve
        # An id that no other store has.
        self._writer = uuid.uuid4().hex
        self._files = None if directory is None else _Files(directory)
        # Held while a thread of this process changes something.
        self._lock = threading.Lock()
        # The last state that was read; replaced as a whole.
        self._held = StoreState()
        # The programs of one generation, by the modules that a request uses.
        self._programs: tuple[int, dict[tuple[ModuleUse, ...], SteeringProgram | None]] = (0, {})

    @property
    def held(self) -> StoreState:
        """The content of the store now; costs one system call if it has not changed."""
        if self._files is not None and self._files.generation() != self._held.generation:
            self._held = self._files.read(self._held)
        return self._held

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules, sorted."""
        return tuple(sorted(self.held.modules))

    @property
    def global_state(self) -> Steering:
        """The steering of every request; `NOTHING` if there is none."""
        return self.held.everywhere

    def get(self, name: str) -> Steering:
        """Return a module; raise UnknownModuleError if there is none of this name."""
        return self.held.module(name)

    def resolve(self, asked: Steering | None, model: ModelInfo | int) -> SteeringProgram | None:
        """Return the program of a request; None if neither the request nor the global state steers.

        Later changes of modules or of the global state do not change the program.
        Raises UnknownModuleError for a module that is not registered.

        asked: the steering that the request asks for.
        """
        held = self.held
        if asked is None:
            asked = NOTHING
        owned = held.parts(asked)
        if not owned:
            return None
        owners, parts = zip(*owned, strict=True)
        if msgspec.structs.replace(asked, modules=()) != NOTHING:  # a request's own vectors rarely come again
            return program_of(model, parts, owners)
        generation, programs = self._programs
        if generation != held.generation or len(programs) >= _PROGRAMS_KEPT_MAX:
            self._programs = held.generation, (programs := {})
        if asked.modules not in programs:
            programs[asked.modules] = program_of(model, parts, owners)
        return programs[asked.modules]

    def register(self, name: str, module: Steering) -> None:
        """Register a module under a name; running requests keep the module that had this name before.

        Raises UsageError for a wrong name, and for a module that is empty, has patches, uses modules, or does not fit
        the model.
        """
        if not isinstance(name, str) or not 0 < len(name) <= limits.STEERING_NAME_LENGTH_MAX or not name.isprintable():
            expected = f"1..{limits.STEERING_NAME_LENGTH_MAX} printable characters"
            raise UsageError(explain("name", got=name, expected=expected))
        module = self._resolve(module)
        _check_shared(module, f"module {name}")
        self._check(module, module)

        def change(held: StoreState) -> StoreState:
            modules = {**held.modules, name: module}
            if len(modules) > limits.STEERING_MODULES_HELD_MAX:
                expected = f"at most {limits.STEERING_MODULES_HELD_MAX} modules"
                raise UsageError(explain("name", got=name, expected=expected, do="unregister one first"))
            return msgspec.structs.replace(held, modules=modules)

        self._change(change)

    def unregister(self, name: str) -> None:
        """Remove a module; running requests keep it. Raises UnknownModuleError if there is none of this name."""

        def change(held: StoreState) -> StoreState:
            held.module(name, "name")
            return msgspec.structs.replace(held, modules={n: m for n, m in held.modules.items() if n != name})

        self._change(change)

    def set_global(self, steering: Steering, *, replace: bool = False) -> None:
        """Change the steering of all requests that arrive from now on.

        In each tier, the vectors of `steering` replace the vectors at their sites, and its clamps and set features
        replace those at theirs; other sites stay as they are. A scale or a strength of 0 removes what was there. A gate
        replaces the gate of its name. An old gate that nothing names any more is removed.

        Raises UsageError if `steering` is empty, has patches or modules, or if it or the new state does not fit the
        model.

        replace: whether `steering` replaces the whole global state.
        """
        steering = self._resolve(steering)
        _check_shared(steering, "global state")

        def change(held: StoreState) -> StoreState:
            old = NOTHING if replace else held.everywhere
            everywhere = Steering(
                _merged(old.base, steering.base),
                _merged(old.prefill, steering.prefill),
                _merged(old.decode, steering.decode),
            )
            everywhere = msgspec.structs.replace(everywhere, gates=_merged_gates(old, steering, everywhere))
            everywhere.check_gates()
            self._check(everywhere, steering)
            return msgspec.structs.replace(held, everywhere=everywhere)

        self._change(change)

    def clear_global(self) -> None:
        """Remove the global state; running requests keep it."""
        self._change(lambda held: msgspec.structs.replace(held, everywhere=NOTHING))

    def merge(self, name: str, steering: Steering | None, version: Version) -> bool:
        """Take a part of another store unless this one has the same or a newer version; return whether it was taken.

        Raises UsageError if it does not fit the model.

        steering: None if it was removed.
        """
        if steering is not None:
            self._check(steering, steering)
        taken = False

        def change(held: StoreState) -> StoreState:
            nonlocal taken
            taken = version > held.versions.get(name, Version())
            return held.with_part(name, steering, version) if taken else held

        if version > self.held.versions.get(name, Version()):
            self._changed(change)
        return taken

    def _change(self, change: Callable[[StoreState], StoreState]) -> None:
        """Change the store as a user asked for it."""
        names: list[str] = []

        def versioned(held: StoreState) -> StoreState:
            new = change(held).changed_by(self._writer, held)
            names[:] = [name for name, version in new.versions.items() if held.versions.get(name) != version]
            for name in names:
                if (part := new.part(name)) is not None:
                    self.check_part(name, part)
            return new

        self._changed(versioned)
        self.on_change(names)

    def _changed(self, change: Callable[[StoreState], StoreState]) -> None:
        with self._lock:
            if self._files is not None:
                self._held = self._files.change(change)
                return
            new = change(self._held)
            self._held = msgspec.structs.replace(new, generation=self._held.generation + 1)


class _Index(msgspec.Struct, frozen=True):
    everywhere: str | None = None
    modules: dict[str, str] = msgspec.field(default_factory=dict)
    versions: dict[str, Version] = msgspec.field(default_factory=dict)

    @property
    def digests(self) -> set[str]:
        return {*self.modules.values(), *filter(None, [self.everywhere])}


class _Files:
    """One process's access to a store's directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / "generation"
        # Stays open until the process ends.
        self._generation = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        # The steerings of the index that was read last, by digest.
        self._steerings: dict[str, Steering] = {}

    def generation(self) -> int:
        """Return the number of changes so far."""
        return os.fstat(self._generation).st_size

    def read(self, last: StoreState) -> StoreState:
        """Return the content of the directory; `last` if its files are gone."""
        while True:
            generation = self.generation()
            try:
                index = self._index()
                steerings = {digest: self._steerings.get(digest) or self._load(digest) for digest in index.digests}
            except FileNotFoundError:
                if self.generation() != generation:  # another process changed it meanwhile
                    continue
                return last
            self._steerings = steerings
            return StoreState(
                generation,
                steerings[index.everywhere] if index.everywhere else NOTHING,
                {name: steerings[digest] for name, digest in index.modules.items()},
                index.versions,
            )

    def change(self, change: Callable[[StoreState], StoreState]) -> StoreState:
        """Change the content of the directory and return it; raise CapflowError if it cannot be written."""
        try:
            with self._locked():
                old, before = self.read(StoreState()), self._index()
                new = change(old)
                everywhere = None
                if new.everywhere != NOTHING:
                    same = new.everywhere is old.everywhere
                    everywhere = before.everywhere if same else self._save(new.everywhere)
                modules = {
                    name: before.modules[name] if old.modules.get(name) is module else self._save(module)
                    for name, module in new.modules.items()
                }
                after = _Index(everywhere, modules, dict(new.versions))
                write_whole(self._directory / "index", msgspec.msgpack.encode(after))
                os.write(self._generation, b".")
                for path in self._directory.glob("*.steering"):
                    if path.stem not in after.digests:
                        path.unlink()
                return self.read(new)
        except OSError as e:
            raise CapflowError(explain(f"steering store {self._directory}", got=e.strerror or str(e))) from e

    def _index(self) -> _Index:
        try:
            return msgspec.msgpack.decode((self._directory / "index").read_bytes(), type=_Index)
        except FileNotFoundError:
            if self.generation() > 0:
                raise
            return _Index()

    def _load(self, digest: str) -> Steering:
        return msgspec.msgpack.decode(self._path(digest).read_bytes(), type=Steering)

    def _save(self, steering: Steering) -> str:
        """Write the file of a steering if it does not exist; return its digest."""
        content = msgspec.msgpack.encode(steering)
        digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
        if not self._path(digest).exists():
            write_whole(self._path(digest), content)
        return digest

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.steering"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)  # releases the lock


def _check_shared(steering: Steering, where: str) -> None:
    if steering.patches:
        raise UsageError(
            explain(f"{where}: steering_patches", expected="nothing", do="send patches with their request")
        )
    if steering.modules:
        raise UsageError(explain(f"{where}: steering_name", expected="nothing: a module uses no other modules"))
    if steering == NOTHING:
        raise UsageError(explain(where, got="nothing", expected="vectors, clamps or features"))


def _scaled(module: Steering, scale: float) -> Steering:
    if scale == 1.0:
        return module
    base, prefill, decode = (tier.scaled(scale) for tier in (module.base, module.prefill, module.decode))
    return msgspec.structs.replace(module, base=base, prefill=prefill, decode=decode)


def _merged_gates(old: Steering, new: Steering, merged: Steering) -> tuple[SteeringGate, ...]:
    """Return the gates of the merged tiers: all new ones, and the old ones that a part still names."""
    named = {part.gate for _, part in merged.parts()}
    gates = {gate.name: gate for gate in old.gates if gate.name in named}
    return tuple({**gates, **{gate.name: gate for gate in new.gates}}.values())


def _merged(old: Tier, new: Tier) -> Tier:
    added = {vector.site for vector in new.vectors}
    vectors = (*(vector for vector in old.vectors if vector.site not in added), *new.vectors)
    clamped = {clamp.site for clamp in new.clamps}
    clamps = (*(clamp for clamp in old.clamps if clamp.site not in clamped), *new.clamps)
    set_at = {feature.site for feature in new.features}
    features = (*(feature for feature in old.features if feature.site not in set_at), *new.features)
    return Tier(
        tuple(vector for vector in sorted(vectors, key=lambda vector: vector.site) if vector.scale != 0.0),
        tuple(clamp for clamp in clamps if clamp.strength != 0.0),
        tuple(feature for feature in features if feature.strength != 0.0),
    )
