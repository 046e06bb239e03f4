"""The store: named modules, and the global state that steers every request; shared by the processes of one server.

Without a directory it is this process's own. With one, every process that has a store of the same directory sees what
any of them changed, from its next question on. The directory holds

| file | content |
|---|---|
| `generation` | a byte for each change that there was; its size is all that anybody asks for |
| `index` | msgpack: the digest of the global state and of each module, by name |
| `DIGEST.steering` | msgpack of one `Steering`, named by its content; never written twice |
| `lock` | held by who changes something |

What always holds: an index names only files that are there until the next index is; whoever has a `StoreState` has all of it,
whatever others change. What fits a model is for whoever makes a store to say.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain
from capflow.files import write_whole
from capflow.steering.program import SteeringProgram, program_of
from capflow.steering.request import NOTHING, ModuleUse, Steering, Tier

_PROGRAMS_KEPT_MAX = 256
_DIGEST_BYTES = 16


class UnknownModuleError(UsageError):
    """Nobody registered a module of this name."""


class StoreState(msgspec.Struct, frozen=True):
    """What a store holds at one time. generation: how many changes there were before."""

    generation: int = 0
    everywhere: Steering = NOTHING
    modules: Mapping[str, Steering] = msgspec.field(default_factory=dict)

    def module(self, name: str, where: str = "steering_name") -> Steering:
        """Return a module; raises UnknownModuleError when there is none of this name."""
        try:
            return self.modules[name]
        except KeyError:
            known = ", ".join(sorted(self.modules)) or "none is registered"
            raise UnknownModuleError(
                explain(where, got=name, expected=f"a registered module ({known})", do="see GET /v1/steering/modules")
            ) from None

    def parts(self, asked: Steering) -> list[Steering]:
        """Return everything that steers a request, in order: the global state, its modules by their scales, its own."""
        parts = [self.everywhere] if self.everywhere != NOTHING else []
        parts += [_scaled(self.module(use.name), use.scale) for use in asked.modules]
        own = msgspec.structs.replace(asked, modules=()) if asked.modules else asked
        return [*parts, own] if own != NOTHING else parts


Check = Callable[[Steering, Steering], None]
"""Raises for a module or a global state that must not be: the first; the second is what was said, of which that came."""


class SteeringStore:
    """Modules by name, and the global state. directory: one that exists, for processes to share; None for this one alone.

    check: raises UsageError for what does not fit the model; without it everything does.
    """

    def __init__(self, directory: Path | None = None, check: Check = lambda _now, _said: None) -> None:
        self._check = check
        self._files = None if directory is None else _Files(directory)
        self._lock = threading.Lock()  # held while a thread of this process changes something
        self._held = StoreState()  # as last seen; replaced whole
        self._programs: tuple[int, dict[tuple[ModuleUse, ...], SteeringProgram | None]] = (0, {})  # of one generation

    @property
    def held(self) -> StoreState:
        """What the store holds now. While nobody changes anything this costs one system call."""
        if self._files is not None and self._files.generation() != self._held.generation:
            self._held = self._files.read(self._held)
        return self._held

    @property
    def names(self) -> tuple[str, ...]:
        """The modules' names, sorted."""
        return tuple(sorted(self.held.modules))

    @property
    def global_state(self) -> Steering:
        """What steers every request; `NOTHING` when nothing does."""
        return self.held.everywhere

    def get(self, name: str) -> Steering:
        """Return a module; raises UnknownModuleError when there is none of this name."""
        return self.held.module(name)

    def resolve(self, asked: Steering | None, hidden_size: int) -> SteeringProgram | None:
        """Return the program of a request that asks for this: None when neither it nor the global state does anything.

        It holds what it was made of: what is registered or set later does not reach it.
        Raises UnknownModuleError for a name that nobody registered.
        """
        held = self.held
        if asked is None:
            asked = NOTHING
        parts = held.parts(asked)
        if not parts:
            return None
        if msgspec.structs.replace(asked, modules=()) != NOTHING:  # what it brings itself likely never comes again
            return program_of(hidden_size, parts)
        generation, programs = self._programs
        if generation != held.generation or len(programs) >= _PROGRAMS_KEPT_MAX:
            self._programs = held.generation, (programs := {})
        if asked.modules not in programs:
            programs[asked.modules] = program_of(hidden_size, parts)
        return programs[asked.modules]

    def register(self, name: str, module: Steering) -> None:
        """Give a module a name; requests that run with another of this name keep that.

        Raises UsageError for a wrong name, an empty module, one with patches or with modules of its own, and one that
        does not fit the model.
        """
        if not isinstance(name, str) or not 0 < len(name) <= limits.STEERING_NAME_LENGTH_MAX or not name.isprintable():
            expected = f"1..{limits.STEERING_NAME_LENGTH_MAX} characters that can be printed"
            raise UsageError(explain("name", got=name, expected=expected))
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
        """Forget a module; requests that run with it keep it. Raises UnknownModuleError when there is none."""

        def change(held: StoreState) -> StoreState:
            held.module(name, "name")
            return msgspec.structs.replace(held, modules={n: m for n, m in held.modules.items() if n != name})

        self._change(change)

    def set_global(self, steering: Steering, *, replace: bool = False) -> None:
        """Steer every request that comes from now on.

        At the sites that `steering` names in a tier, its vectors take the place of the vectors there, and its clamps of the
        clamps; other sites stay as they are. With `replace` it takes the place of everything. A scale or a strength of 0
        takes away what was there.

        Raises UsageError for nothing, for patches and modules, and for what does not fit the model, alone or with what is there.
        """
        _check_shared(steering, "global state")

        def change(held: StoreState) -> StoreState:
            old = NOTHING if replace else held.everywhere
            everywhere = Steering(
                _merged(old.base, steering.base),
                _merged(old.prefill, steering.prefill),
                _merged(old.decode, steering.decode),
            )
            self._check(everywhere, steering)
            return msgspec.structs.replace(held, everywhere=everywhere)

        self._change(change)

    def clear_global(self) -> None:
        """Steer no request any more but those that ask for it, and those that run."""
        self._change(lambda held: msgspec.structs.replace(held, everywhere=NOTHING))

    def _change(self, change: Callable[[StoreState], StoreState]) -> None:
        with self._lock:
            if self._files is not None:
                self._held = self._files.change(change)
                return
            new = change(self._held)
            self._held = msgspec.structs.replace(new, generation=self._held.generation + 1)


class _Index(msgspec.Struct, frozen=True):
    everywhere: str | None = None
    modules: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def digests(self) -> set[str]:
        return {*self.modules.values(), *filter(None, [self.everywhere])}


class _Files:
    """A store's directory, as one process sees it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / "generation"
        self._generation = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)  # open as long as the process is
        self._steerings: dict[str, Steering] = {}  # by digest, those of the index read last

    def generation(self) -> int:
        """Return how many changes there were."""
        return os.fstat(self._generation).st_size

    def read(self, last: StoreState) -> StoreState:
        """Return what the directory holds; `last` if nothing can be read there any more."""
        while True:
            generation = self.generation()
            try:
                index = self._index()
                steerings = {digest: self._steerings.get(digest) or self._load(digest) for digest in index.digests}
            except FileNotFoundError:
                if self.generation() != generation:  # somebody changed it meanwhile
                    continue
                return last
            self._steerings = steerings
            return StoreState(
                generation,
                steerings[index.everywhere] if index.everywhere else NOTHING,
                {name: steerings[digest] for name, digest in index.modules.items()},
            )

    def change(self, change: Callable[[StoreState], StoreState]) -> StoreState:
        """Change what the directory holds; return what it holds then. Raises CapflowError when it cannot be written."""
        try:
            with self._locked():
                old, before = self.read(StoreState()), self._index()
                new = change(old)
                after = _Index(
                    None
                    if new.everywhere == NOTHING
                    else before.everywhere
                    if new.everywhere is old.everywhere
                    else self._save(new.everywhere),
                    {
                        name: before.modules[name] if old.modules.get(name) is module else self._save(module)
                        for name, module in new.modules.items()
                    },
                )
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
        """Write what is not there yet; return its digest."""
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
            os.close(lock)  # which gives the lock back


def _check_shared(steering: Steering, where: str) -> None:
    if steering.patches:
        raise UsageError(
            explain(f"{where}: steering_patches", expected="nothing", do="send patches with their request")
        )
    if steering.modules:
        raise UsageError(explain(f"{where}: steering_name", expected="nothing, for modules hold no others"))
    if steering == NOTHING:
        raise UsageError(explain(where, got="nothing", expected="vectors or clamps"))


def _scaled(module: Steering, scale: float) -> Steering:
    if scale == 1.0:
        return module
    return Steering(module.base.scaled(scale), module.prefill.scaled(scale), module.decode.scaled(scale))


def _merged(old: Tier, new: Tier) -> Tier:
    added = {vector.site for vector in new.vectors}
    vectors = (*(vector for vector in old.vectors if vector.site not in added), *new.vectors)
    clamped = {clamp.site for clamp in new.clamps}
    clamps = (*(clamp for clamp in old.clamps if clamp.site not in clamped), *new.clamps)
    return Tier(
        tuple(vector for vector in sorted(vectors, key=lambda vector: vector.site) if vector.scale != 0.0),
        tuple(clamp for clamp in clamps if clamp.strength != 0.0),
    )
