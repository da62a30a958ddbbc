"""Write the log, the picture and the table of `reasoning_gym_grpo.py`.

python examples/async_grpo/curve.py FROM.json TO.svg
"""

import json
import statistics
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from primeblocks.async_loop import Step

COLORS = ("#1f77b4", "#d95f02")
LAST = 10  # steps


class Log:
    """A log file with one line per step. A resumed run first deletes lines of steps it repeats."""

    def __init__(self, path: Path, *, first: int, version: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [each for each in lines(path) if each["version"] <= version]
        path.write_text("".join(f"{json.dumps(each)}\n" for each in kept))
        self.path = path
        if version > first:
            self.write(version=version, resumed=True)

    def write(self, **record) -> dict:
        with self.path.open("a") as file:
            print(json.dumps(record), file=file)
        return record

    def write_step(self, step: Step, mismatch: tuple | None) -> dict:
        """Log a step. `mismatch`: k3 without replay, k3 with replay, and share of equal routes."""
        rollouts = [rollout for group in step.groups for rollout in group.rollouts]
        return self.write(
            version=step.version,
            reward=statistics.mean(rollout.reward for rollout in rollouts),
            solved=statistics.mean(rollout.reward == 1.0 for rollout in rollouts),
            calls=statistics.mean(rollout.attachments["calls"] for rollout in rollouts),
            k3=step.metrics["k3"],
            ess=step.metrics["ess"],
            tokens=step.metrics["tokens"],
            staleness=max(step.staleness),
            at_s=round(time.monotonic(), 2),
            **({} if mismatch is None else {"mismatch": mismatch}),
        )


def lines(path: Path) -> list[dict]:
    """Return the records of a log. Ignore an incomplete last line, which a kill can cause."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def draw(summary: dict, path: Path) -> None:
    """Draw solved questions and mismatch by step, one line per run. Dotted lines mark resumes."""
    plt.rcParams.update({"svg.hashsalt": "primeblocks", "svg.fonttype": "none"})
    fig, (above, below) = plt.subplots(
        2, figsize=(7, 5.5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    for color, (name, log) in zip(COLORS, summary["arms"].items(), strict=True):
        steps = [each for each in log if "reward" in each]
        first = log[0]["version"]
        at = [each["version"] - first for each in steps]
        solved = [each["solved"] for each in steps]
        above.plot(at, solved, color=color, alpha=0.25, linewidth=1)
        above.plot(at, _smooth(solved), color=color, label=name)
        ends = [each for each in log if "solved_greedily" in each]
        above.plot(
            [each["version"] - first for each in ends],
            [each["solved_greedily"] for each in ends],
            "o",
            color=color,
            label=f"{name}, held out, greedy",
        )
        below.semilogy(at, _smooth([each["k3"] for each in steps]), color=color, label=name)
        for each in log:
            if "resumed" in each:
                for axes in (above, below):
                    axes.axvline(each["version"] - first, color=color, linestyle=":")
    above.set(title="Equations solved with the calculator", ylabel="share of episodes", ylim=(0, 1))
    below.set(xlabel="optimizer step", ylabel="k3 of the batch, nats per token")
    above.legend(loc="upper left", fontsize="small")
    below.legend(fontsize="small")
    fig.savefig(path, metadata={"Date": None})


def table(summary: dict) -> str:
    """Return the results of each run as text."""
    rows = []
    for name, log in summary["arms"].items():
        steps = [each for each in log if "reward" in each]
        resumed = [each["version"] - log[0]["version"] for each in log if "resumed" in each]
        greedy = [each["solved_greedily"] for each in log if "solved_greedily" in each]
        mismatch = [each["mismatch"] for each in steps if "mismatch" in each]
        without, imposed, agree = (statistics.mean(part) for part in zip(*mismatch, strict=True))
        rows.append(
            f"{name}: {len(steps)} steps, killed after step {summary['killed_after'][name]}, "
            f"resumed from {resumed}\n"
            f"  solved in the first and the last {LAST} steps {_ends(steps, 'solved')}; held-out "
            f"questions, greedy {greedy[0]:.3f}, {greedy[-1]:.3f}; calls {_ends(steps, 'calls')}\n"
            f"  k3 while training {statistics.mean(each['k3'] for each in steps):.2e}; k3 at one "
            f"version {without:.2e} without replay, {imposed:.2e} with; routes agree {agree:.4f}"
        )
    return "\n".join([*rows, f"{summary['seconds']:.0f} s"])


def _ends(steps: list[dict], name: str) -> str:
    parts = steps[:LAST], steps[-LAST:]
    return ", ".join(f"{statistics.mean(each[name] for each in part):.3f}" for part in parts)


def _smooth(values: list[float], share: float = 0.2) -> list[float]:
    """An exponential moving average."""
    smooth, last = [], values[0]
    for value in values:
        last += share * (value - last)
        smooth.append(last)
    return smooth


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
