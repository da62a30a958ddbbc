"""Write the table and the plots at the end of a run."""

import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from primeblocks import async_loop

COURSE = ("version", "at_s", "reward", "ess", "k3")


def record_of(step: async_loop.Step, *, at_s: float) -> dict:
    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    return {
        "version": step.version,
        "at_s": at_s,
        "ess": step.metrics["ess"],
        "k3": step.metrics["k3"],
        "positions_computed": step.metrics["positions_computed"],
        "reward": statistics.mean(rollout.reward for rollout in rollouts),
        "versions": {int(version) for rollout in rollouts for version in rollout.versions},
        "staleness": step.staleness,
        "dropped": step.dropped,
        "seconds": (step.trainer_idle_s, step.train_s, step.publish_s),
    }


def report(summary: dict, history: list[dict], probes: list[tuple], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    course = [{name: record[name] for name in COURSE} for record in history]
    (out / "history.json").write_text(json.dumps(course) + "\n")

    def figure(name: str, title: str, x: str, y: str):
        fig, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        axes.set(title=title, xlabel=x, ylabel=y)
        return fig, axes, out / f"{name}.png"

    fig, axes, path = figure("reward", "Reward", "optimizer step", "mean reward")
    steps = [record["version"] - 1 for record in history]
    axes.plot(steps, [r["reward"] for r in history], label="training batch")
    ends = [summary["reward_before"], summary["reward_after"]]
    axes.plot([steps[0] - 1, steps[-1]], ends, "o", label="held out, greedy")
    axes.legend()
    fig.savefig(path)
    fig, axes, path = figure("mismatch_kl", "Engine against trainer", "version", "k3 (nats/token)")
    for column, label in ((1, "without replay"), (2, "with replay")):
        axes.semilogy([p[0] for p in probes], [p[column] for p in probes], "o-", label=label)
    axes.legend()
    fig.savefig(path)
    fig, axes, path = figure("staleness", "Staleness", "optimizer steps", "groups")
    ages = [age for record in history for age in record["staleness"]]
    axes.hist(
        ages, bins=[age - 0.5 for age in range(summary["max_off_policy_steps"] + 2)], rwidth=0.8
    )
    axes.set_xticks(range(summary["max_off_policy_steps"] + 1))
    fig.savefig(path)
    fig, axes, path = figure("time", "Where the trainer's time went", "optimizer step", "seconds")
    parts = list(zip(*(record["seconds"] for record in history), strict=True))
    axes.stackplot(steps, parts, labels=("waiting", "training", "publishing"))
    axes.legend()
    fig.savefig(path)
    width = max(map(len, summary))
    for key, value in summary.items():
        print(
            f"{key:<{width}}  {value:.6g}"
            if isinstance(value, float)
            else f"{key:<{width}}  {value}"
        )
