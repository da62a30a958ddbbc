"""The result of `plan_split`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Side", "SplitPlan"]


@dataclass(frozen=True)
class Side:
    """One side of a loop.

    Args:
        gpus: in use.
        degree: GPUs of a replica.
        micro_batch: samples that a replica takes at a time.
        running: samples of all replicas at a time, of which there may not be enough.
        step_s: seconds for a batch of the loop, without a wait.
        gpu_bytes: memory of a GPU.
    """

    gpus: int
    degree: int
    micro_batch: int
    running: float
    step_s: float
    gpu_bytes: float

    @property
    def replicas(self) -> int:
        return self.gpus // self.degree


@dataclass(frozen=True)
class SplitPlan:
    """GPUs for the trainer and for the engine, and what that brings.

    Args:
        gpus: all of them.
        trainer: its side.
        engine: its side.
        tail_s: seconds of an asynchronous step in which slow samples are there in time, however
            many the engine runs; an estimate. A larger bound on staleness makes it shorter.
        together_s: seconds of a synchronous step on all GPUs in turn; infinite where both do not
            fit on them.
        apart_s: seconds of a synchronous step on the two groups of GPUs in turn.
        no_tail_s: `together_s` if no sample were longer than another.
        free_s: `no_tail_s` if each side had all the memory.
        bound_s: the same with fractions of GPUs and as many samples as wanted: the bound of
            LlamaRL, which no asynchronous step beats.
        publish_s: seconds that the trainer waits for the engine; part of all of them.
        lag: mean optimizer steps from the submission of a group to its training.
        worth: the gain from which on it is worth it.
    """

    gpus: int
    trainer: Side
    engine: Side
    tail_s: float
    together_s: float
    apart_s: float
    no_tail_s: float
    free_s: float
    bound_s: float
    publish_s: float
    lag: float
    worth: float

    def __repr__(self) -> str:
        return (
            f"<SplitPlan: {self.trainer.gpus} + {self.engine.gpus} of {self.gpus} GPUs, "
            f"{self.gain:.2f} x>"
        )

    @property
    def theta(self) -> float:
        """The trainer's share of the GPUs in use."""
        return self.trainer.gpus / (self.trainer.gpus + self.engine.gpus)

    @property
    def async_s(self) -> float:
        """Seconds of an asynchronous step: of the slower side, or until slow samples are there."""
        return max(self.trainer.step_s + self.publish_s, self.engine.step_s, self.tail_s)

    @property
    def sync_s(self) -> float:
        """Seconds of a step of the faster synchronous loop."""
        return min(self.together_s, self.apart_s)

    @property
    def gain(self) -> float:
        """The speed-up over the faster synchronous loop."""
        return self.sync_s / self.async_s

    @property
    def worth_it(self) -> bool:
        """Whether the gain reaches `worth`."""
        return self.gain >= self.worth

    @property
    def bound(self) -> str:
        """The slower side, "trainer" or "generation"; "balanced" within 5 %.

        "staleness" where neither is, and slow samples are waited for.
        """
        trains, generates = self.trainer.step_s + self.publish_s, self.engine.step_s
        if self.tail_s > 1.05 * max(trains, generates):
            return "staleness"
        if abs(trains - generates) <= 0.05 * max(trains, generates):
            return "balanced"
        return "trainer" if trains > generates else "generation"

    @property
    def reason(self) -> str:
        """The causes of the gain, or of its absence."""
        causes = self._causes()
        if self.worth_it:
            return "; ".join(causes) if causes else "the two sides overlap"
        trains, generates = self.trainer.step_s + self.publish_s, self.engine.step_s
        text = {
            "generation": "generation-bound",
            "trainer": "trainer-bound",
            "balanced": "both sides are busy",
            "staleness": f"slow samples take {self.tail_s:.4g} s a step, a larger bound less",
        }[self.bound]
        shortest = min(trains, generates)
        text += f": {generates:.4g} s to generate, {trains:.4g} s to train and publish"
        if self.sync_s == self.apart_s:
            return f"{text}; overlap hides {shortest / self.apart_s:.0%} of a step at most"
        text += f"; all {self.gpus} GPUs in turn take {self.together_s:.4g} s"
        if not causes:
            text += ", for memory does not bind and no sample is waited for"
        return text

    def _causes(self) -> list[str]:
        causes = []
        if self.together_s == float("inf"):
            causes.append(f"both sides together do not fit on {self.gpus} GPUs")
            tail = self.apart_s / (self.trainer.step_s + self.publish_s + self.engine.step_s)
        else:
            tail = self.together_s / self.no_tail_s
            if (memory := self.no_tail_s / self.free_s) > 1.02:
                causes.append(f"memory binds where both sides share GPUs ({memory:.2f} x)")
        if tail > 1.02:
            causes.append(f"a synchronous batch waits for its longest samples ({tail:.2f} x)")
        return causes

    def table(self) -> str:
        """Return the plan as text: a line a side, a line a way to run it."""
        lines = ["side      GPUs  degree  replicas  micro-batch  GB a GPU  s a batch"]
        for name, side in (("trainer", self.trainer), ("engine", self.engine)):
            lines.append(
                f"{name:<8}{side.gpus:>6}{side.degree:>8}{side.replicas:>10}{side.micro_batch:>13}"
                f"{side.gpu_bytes / 1e9:>10.1f}{side.step_s:>11.4g}"
            )
        lines.append("")
        for name, seconds in (
            ("asynchronous", self.async_s),
            ("  of it until slow samples are there", self.tail_s),
            ("synchronous, all GPUs in turn", self.together_s),
            ("synchronous, each side its GPUs", self.apart_s),
            ("bound: free memory, no tail", self.bound_s),
        ):
            lines.append(f"{name:<37}{seconds:>11.4g} s a step")
        verdict = "worth it" if self.worth_it else "an asynchronous loop will not help"
        lines += [
            "",
            f"theta {self.theta:.3f}, mean lag {self.lag:.2f} steps",
            f"gain {self.gain:.2f} x: {verdict}",
            self.reason,
        ]
        return "\n".join(lines)
