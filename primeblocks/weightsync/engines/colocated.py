"""Trainer and engine on one device: they take turns in its memory, with a sync in between.

    trainer's turn   trainer here, engine asleep, its weights may be gone
      to_engine        publish, trainer away, wake weights, update, wake cache
    engine's turn    engine awake with the new weights, trainer away
      to_trainer       engine asleep, trainer back

A turn is taken by all ranks or by none: where a stage fails, those before it are undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.distributed as dist

from ...errors import DeadlineError, EngineError, TransferError, UsageError
from ..agree import Agreement
from ..marker import Receipt

__all__ = ["Colocated", "ColocatedEngine", "Memory", "Stage", "Turn"]

_MESSAGE_BYTES = 1024
_SHOWN = 150

_Do = Callable[[float], object]
"""Takes the seconds that are left."""


class Memory(Protocol):
    """Memory that leaves the device and comes back, bit for bit: `parallel.memory.HostMemory`.

    A call that raises has changed nothing.
    """

    def release(self) -> object:
        """Free the device."""
        ...

    def restore(self) -> object:
        """Take it again."""
        ...


@dataclass(frozen=True, kw_only=True)
class ColocatedEngine:
    """Calls that drive an engine. The last argument of each is the `timeout_s` it has to keep.

    Args:
        sleep: give all device memory back; weights may be lost. Does nothing if asleep.
        wake: take the memory of "weights" or of "kv_cache" again. Does nothing if awake.
        update: load what was published.
    """

    sleep: Callable[[float], object]
    wake: Callable[[str, float], object]
    update: Callable[[Receipt, float], object]


class Stage(NamedTuple):
    """One stage of a turn, and the bytes that were in use when it was done."""

    name: str
    seconds: float
    bytes: int


class _Step(NamedTuple):
    """A stage to be done. `undo`: in order, if it was done, or was only begun and is `half`."""

    name: str
    do: _Do
    undo: tuple[_Do, ...] = ()
    half: bool = False


@dataclass(frozen=True)
class Turn:
    """Cost of a turn on this rank. `version` is the one that the engine serves, or served."""

    version: int
    bytes_before: int
    stages: tuple[Stage, ...]

    def table(self) -> str:
        """Return one line a stage: seconds, bytes in use after it, and the change."""
        before = self.bytes_before
        lines = [f"{'stage':<14}{'seconds':>10}{'bytes in use':>18}{'change':>18}"]
        lines.append(f"{'before':<14}{'':>10}{before:>18,}")
        for stage in self.stages:
            change = f"{stage.bytes - before:+,}"
            lines.append(f"{stage.name:<14}{stage.seconds:>10.3f}{stage.bytes:>18,}{change:>18}")
            before = stage.bytes
        return "\n".join(lines)


class Colocated:
    """Turns of trainer and engine. The first is the trainer's: put the engine to sleep before it.

    Args:
        trainer: the trainer's memory on this rank.
        engine: on the ranks that drive one; None on the others.
        publish: version, timeout_s -> Receipt: `Publisher.publish`. It runs while the trainer is
            here and the engine is not, so its transport must hold the weights elsewhere: shared
            memory or a disk, not CUDA IPC.
        memory: bytes in use on the device, such as `torch.cuda.memory_allocated`; read between
            stages.
        group: the ranks that take turns together; needs gloo. None is the default group, or no
            group at all for one rank.

    Raises:
        UnsupportedError: the group has no gloo.
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
        self._agreement = Agreement(world_size=ranks, group=group)
        self._in_step = True
        self._turn = "trainer"
        self._receipt: Receipt | None = None

    @property
    def turn(self) -> str:
        """The side whose turn it is: "trainer", "engine", or "torn" after a failure not undone."""
        return self._turn

    def to_engine(self, version: int, *, timeout_s: float) -> Turn:
        """Publish, make room, load, serve. Collective.

        Args:
            timeout_s: half is for the way there; no stage begins after it. The rest is for undoing.

        Raises:
            DeadlineError: half of the time was used up. It is the trainer's turn again.
            TransferError: a stage failed on another rank, or a rank died. It is the trainer's turn
                again; after a death make a new group and a new Colocated.
            EngineError: going back failed too, and the turn is "torn": restart the engine.
            UsageError: it is not the trainer's turn.
            Exception: whatever a stage raised on this rank. It is the trainer's turn again.
        """
        self._expect("trainer")
        receipts: list[Receipt] = []
        steps = (
            _Step("publish", lambda s: receipts.append(self._publish(version, s))),
            _Step("trainer away", self._release, (self._restore,)),
            _Step("wake weights", lambda s: self._engine.wake("weights", s), (self._sleep,), True),
            _Step("update", lambda s: self._engine.update(receipts[0], s)),
            _Step("wake cache", lambda s: self._engine.wake("kv_cache", s)),
        )
        before, stages = self._take(steps, timeout_s)
        self._turn, self._receipt = "engine", receipts[0]
        return Turn(version, before, stages)

    def to_trainer(self, *, timeout_s: float) -> Turn:
        """Put the engine to sleep and bring the trainer back. Collective.

        Where a stage fails, the engine wakes and loads again what it served.

        Raises:
            Exception: as `to_engine`, with the turns exchanged.
        """
        self._expect("engine")
        receipt = self._receipt
        assert receipt is not None
        serve: tuple[_Do, ...] = (
            lambda s: self._engine.wake("weights", s),
            lambda s: self._engine.update(receipt, s),
            lambda s: self._engine.wake("kv_cache", s),
        )
        steps = (
            # An engine that failed to fall asleep may have lost its weights.
            _Step("engine asleep", self._sleep, serve, half=True),
            _Step("trainer back", self._restore, (self._release,)),
        )
        before, stages = self._take(steps, timeout_s)
        self._turn = "trainer"
        return Turn(receipt.version, before, stages)

    def _expect(self, turn: str) -> None:
        if self._turn != turn:
            raise UsageError(f"it is not the {turn}'s turn: the turn is {self._turn!r}.")

    def _take(self, steps: Sequence[_Step], timeout_s: float) -> tuple[int, tuple[Stage, ...]]:
        """Do all steps in step with other ranks, or undo them backwards on all."""
        start, before, self._in_step = time.monotonic(), self._memory(), True
        done: list[Stage] = []
        # As long on every rank, so that ranks undo in step too.
        undo: list[tuple[_Do, ...]] = []
        try:
            for step in steps:
                done.append(self._stage(step, done, undo, start, timeout_s))
        except BaseException as error:
            if not isinstance(error, Exception):
                self._in_step = False  # Interrupted: the others were not told.
            self._go_back(undo, error, start + timeout_s)
            raise
        return before, tuple(done)

    def _stage(
        self,
        step: _Step,
        done: Sequence[Stage],
        undo: list[tuple[_Do, ...]],
        start: float,
        timeout_s: float,
    ) -> Stage:
        """Do a step here, then hear the outcome elsewhere."""
        begun = time.monotonic()
        error: Exception | None = None
        undo.append(step.undo if step.half else ())
        try:
            left_s = start + timeout_s / 2 - begun
            if left_s <= 0:
                raise DeadlineError(
                    f"{step.name!r} was not begun: half of {timeout_s} s was over after "
                    f"{[stage.name for stage in done]}."
                )
            step.do(left_s)
        except Exception as met:  # Whatever it is, the other ranks have to know.
            error = met
        else:
            undo[-1] = step.undo
        others = self._tell(error, start + 0.75 * timeout_s, last=False)
        if error is not None:
            raise error
        if others:
            raise TransferError(f"{step.name!r} failed on {others}. All ranks went back.")
        return Stage(step.name, time.monotonic() - begun, self._memory())

    def _go_back(
        self, undo: Sequence[tuple[_Do, ...]], error: BaseException, deadline: float
    ) -> None:
        for calls in reversed(undo):
            met: Exception | None = None
            try:
                for call in calls:
                    call(max(0.0, deadline - time.monotonic()))
            except Exception as second:  # Told to the other ranks, then raised.
                met = second
            others = self._tell(met, deadline, last=True)
            if met is not None or others:
                self._turn = "torn"
                raise EngineError(
                    f"{_text(error)} Going back failed too: {others or _text(met)} Trainer and "
                    "engine may both be away: restart the engine."
                ) from error

    def _tell(self, error: BaseException | None, deadline: float, *, last: bool) -> str:
        """Return the failures of other ranks; nothing once the ranks are out of step."""
        if not self._in_step:
            return ""
        message = {"error": "" if error is None else _text(error)}
        try:
            said = self._agreement.exchange(message, size_bytes=_MESSAGE_BYTES, deadline=deadline)
        except TransferError:
            self._in_step = False
            if error is None and not last:
                raise
            return ""
        met = [(rank, reply["error"]) for rank, reply in enumerate(said) if reply["error"]]
        return "; ".join(f"rank {r}: {text}" for r, text in met if r != self._agreement.rank)

    def _release(self, timeout_s: float) -> None:
        self._trainer.release()

    def _restore(self, timeout_s: float) -> None:
        self._trainer.restore()

    def _sleep(self, timeout_s: float) -> None:
        self._engine.sleep(timeout_s)


def _nothing(*told: object) -> None:
    """Do nothing, on a rank without an engine."""


def _text(error: BaseException | None) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.encode("ascii", "replace").decode()[:_SHOWN].rstrip(".") + "."
