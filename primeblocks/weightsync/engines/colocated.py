"""Trainer and engine on one device. They take turns in its memory, with a sync in between:

    trainer's turn   trainer on the device, engine asleep, its weights may be lost
      to_engine        publish, trainer away, wake weights, update, wake cache
    engine's turn    engine awake with the new weights, trainer away
      to_trainer       engine asleep, trainer back

Either all ranks take a turn or none does. If a stage fails on a rank, all ranks go back. If that
fails too, the turn is "torn", and the engine must be restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.distributed as dist

from ...errors import DeadlineError, EngineError, TransferError, UsageError
from ..agree import Messenger
from ..marker import Receipt

__all__ = ["Colocated", "ColocatedEngine", "ColocatedTurn", "Memory", "Stage"]

_SHOWN = 150

_Do = Callable[[float], object]
"""Takes the remaining seconds."""
_Step = tuple[str, _Do]


class Memory(Protocol):
    """Memory that moves to the host and back, bit for bit, such as `parallel.memory.HostMemory`.

    A call that raises an error must not change anything.
    """

    def release(self) -> object: ...

    def restore(self) -> object: ...


@dataclass(frozen=True, kw_only=True)
class ColocatedEngine:
    """Functions that drive an engine. The last argument of each function is `timeout_s`.

    Args:
        sleep: frees all device memory of the engine. The engine may lose its weights. If the engine
            sleeps already, `sleep` must do nothing.
        wake: allocates the memory of "weights" or "kv_cache", unless this memory is allocated
            already.
        update: loads the version of a receipt into the engine.
    """

    sleep: Callable[[float], object]
    wake: Callable[[str, float], object]
    update: Callable[[Receipt, float], object]


class Stage(NamedTuple):
    """One stage of a turn, and the bytes in use after it."""

    name: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class ColocatedTurn:
    """The cost of a turn on this rank.

    `version` is the version that the engine serves, or served until this turn.
    """

    version: int
    bytes_before: int
    stages: tuple[Stage, ...]

    def table(self) -> str:
        """Return a table with the seconds, the bytes in use and their change for each stage."""
        before = self.bytes_before
        lines = [f"{'stage':<14}{'seconds':>10}{'bytes in use':>18}{'change':>18}"]
        lines.append(f"{'before':<14}{'':>10}{before:>18,}")
        for stage in self.stages:
            change = f"{stage.bytes - before:+,}"
            lines.append(f"{stage.name:<14}{stage.seconds:>10.3f}{stage.bytes:>18,}{change:>18}")
            before = stage.bytes
        return "\n".join(lines)


class Colocated:
    """Alternates trainer and engine on one device.

    The first turn is the trainer's, so put the engine to sleep before you make a `Colocated`.

    Args:
        trainer: the trainer's memory on this rank.
        engine: the engine that this rank drives. None on ranks that do not drive an engine.
        publish: a function that takes a version and `timeout_s` and returns a `Receipt`, like
            `Publisher.publish`. The transport of `publish` must keep the weights in shared memory
            or on a disk, not in CUDA IPC.
        memory: a function that returns the bytes in use on the device. vLLM's memory is not in
            `torch.cuda.memory_allocated`. Return total minus free of `torch.cuda.mem_get_info`.
        group: the ranks that take turns together. The group must support gloo. None is the default
            group, if torch.distributed is initialized.

    Raises:
        UnsupportedError: the group does not support gloo.
    """

    def __init__(
        self,
        *,
        trainer: Memory,
        engine: ColocatedEngine | None,
        publish: Callable[[int, float], Receipt],
        memory: Callable[[], int],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._trainer, self._publish, self._memory = trainer, publish, memory
        nothing = ColocatedEngine(sleep=_nothing, wake=_nothing, update=_nothing)
        self._engine = nothing if engine is None else engine
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self._agreement = Messenger(world_size=ranks, group=group)
        self._in_step = True
        self._turn = "trainer"
        # Whether the trainer is away, and whether the engine, or a part of it, is awake.
        self._away = self._awake = False
        self._receipt: Receipt | None = None

    @property
    def turn(self) -> str:
        """The side that has the turn: "trainer", "engine", or "torn" after a failed undo."""
        return self._turn

    def to_engine(self, version: int, *, timeout_s: float) -> ColocatedTurn:
        """Publish, free the trainer's memory, and load the version into the engine. Collective.

        Args:
            version: the version to publish.
            timeout_s: the time limit of the turn. No stage begins after half of this time. The
                other half is reserved for undoing the stages after a failure.

        Raises:
            DeadlineError: half of `timeout_s` was used up. It is the trainer's turn again.
            TransferError: a stage failed on another rank, or a rank died. It is the trainer's turn
                again. After the death of a rank, make a new group and a new `Colocated`.
            EngineError: a stage failed, and the stages before it could not be undone. The turn is
                "torn". Restart the engine.
            UsageError: it is not the trainer's turn.
            Exception: any error of a stage or of `memory` on this rank. It is the trainer's turn
                again.
        """
        self._expect("trainer")
        receipts: list[Receipt] = []
        publish = ("publish", lambda s: receipts.append(self._publish(version, s)))
        steps = (publish, *self._engine_in(receipts))
        before, stages = self._take(steps, self._engine_out(), timeout_s)
        self._turn, self._receipt = "engine", receipts[0]
        return ColocatedTurn(version, before, stages)

    def to_trainer(self, *, timeout_s: float) -> ColocatedTurn:
        """Put the engine to sleep, and move the trainer's memory back to the device. Collective.

        If a stage fails, the engine wakes and loads its version again.

        Raises:
            Exception: the errors of `to_engine`. After an error, it is still the engine's turn,
                unless the turn is "torn".
        """
        self._expect("engine")
        receipt = self._receipt
        assert receipt is not None
        before, stages = self._take(self._engine_out(), self._engine_in([receipt]), timeout_s)
        self._turn = "trainer"
        return ColocatedTurn(receipt.version, before, stages)

    def _expect(self, turn: str) -> None:
        if self._turn != turn:
            raise UsageError(
                f"it is not the {turn}'s turn: the turn is {self._turn!r}. Call to_trainer() or "
                "to_engine() first."
            )

    # A step that was already done does nothing, so that each method also undoes the other.

    def _engine_in(self, receipts: Sequence[Receipt]) -> Sequence[_Step]:
        return (
            ("trainer away", self._release),
            ("wake weights", self._wake),
            ("update", lambda s: self._engine.update(receipts[0], s)),
            ("wake cache", lambda s: self._engine.wake("kv_cache", s)),
        )

    def _engine_out(self) -> Sequence[_Step]:
        return ("engine asleep", self._sleep), ("trainer back", self._restore)

    def _release(self, timeout_s: float) -> None:
        if not self._away:
            self._trainer.release()
            self._away = True

    def _restore(self, timeout_s: float) -> None:
        if self._away:
            self._trainer.restore()
            self._away = False

    def _wake(self, timeout_s: float) -> None:
        self._awake = True
        self._engine.wake("weights", timeout_s)

    def _sleep(self, timeout_s: float) -> None:
        if self._awake:
            self._engine.sleep(timeout_s)
            self._awake = False

    def _take(
        self, steps: Sequence[_Step], back: Sequence[_Step], timeout_s: float
    ) -> tuple[int, tuple[Stage, ...]]:
        start, self._in_step = time.monotonic(), True
        done: list[Stage] = []
        used: list[int] = []

        def measure(timeout_s: float) -> None:
            used.append(self._memory())

        try:
            for name, do in (("before", _nothing), *steps):
                begun = time.monotonic()
                left_s = start + timeout_s / 2 - begun
                late = _failing(
                    f"{name!r} was not begun: half of {timeout_s} s was over after "
                    f"{[stage.name for stage in done[1:]]}. Pass a longer timeout_s."
                )
                # The measurement is a step of its own, because ranks may share a device.
                named = (
                    (repr(name), do if left_s > 0 else late),
                    (f"memory after {name!r}", measure),
                )
                for what, step in named:
                    others = self._together(step, left_s, start + 0.75 * timeout_s)
                    if others:
                        raise TransferError(f"{what} failed on {others}. All ranks went back.")
                done.append(Stage(name, time.monotonic() - begun, used[-1]))
        except BaseException as error:
            if not isinstance(error, Exception):
                self._in_step = False  # Interrupted, so other ranks got no message.
            self._go_back(back, error, start + timeout_s)
            raise
        return done[0].bytes, tuple(done[1:])

    def _go_back(self, steps: Sequence[_Step], error: BaseException, deadline: float) -> None:
        for _, do in steps:
            try:
                left_s = max(0.0, deadline - time.monotonic())
                others = self._together(do, left_s, deadline, last=True)
            except Exception as second:
                others = _text(second)
            if others:
                self._turn = "torn"
                raise EngineError(
                    f"{_text(error)} Going back failed too: {others} Both trainer and engine may "
                    "have released their memory. Restart the engine process."
                ) from error

    def _together(self, do: _Do, left_s: float, deadline: float, *, last: bool = False) -> str:
        """Do a step on this rank, and return the failures of other ranks, if messages work."""
        met: Exception | None = None
        try:
            do(left_s)
        except Exception as error:  # The other ranks must know of any error.
            met = error
        said: list[dict[str, str]] = []
        if self._in_step:
            message = {"error": "" if met is None else _text(met)}
            try:
                said = self._agreement.exchange(message, deadline=deadline)
            except TransferError:
                self._in_step = False
                if met is None and not last:
                    raise
        if met is not None:
            raise met
        failed = [(rank, reply["error"]) for rank, reply in enumerate(said) if reply["error"]]
        return "; ".join(f"rank {rank}: {text}" for rank, text in failed)


def _nothing(*told: object) -> None:
    """Do nothing."""


def _failing(why: str) -> _Do:
    def fail(timeout_s: float) -> None:
        raise DeadlineError(why)

    return fail


def _text(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.encode("ascii", "replace").decode()[:_SHOWN].rstrip(".") + "."
