"""Plan a run before you pay for it: 256 rollouts of up to 131k tokens per step on 28 nodes.

    python examples/plan_a_run.py

The script prints how many GPUs the trainer and the engines get. The script also simulates the
training loop in virtual time, and prints the throughput, the lag and the memory of the loop. The
script also prints how much longer a synchronous loop takes. The plan assumes that all rollouts have
the same length, but the simulation can have a few long rollouts. Replace the constants by your own
measurements. MEASURED marks values that other projects published, and ASSUMED marks values that
were not measured.
"""

from tqdm import tqdm

from primeblocks.async_loop import StalenessPolicy
from primeblocks.planning import (
    CostTable,
    Distribution,
    EngineModel,
    Simulation,
    SplitPlan,
    Workload,
    constant,
    lognormal,
    plan_split,
    simulate,
)

NODES, GPUS_A_NODE = 28, 8  # prime-rl 0.6.0: GLM-5.1, "28 H200 nodes, < 5 min a step"
MEMORY_BYTES = 141e9  # H200, data sheet
ROLLOUTS, SAMPLES = 256, 16  # a step, as published; ASSUMED: groups of 16
CONTEXT = 131_072
BOUND = 8  # max_off_policy_steps in prime-rl's example
STEPS = 60

# MEASURED (prime-rl #2130): prime-rl's GLM-5 trainer trains on 17,150 tokens per second.
# ASSUMED: on 16 nodes, as in prime-rl's example, with replicas of 32 GPUs (context 4 x expert 8).
TRAINER_GPUS, TRAINER_TOKENS_PER_S, TRAINER_DEGREE = 128, 17_150, 32
PARAMETERS = 744e9  # GLM-5, of which 40e9 are active
TRAINER_BYTES = 14 * PARAMETERS  # bf16 weights and gradients, float32 master weights, bf16 moments
TRAINER_SHARDS = 4  # ASSUMED: FSDP shards these bytes over all replicas
ACTIVATION_BYTES = 32 * 40e9  # ASSUMED: of one rollout of 131k tokens, with checkpointing

# ASSUMED: an engine of 16 GPUs in fp8. A decode step reads the weights, and for each request keys
# and latents at half of the context, at half of 4.8e12 bytes/s a GPU (data sheet).
ENGINE_DEGREE, ENGINE_BYTES_PER_S = 16, 16 * 4.8e12 / 2
KV_BYTES_A_TOKEN = 78 * (576 + 128)  # 78 layers, a latent and an indexer key, one byte each
READ_BYTES = 78 * (CONTEXT / 2 * 128 + 2048 * 576)  # all indexer keys, 2,048 chosen latents
DECODE_OVERHEAD_S = 0.015  # ASSUMED: communication and launches
PUBLISH_S = 8.5  # MEASURED by others, elsewhere: GLM-5 from 32 to 32 nodes of H100, miles

LENGTHS = {
    # ASSUMED: with this mean 256 rollouts train in less than 5 minutes, as published.
    "long tail": lognormal(mean=18_000, sigma=1.0, maximum=CONTEXT),
    "all as long as the context": constant(CONTEXT),
}


def decode_s(requests: int) -> float:
    """Return the seconds that one engine needs for a decode step."""
    return DECODE_OVERHEAD_S + (PARAMETERS + requests * READ_BYTES) / ENGINE_BYTES_PER_S


def costs(lengths: Distribution) -> tuple[CostTable, CostTable]:
    """Return the costs of a sample in the trainer and in an engine."""
    sample_s = lengths.mean / TRAINER_TOKENS_PER_S * TRAINER_GPUS / TRAINER_DEGREE
    trainer = CostTable(
        {(1, TRAINER_DEGREE): sample_s},
        weight_bytes=TRAINER_BYTES / TRAINER_SHARDS,
        sample_bytes=ACTIVATION_BYTES,
    )
    requests = (1, 8, 16, 32, 64, 128)
    engine = CostTable(
        {(n, ENGINE_DEGREE): decode_s(n) * lengths.mean / n for n in requests},
        weight_bytes=PARAMETERS,
        sample_bytes=KV_BYTES_A_TOKEN * CONTEXT,
    )
    return trainer, engine


def run(plan: SplitPlan, lengths: Distribution, bound: int) -> Simulation:
    """Simulate the training loop on the GPUs of the plan."""
    most = plan.engine.micro_batch
    with tqdm(total=STEPS, desc=f"bound {bound}", unit="step", leave=False) as bar:
        return simulate(
            Workload(lengths, samples=SAMPLES),
            engines=[EngineModel(lambda n: n / decode_s(n), max_running=most)]
            * plan.engine.replicas,
            train_s=plan.trainer.step_s,
            publish_s=plan.publish_s,
            # The plan assumes a trainer that does not wait for slow groups.
            staleness=StalenessPolicy(bound, "pace", "truncated importance sampling"),
            batch_size=ROLLOUTS // SAMPLES,
            max_in_flight=most * plan.engine.replicas,
            by_sample=True,
            steps=STEPS,
            settle=STEPS // 3,
            progress=lambda done, _: bar.update(done - bar.n),
        )


def report(plan: SplitPlan, found: Simulation, synchronous: Simulation, mean: float) -> str:
    # Bytes per token of a rollout: 4 for the id, 4 for the log-probability, 8 for the version.
    held = (found.lag + 1) * ROLLOUTS * mean * 16
    return (
        f"\n{found.table()}\n"
        f"{'tokens a second':<16} {found.trained_tokens.sum() / found.settled_s:,.0f}\n"
        f"{'throughput':<16} {plan.async_s / found.step_s:.2f} of the plan's\n"
        f"{'gain':<16} {synchronous.step_s / found.step_s:.2f} x a synchronous loop on these GPUs\n"
        f"{'memory':<16} {held / 1e6:,.0f} MB of rollouts on the host, about"
    )


def main() -> None:
    for name, lengths in LENGTHS.items():
        trainer, engine = costs(lengths)
        plan = plan_split(
            trainer,
            engine,
            gpus=NODES * GPUS_A_NODE,
            batch_size=ROLLOUTS,
            memory_bytes=MEMORY_BYTES,
            max_off_policy_steps=BOUND,
            publish_s=PUBLISH_S,
        )
        print(f"\n== {name}: mean {lengths.mean:,.0f} tokens\n\n{plan.table()}")
        found, synchronous = (run(plan, lengths, bound) for bound in (BOUND, 0))
        print(report(plan, found, synchronous, lengths.mean))


if __name__ == "__main__":
    main()
