"""The real loop in virtual time, with engines and a trainer made of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from ..buffer import RolloutBuffer
from ..loop import AsyncLoop
from ..scheduler import Retries
from ..staleness import StalenessPolicy
from .engine import EngineModel
from .result import Simulation
from .virtual import VirtualClock, run_in_virtual_time
from .world import Seconds, Workload, World

__all__ = ["simulate"]

_NEVER_S = 1e12  # deadlines are not what is simulated


def simulate(
    workload: Workload,
    *,
    engines: Sequence[EngineModel],
    train_s: Seconds,
    staleness: StalenessPolicy,
    batch_size: int,
    max_in_flight: int,
    publish_s: float = 0.0,
    pause_s: float = 0.0,
    send_s: float = 0.0,
    by_sample: bool = False,
    capacity: int | None = None,
    retries: Retries | None = None,
    steps: int = 100,
    settle: int = 0,
    seed: int = 0,
) -> Simulation:
    """Run `AsyncLoop` itself, buffer and scheduler too, for `steps` steps of virtual time. Local.

    A prompt's samples depend on `seed`, its ordinal and the attempt alone, so that runs with other
    limits see the same prompts. Not from inside a coroutine of the same thread.

    Args:
        engines: requests go to the one with the fewest (`LeastLoaded`).
        train_s: seconds of a step, a distribution of them, or a callable of the batch's tokens.
        staleness: the loop's policy.
        batch_size: groups in a step.
        max_in_flight: requests at a time: groups, or samples with `by_sample`.
        publish_s: seconds after a step that trainer waits, until engines have the new weights.
        pause_s: of these the last, in which engines stand still.
        send_s: seconds more until engines have them, while the next step trains already.
        by_sample: ask for samples one at a time (`group_size`), not for whole groups.
        capacity: groups that the buffer holds; default: what may wait within the bound.
        retries: of samples that fail.
        settle: first steps that averages leave out.

    Raises:
        UsageError: no engine or step, or `pause_s` is longer than `publish_s`.
    """
    if not engines or not 0 <= settle < steps or not 0 <= pause_s <= publish_s or send_s < 0:
        raise UsageError(
            f"needs an engine, settle < steps, pause_s <= publish_s and send_s >= 0; got "
            f"{len(engines)} engines, {settle} and {steps}, {pause_s}, {publish_s} and {send_s} s"
        )
    world = World(workload, engines, train_s, (publish_s - pause_s, pause_s, send_s), seed)
    clock = VirtualClock()
    if capacity is None:
        capacity = (staleness.max_off_policy_steps + 1) * batch_size

    async def main() -> Simulation:
        world.open()
        loop = AsyncLoop(
            prompts=world.prompts(),
            generate=world.generate,
            train=world.train,
            publish=world.publish,
            buffer=RolloutBuffer(capacity=capacity, staleness=staleness, clock=clock),
            batch_size=batch_size,
            max_in_flight=max_in_flight,
            group_size=workload.samples if by_sample else None,
            retries=retries,
            step_timeout_s=_NEVER_S,
            clock=clock,
        )
        async with loop:
            records = [world.record(step) async for step in loop.steps(steps)]
        return world.result(records, settle)

    return run_in_virtual_time(main())
