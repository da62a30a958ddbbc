"""Trainer and engine on one device: they take turns in its memory, with a sync in between.

    trainer's turn   trainer here, engine asleep, its weights may be gone
      to_engine        publish, trainer away, wake weights, update, wake cache
    engine's turn    engine awake with the new weights, trainer away
      to_trainer       engine asleep, trainer back

A turn is taken by all ranks or by none: where a stage fails, those before it are undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from ...errors import UsageError
from ..agree import Agreement
from ..marker import Receipt
from .stages import Stage, Stages

__all__ = ["Colocated", "ColocatedEngine", "Memory", "Turn"]


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
        self._trainer, self._engine = trainer, engine
        self._publish, self._memory = publish, memory
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self._agreement = Agreement(world_size=ranks, group=group)
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
        with Stages(self._agreement, self._memory, self._tear, timeout_s) as run:
            receipt: Receipt = run.stage("publish", lambda s: self._publish(version, s))
            run.stage("trainer away", lambda s: self._trainer.release(), undo=self._restore)
            run.undo.append(self._sleep)
            run.stage("wake weights", lambda s: self._wake("weights", s))
            run.stage("update", lambda s: self._update(receipt, s))
            run.stage("wake cache", lambda s: self._wake("kv_cache", s))
        self._turn, self._receipt = "engine", receipt
        return Turn(version, run.bytes_before, tuple(run.stages))

    def to_trainer(self, *, timeout_s: float) -> Turn:
        """Put the engine to sleep and bring the trainer back. Collective.

        Where a stage fails, the engine wakes and loads again what it served.

        Raises:
            Exception: as `to_engine`, with the turns exchanged.
        """
        self._expect("engine")
        receipt = self._receipt
        assert receipt is not None
        with Stages(self._agreement, self._memory, self._tear, timeout_s) as run:
            # Undone backwards. An engine that failed to fall asleep may have lost its weights.
            run.undo.append(lambda s: self._wake("kv_cache", s))
            run.undo.append(lambda s: self._update(receipt, s))
            run.undo.append(lambda s: self._wake("weights", s))
            run.stage("engine asleep", self._sleep)
            run.stage("trainer back", self._restore, undo=lambda s: self._trainer.release())
        self._turn = "trainer"
        return Turn(receipt.version, run.bytes_before, tuple(run.stages))

    def _expect(self, turn: str) -> None:
        if self._turn != turn:
            raise UsageError(f"it is not the {turn}'s turn: the turn is {self._turn!r}.")

    def _tear(self) -> None:
        self._turn = "torn"

    def _restore(self, timeout_s: float) -> None:
        self._trainer.restore()

    def _sleep(self, timeout_s: float) -> None:
        if self._engine is not None:
            self._engine.sleep(timeout_s)

    def _wake(self, part: str, timeout_s: float) -> None:
        if self._engine is not None:
            self._engine.wake(part, timeout_s)

    def _update(self, receipt: Receipt, timeout_s: float) -> None:
        if self._engine is not None:
            self._engine.update(receipt, timeout_s)
