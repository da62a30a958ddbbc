"""marin's sweep over staleness on 40 H100, simulated: two fitted numbers, ten rows; a minute.

Measured there (marin-community/marin #8955, 15 and 16 September 2026): 100 updates of a 67B model,
32 GPUs train and 8 generate, one run a row. Their loop throws groups away that exceed the bound.
Two numbers are fitted to the rows 0, 1 and 4 of the branch; the other seven rows and the share of
groups that each discards ("about a fifth") are foretold with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from primeblocks.async_loop import StalenessPolicy
from primeblocks.planning import (
    EngineModel,
    Simulation,
    Workload,
    decode_latency,
    lognormal,
    simulate,
)

__all__ = ["BRANCH", "STOCK", "Row", "run"]

UPDATES = 100
CORRECTION = "behaviour clip"

# Two truncation shares of their pilots on this model and these GPUs (#8936): 14.6 % of answers are
# longer than 2,048 tokens, 3.6 % than 4,096. A lognormal through both: sigma 0.93, mean 1,185.
TOKENS = lognormal(mean=1185, sigma=0.93, maximum=4096)
SAMPLES = 4
# Groups: 3,200 answers in 25 updates of the pilots. The sweep's are not stated; 128, the default
# of a later entry point (#9256), would train 31.6 s at the pilots' pace, above 29.4 s a step.
BATCH = 32
TRAIN_S = 7.9  # 21.9 % of 866.5 s in 24 updates of the pilots
ENGINES = 8

# Fitted to the rows 0, 1 and 4 of the branch by least squares of the logarithms: seconds of a
# decode step, and more of it for each request that runs.
STEP_S, REQUEST_S = 0.0072, 0.00107


@dataclass(frozen=True)
class Row:
    """A measured run.

    Args:
        bound: the staleness that was allowed.
        seconds: of 100 updates.
        workers: groups in flight.
        publish_s: of an update.
        pause_s: of these, in which engines stand still.
    """

    bound: int
    seconds: float
    workers: int
    publish_s: float
    pause_s: float


# The branch: 3.1 to 3.6 s for the way of the weights, 0.1 s of pause.
BRANCH = tuple(
    Row(bound, seconds, 192, 3.3, 0.1)
    for bound, seconds in enumerate((6235.0, 4360.0, 3544.0, 3142.0, 2942.0))
)
# Before it: the time spent in weight copies is reported for each row, and for a smaller model that
# 100.55 of 147.40 s of it stop the engines. The row of 3 is the one that was run again (16
# September): the first, of 4,913 s, collapsed at update 60, and their table has 4,754 s since.
STOCK = tuple(
    Row(bound, seconds, 64, copies / UPDATES, copies / UPDATES * 100.55 / 147.40)
    for bound, (seconds, copies) in enumerate(
        [(8524.0, 2141.0), (5583.0, 2068.0), (5093.0, 2092.0), (4754.0, 2096.0), (4301.0, 2066.0)]
    )
)


def run(row: Row, *, on_stale: str = "drop", seed: int = 17) -> Simulation:
    """Simulate a row."""
    return simulate(
        Workload(TOKENS, samples=SAMPLES),
        engines=[EngineModel(decode_latency(step_s=STEP_S, request_s=REQUEST_S))] * ENGINES,
        train_s=TRAIN_S,
        publish_s=row.publish_s,
        pause_s=row.pause_s,
        staleness=StalenessPolicy(row.bound, on_stale, correction=CORRECTION),
        batch_size=BATCH,
        max_in_flight=row.workers,
        steps=UPDATES,
        seed=seed,
    )


if __name__ == "__main__":
    for name, rows in (("branch", BRANCH), ("stock", STOCK)):
        for row in rows:
            for on_stale in ("drop", "pace", "wait"):
                found = run(row, on_stale=on_stale)
                thrown = found.dropped / (found.dropped + UPDATES * BATCH)
                print(
                    f"{name:<7}{row.bound}  {on_stale:<5}{row.seconds:7.0f}{found.total_s:8.0f} s"
                    f"{found.total_s / row.seconds - 1:+8.1%}  dropped {thrown:5.1%}  lag"
                    f" {found.lag:.2f} idle {found.trainer_idle:.2f}"
                )
