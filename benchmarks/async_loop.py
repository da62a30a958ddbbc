"""The loop: what it costs, what it reaches of the possible, how well its age is foretold.

`python -m benchmarks.async_loop` from the repository; some minutes on two cores. Runs with a real
vLLM are a benchmark of their own, `benchmarks.engine.async_runs`.

- Microseconds that loop, buffer and scheduler take for a rollout, over 100k rollouts, and the
  memory that is left of them.
- Rollouts from another process over ZeroMQ, beside pyzmq alone, by size.
- In virtual time, without a wall-clock: marin's sweep over staleness, the throughput of simulated
  loops over the bound of `plan_split`.
- Log-probabilities from hidden states and head beside the plain computation: memory, time.
- Imbalance of packing over 8 and 32 ranks on 1,000 batches, beside peers' where verl is installed.
- Bytes of a rollout of 131,072 tokens with routes, beside what prime-rl reported of theirs.
- Tokens that a trainer gets wrong who tokenises chats anew, and those of recorded rollouts.
- Latency that recording an agent's calls adds, with 1,000 sessions at a time.
"""

from .harness import main


def measure() -> dict[str, tuple[float, str, str]]:
    from .async_loop_parts import (
        buffer,
        capture,
        conversation,
        logprobs,
        overhead,
        packing,
        simulated,
        token_drift,
    )

    parts = (overhead, buffer, simulated, logprobs, packing, conversation, token_drift, capture)
    return {name: figure for part in parts for name, figure in part.figures().items()}


if __name__ == "__main__":
    main(measure)
