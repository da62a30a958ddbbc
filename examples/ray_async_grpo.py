"""Run asynchronous GRPO with trainer ranks and vLLM engines as Ray actors, and kill one engine.

    python examples/ray_async_grpo.py

The script uses the task, model, trainer and report of the demo (async_grpo_moe.py). Every trainer
rank and every engine is a Ray actor in a bundle of one placement group. Each rank sends weights to
each engine over TCP, and actors share neither memory nor files. After `KILL_AT` steps, the script
kills the actor of an engine that is answering requests. The other engine gets the requests of the
killed engine. A new actor replaces the killed actor, and loads the newest weights before its first
request. At the end, every prompt was trained on once, and `verify_engine` has compared each
engine's weights with the trainer's weights.

The Ray cluster consists of one machine, so connections between actors use the loopback address.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import async_grpo_moe as demo  # First, because it sets environment variables for vLLM.
import ray
import torch
import torch.distributed as dist
import vllm
from async_grpo.nodes import files_of, transport_over_tcp, write_files
from async_grpo.report import record_of, report
from async_grpo.rollouts import Rollouts, engine_arguments
from async_grpo.task import snippets
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tqdm import tqdm
from transformers import AutoConfig

from primeblocks import async_loop, weightsync
from primeblocks.async_loop.adapters.vllm import VllmEngine
from primeblocks.async_loop.scheduler import Retries
from primeblocks.errors import EngineError, PrimeblocksError
from primeblocks.serving import Fleet
from primeblocks.testing import tiny_models
from primeblocks.weightsync.adapters import vllm as into_vllm
from primeblocks.weightsync.transports import open_transport

# --- where it runs ---
ADDRESS = "local"
RANKS, ENGINES = 2, 2
BUNDLE = {"CPU": 1}  # Ray reserves this for each actor.
LOCAL_CLUSTER = {
    "num_cpus": RANKS + ENGINES,  # Ray does not check this number. A laptop may have fewer.
    "object_store_memory": 200 << 20,
    "include_dashboard": False,
    # Without this setting, an engine's process would outlive its actor.
    "_system_config": {"process_group_cleanup_enabled": True},
}
# --- the run: the task, the model and its learning rates are the demo's ---
STEPS, KILL_AT = demo.STEPS, 30
MAX_IN_FLIGHT = demo.MAX_IN_FLIGHT * demo.GROUP  # requests
START_S, TIMEOUT_S = 600.0, demo.TIMEOUT_S
HANG_S = 1.5 * TIMEOUT_S  # An actor has its own deadlines, which are shorter.


def own_address() -> str:
    """Return the address under which other actors can reach the calling process."""
    return "127.0.0.1" if ADDRESS == "local" else ray.util.get_node_ip_address()


@ray.remote
class TrainerRank:
    """A Ray actor that runs one trainer rank of the demo."""

    def __init__(self, rank: int, store: tuple[str, int], files: dict[str, bytes]) -> None:
        torch.set_num_threads(1)
        meeting = dist.PrefixStore("ranks", dist.TCPStore(*store, wait_for_workers=False))
        patience = timedelta(seconds=2 * TIMEOUT_S)
        dist.init_process_group(
            "gloo", store=meeting, rank=rank, world_size=RANKS, timeout=patience
        )
        transport = transport_over_tcp(*store, host=own_address(), owner=rank == 0)
        with tempfile.TemporaryDirectory(prefix="primeblocks-") as folder:
            write_files(Path(folder), files)
            self.trainer = demo.Trainer(Path(folder), torch.device("cpu"), transport)

    def source(self) -> tuple[str, dict]:
        """Return the plan and the transport specification with which an engine reads weights."""
        return self.trainer.sync_plan.to_json(), self.trainer.transport.spec()

    def call(self, method: str, *args):
        return getattr(self.trainer, method)(*args)

    def verify(self, seen: list) -> weightsync.verify.Verified:
        """Compare an engine's weights with the trainer's current weights. Collective."""
        trainer = self.trainer
        engine = seen if trainer.rank == 0 else None
        return weightsync.verify_engine(
            trainer.model, engine, plan=trainer.sync_plan, timeout_s=TIMEOUT_S
        )


@ray.remote(max_concurrency=MAX_IN_FLIGHT + 8)  # By default 1,000 calls. Later ones wait.
class Engine:
    """A Ray actor that runs a vLLM engine, which reads weights from the trainer ranks."""

    async def start(self, files: dict[str, bytes], source: tuple[str, dict]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="primeblocks-")
        checkpoint = Path(self._folder.name) / "checkpoint"
        write_files(checkpoint, files)
        config = AutoConfig.from_pretrained(checkpoint)
        arguments = engine_arguments(
            checkpoint,
            config,
            max_requests=MAX_IN_FLIGHT,
            max_off_policy_steps=demo.MAX_OFF_POLICY_STEPS,
        )
        self._engine = await VllmEngine.start(arguments, timeout_s=START_S)
        self._rollouts = Rollouts(self._engine)
        plan, spec = source
        with open_transport(spec) as transport:  # The engine's worker opens its own transport.
            await into_vllm.attach(
                self._engine.llm, weightsync.Plan.from_json(plan), transport, timeout_s=TIMEOUT_S
            )

    async def update(self, receipt: weightsync.marker.Receipt) -> None:
        await into_vllm.update(self._engine.llm, receipt, in_flight="continue", timeout_s=TIMEOUT_S)

    async def observe(self) -> list:
        return await into_vllm.observe(self._engine.llm, timeout_s=TIMEOUT_S)

    async def ask(self, method: str, *args, **options):
        return await getattr(self._rollouts, method)(*args, **options)

    async def close(self) -> None:
        await self._engine.close()
        self._folder.cleanup()


async def answers(calls: Iterable[Awaitable], timeout_s: float = HANG_S) -> list:
    """Await the results of calls to actors. Raise `EngineError` if an actor is dead or hangs."""
    try:
        return await asyncio.wait_for(asyncio.gather(*calls), timeout_s)
    except ray.exceptions.RayActorError as error:
        raise EngineError(f"an actor is gone: {error}") from error
    except TimeoutError as error:
        raise EngineError(f"an actor did not answer in {timeout_s:g} s") from error


@dataclass
class Seat:
    """A bundle for one engine. If the engine dies, a new engine starts in the same bundle."""

    bundle: int
    actor: ray.actor.ActorHandle = None
    version: int = -1  # the oldest version that its engine may have
    joined: list[int] = field(default_factory=list)  # the version that each engine got first
    rollouts: list[int] = field(default_factory=list)  # of each engine


class Serving:
    """Sends requests to engines, updates the weights of engines, and replaces dead engines."""

    def __init__(self, place, files: dict[str, bytes], source: tuple[str, dict]) -> None:
        self._place, self._files, self._source = place, files, source
        self._changing = asyncio.Lock()  # An engine does not join during an update.
        self._replacing: dict[str, asyncio.Task] = {}
        self.seats = {f"engine-{i}": Seat(bundle=RANKS + i) for i in range(ENGINES)}
        self.fleet: Fleet | None = None
        self.failed_requests = self.wrong_labels = 0

    async def start(self, receipt: weightsync.marker.Receipt) -> None:
        self._receipt = receipt
        await asyncio.gather(*map(self._start, self.seats))
        generate = {name: partial(self._generate, name) for name in self.seats}
        self.fleet = Fleet(generate, max_in_flight=MAX_IN_FLIGHT)

    async def update(self, receipt: weightsync.marker.Receipt) -> None:
        """Send a version to all engines that get requests. Replace engines that cannot load it."""
        async with self._changing:
            self._receipt = receipt
            await asyncio.gather(*map(self._update, self.in_flight()))

    def in_flight(self) -> dict[str, int]:
        """Return the number of unfinished requests of each open engine, by the engine's name."""
        return {state.name: state.in_flight for state in self.fleet.states()}

    async def ask(self, name: str, method: str, *args, **options):
        """Call a method of one engine directly, without the fleet."""
        (answer,) = await answers([self.seats[name].actor.ask.remote(method, *args, **options)])
        return answer

    async def prove(self, name: str, ranks: list) -> bool:
        """Return whether an engine has the current weights of the trainer ranks."""
        (seen,) = await answers([self.seats[name].actor.observe.remote()])
        return (await answers([rank.verify.remote(seen) for rank in ranks]))[0].is_proved

    async def settled(self) -> None:
        """Wait until all dead engines are replaced. Raise the error of a failed replacement."""
        await asyncio.gather(*self._replacing.values())

    async def close(self) -> None:
        for replacing in self._replacing.values():
            replacing.cancel()
        closing = [seat.actor.close.remote() for seat in self.seats.values() if seat.actor]
        await answers([asyncio.gather(*closing, return_exceptions=True)])

    async def _start(self, name: str) -> None:
        """Start an engine in its seat, load the newest version, and then send requests to it."""
        seat = self.seats[name]
        where = PlacementGroupSchedulingStrategy(
            self._place, placement_group_bundle_index=seat.bundle
        )
        engine = Engine.options(num_cpus=BUNDLE["CPU"], scheduling_strategy=where)
        seat.actor = engine.remote()
        await answers([seat.actor.start.remote(self._files, self._source)], START_S)
        async with self._changing:
            await answers([seat.actor.update.remote(self._receipt)])
            seat.version = self._receipt.version
            seat.joined.append(seat.version)
            seat.rollouts.append(0)
            if self.fleet is not None:
                self.fleet.add(name, partial(self._generate, name))

    async def _update(self, name: str) -> None:
        seat = self.seats[name]
        try:
            await answers([seat.actor.update.remote(self._receipt)])
            seat.version = self._receipt.version
        except PrimeblocksError as error:
            self._replace(name, error)

    async def _generate(self, name: str, text: str, *, version: int, sample: int):
        seat = self.seats[name]
        actor, held = seat.actor, seat.version
        try:
            rollout = await self.ask(name, "one", text, version=version, sample=sample)
        except EngineError as error:
            self.failed_requests += 1
            if actor is seat.actor:
                self._replace(name, error)
            raise
        seat.rollouts[-1] += 1
        in_order = held <= rollout.oldest_version <= rollout.newest_version
        self.wrong_labels += not (in_order and rollout.newest_version <= self._receipt.version)
        return rollout

    def _replace(self, name: str, error: PrimeblocksError) -> None:
        """Close the engine of a seat, and start another engine in the seat."""
        running = self._replacing.get(name)
        if running is not None and not running.done():
            return  # Another request already reported the death.
        print(f"{name} is replaced: {str(error).splitlines()[0]}", flush=True)
        self.fleet.drain(name)
        ray.kill(self.seats[name].actor)  # The actor may outlive its engine's process.
        self._replacing[name] = asyncio.create_task(self._start_again(name))

    async def _start_again(self, name: str) -> None:
        try:
            await self._start(name)
        except Exception as error:
            print(f"{name} could not be replaced: {error}", flush=True)
            raise


class Run:
    """Calls the actors for the loop, and records the measurements."""

    def __init__(self, ranks: list, serving: Serving) -> None:
        self.ranks, self.serving = ranks, serving
        self.receipts, self.sync_seconds, self.probes, self.history = [], [], [], []
        self.trained, self.lost, self.killed = Counter(), 0, {}

    async def on_all(self, method: str, *args, timeout_s: float = HANG_S):
        """Call a method of the trainer on all ranks. Return the result of rank 0."""
        calls = [rank.call.remote(method, *args) for rank in self.ranks]
        return (await answers(calls, timeout_s))[0]

    async def train(self, groups, *, version: int) -> dict[str, float]:
        return await self.on_all("train", ray.put(groups))

    async def publish(self, version: int) -> None:
        began = time.monotonic()
        self.receipts.append(await self.on_all("publish", version))
        await self.serving.update(self.receipts[-1])
        self.sync_seconds.append(time.monotonic() - began)

    async def kill(self, name: str) -> None:
        """Kill the actor of an engine as soon as the engine has unfinished requests."""
        async with asyncio.timeout(TIMEOUT_S):
            while not (requests := self.serving.in_flight()[name]):
                await asyncio.sleep(0.01)
        ray.kill(self.serving.seats[name].actor)
        version = self.receipts[-1].version
        self.killed = {"engine": name, "version": version, "in_flight": requests}

    def note(self, step: async_loop.Step, *, at_s: float) -> None:
        self.history.append(record_of(step, at_s=at_s))
        self.trained.update(group.ordinal for group in step.groups)
        self.lost += len(step.lost)

    async def probe(self, name: str, texts: list[str], version: int) -> None:
        """Measure the mismatch of one engine and the trainer at one version, on new rollouts."""
        fresh = await self.serving.ask(name, "each", texts, version=version)
        self.probes.append((version, *await self.on_all("mismatch", ray.put(fresh))))

    async def greedy_rewards(self, texts: list[str], version: int) -> list[float]:
        """Return the mean reward of each engine's greedy answers."""
        asked = (
            self.serving.ask(name, "greedy_reward", texts, version=version)
            for name in self.serving.seats
        )
        return await asyncio.gather(*asked)

    def summary(self) -> dict:
        history, seats = self.history, self.serving.seats.values()
        return {
            "engine": f"vllm-{vllm.__version__} on ray-{ray.__version__}",
            "steps": len(history),
            "versions_seen": len(set().union(*(record["versions"] for record in history))),
            "max_off_policy_steps": demo.MAX_OFF_POLICY_STEPS,
            "max_staleness_seen": max(max(record["staleness"]) for record in history),
            "killed": self.killed,
            "failed_requests": self.serving.failed_requests,
            "joined_at": [seat.joined for seat in seats],
            "rollouts": [seat.rollouts for seat in seats],
            "wrong_labels": self.serving.wrong_labels,
            "prompts_trained_once": sum(count == 1 for count in self.trained.values()),
            "prompts_trained_again": sum(count > 1 for count in self.trained.values()),
            "prompts_lost": self.lost,
            "mismatch_kl_without_replay": statistics.mean(kl for _, kl, _, _ in self.probes),
            "mismatch_kl_with_replay": statistics.mean(kl for _, _, kl, _ in self.probes),
            "mismatch_kl_by_engine": [kl for _, _, kl, _ in self.probes[-ENGINES:]],
            "sync_seconds_median": statistics.median(self.sync_seconds),
            "sync_bytes": self.receipts[-1].bytes,
        }


def place_actors() -> tuple:
    """Start the trainer ranks in a placement group that also has room for the engines."""
    here = own_address()
    # This process outlives the actors, so the data that actors exchange through the store remain.
    store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="primeblocks-") as folder:
        tiny_models.save("qwen3_moe", folder, seed=demo.SEED, **demo.MODEL)
        files = files_of(Path(folder))
    place = placement_group([BUNDLE] * (RANKS + ENGINES))
    ray.get(place.ready(), timeout=TIMEOUT_S)
    ranks = []
    for rank in range(RANKS):
        where = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank)
        options = TrainerRank.options(num_cpus=BUNDLE["CPU"], scheduling_strategy=where)
        ranks.append(options.remote(rank, (here, store.port), files))
    source = ray.get(ranks[0].source.remote(), timeout=START_S)
    return store, ranks, Serving(place, files, source)


def loop_over(run: Run, prompts: list[str], *, version: int) -> async_loop.AsyncLoop:
    staleness = async_loop.StalenessPolicy(
        demo.MAX_OFF_POLICY_STEPS,
        on_stale="wait",
        correction="grpo, with the engine's log-probabilities",
    )
    return async_loop.AsyncLoop(
        prompts=prompts,
        generate=run.serving.fleet,
        train=run.train,
        publish=run.publish,
        buffer=async_loop.RolloutBuffer(
            capacity=(demo.MAX_OFF_POLICY_STEPS + 1) * demo.PROMPTS, staleness=staleness
        ),
        batch_size=demo.PROMPTS,
        max_in_flight=MAX_IN_FLIGHT,
        group_size=demo.GROUP,
        retries=Retries(attempts=9),  # Enough for minutes without any engine.
        version=version,
        step_timeout_s=2 * HANG_S,
    )


async def drive(options: argparse.Namespace) -> None:
    """Run the experiment: warm start, engines, loop, death of an engine, and measurements."""
    start, version = time.monotonic(), demo.WARM_VERSION
    training, held_out = snippets(demo.SEED)
    _store, ranks, serving = place_actors()
    run = Run(ranks, serving)
    await run.on_all("warm_start", training, options.warm_steps, timeout_s=5 * TIMEOUT_S)
    run.receipts.append(await run.on_all("publish", version))
    await serving.start(run.receipts[0])
    before = await run.greedy_rewards(held_out, version)
    chance = random.Random(demo.SEED + 99)
    # The number of trained prompts, so that all prompts are used up at the end.
    prompts = [chance.choice(training) for _ in range(options.steps * demo.PROMPTS)]
    began = time.monotonic()
    async with loop_over(run, prompts, version=version) as loop:
        bar = tqdm(total=options.steps, desc="GRPO on Ray")
        async for step in loop.steps(options.steps):
            run.note(step, at_s=time.monotonic() - began)
            bar.update()
            if bar.n == options.kill_at:
                await run.kill("engine-1")
            if bar.n % demo.PROBE_EVERY == 0:
                names = [*serving.in_flight()]
                await run.probe(names[len(run.probes) % len(names)], held_out[:64], step.version)
            bar.set_postfix({"reward": run.history[-1]["reward"], "open": len(serving.in_flight())})
        bar.close()
    loop_seconds = time.monotonic() - began
    await serving.settled()
    after = await run.greedy_rewards(held_out, loop.version)
    for name in serving.seats:
        await run.probe(name, held_out[:64], loop.version)
    proved = [await serving.prove(name, ranks) for name in serving.seats]
    await serving.close()
    rewards = {
        "reward_before": statistics.mean(before),
        "reward_after": statistics.mean(after),
        "reward_after_by_engine": after,
        "proved": proved,
        "loop_seconds": loop_seconds,
        "seconds": time.monotonic() - start,
    }
    report(run.summary() | rewards, run.history, run.probes, options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--warm-steps", type=int, default=demo.WARM_STEPS)
    parser.add_argument("--kill-at", type=int, default=KILL_AT, help="0 kills nobody")
    parser.add_argument("--out", type=Path, default=Path("outputs/ray"))
    options = parser.parse_args()
    ray.init(ADDRESS, **(LOCAL_CLUSTER if ADDRESS == "local" else {}))
    try:
        asyncio.run(drive(options))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
