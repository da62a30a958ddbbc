"""A real vLLM engine: good answers, and a typed error within its time for every kind of end."""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primeblocks.async_loop import cache_salt
from primeblocks.async_loop.ledger import Draft
from primeblocks.clock import MonotonicClock
from primeblocks.errors import EngineError, PrimeblocksError, UsageError
from primeblocks.testing import tiny_models
from tests.deadlines import HANG_S, START_S
from tests.engine_job import call, is_gone

PROMPT = list(range(5, 25))
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    return call(_run, tmp_path_factory.mktemp("engine"))


def _run(folder: Path) -> dict:
    return asyncio.run(_see(folder))


async def _outcome(awaitable) -> dict:
    start = time.monotonic()
    try:
        await awaitable
    except PrimeblocksError as error:
        return {"error": type(error).__name__, "seconds": time.monotonic() - start}
    return {"error": None, "seconds": time.monotonic() - start}


async def _healthy(engine: Any) -> dict:
    first = await engine.generate(
        PROMPT, n=3, max_tokens=12, timeout_s=HANG_S, cache_salt=cache_salt(0), seed=7
    )
    greedy = [
        await engine.generate(PROMPT, max_tokens=8, temperature=0.0, timeout_s=HANG_S)
        for _ in range(2)
    ]
    rollout = first[0].to_rollout(prompt_id="p")
    rewarded = first[0].to_rollout(reward=0.5, attachments={"routes": "r"})
    return {
        "completions": len(first),
        "different": len({completion.token_ids for completion in first}),
        "lengths": [len(completion.logprobs) for completion in first],
        "negative_logprobs": all(x <= 0 for completion in first for x in completion.logprobs),
        "versions": sorted({int(v) for completion in first for v in completion.versions}),
        "greedy_repeats": greedy[0][0].token_ids == greedy[1][0].token_ids,
        "rollout": [rollout.prompt_length, len(rollout.completion), rollout.prompt_id],
        "rewarded": [rewarded.reward, dict(rewarded.attachments)],
        "too_long": await _outcome(engine.generate(PROMPT * 40, max_tokens=4, timeout_s=HANG_S)),
        "none": await _outcome(engine.generate(PROMPT, max_tokens=0, timeout_s=HANG_S)),
        "slow": await _outcome(engine.generate(PROMPT, max_tokens=200, timeout_s=0.02)),
        "after": await _outcome(engine.generate(PROMPT, max_tokens=4, timeout_s=HANG_S)),
    }


async def _in_parts(engine: Any) -> dict:
    """A completion in parts, beside the same one as a whole; one that goes on after a crash."""
    from primeblocks.async_loop.adapters.vllm import generate_in_parts

    same = {"max_tokens": 12, "temperature": 0.0, "timeout_s": 60, "cache_salt": cache_salt(0)}
    (whole,) = await engine.generate(PROMPT, **same)
    saved: list = []
    saved_again: list = []
    draft = Draft(7, {}, lambda *what: saved.append(what[2]))
    asked = {"draft": draft, "sample": 2, "part_tokens": 5}
    parts = await generate_in_parts(engine, PROMPT, **asked, **same)
    # Killed after the first part; since then the weights have become those of version 3.
    await engine.call(engine.llm.update_weight_version("3"), timeout_s=HANG_S)
    again = Draft(7, {2: saved[0]}, lambda *what: saved_again.append(what[2]))
    resumed = await generate_in_parts(engine, PROMPT, **asked | {"draft": again}, **same)
    over = Draft(7, {2: saved_again[-1]}, lambda *what: None)
    ended = await generate_in_parts(
        engine, PROMPT, **asked | {"draft": over}, **same | {"max_tokens": 10}
    )
    # A part ends where the model's length ends: 256 tokens.
    full = await generate_in_parts(
        engine, (PROMPT * 40)[:246], draft=Draft(8, {}, lambda *what: None), sample=0,
        part_tokens=5, **same,
    )  # fmt: skip
    several = {"temperature": 1.0, "max_tokens": 5, "seed": 7, "timeout_s": HANG_S}
    samples = [
        await generate_in_parts(
            engine, PROMPT, draft=Draft(9, {}, lambda *what: None), sample=sample, part_tokens=5,
            **several,
        )
        for sample in range(3)
    ]  # fmt: skip
    other = {"draft": again, "sample": 2, "part_tokens": 5, **same}
    await engine.call(engine.llm.update_weight_version("0"), timeout_s=HANG_S)
    return {
        "same_tokens": whole.token_ids == parts.token_ids == resumed.token_ids,
        "logprob_error": max(
            abs(a - b) for a, b in zip(whole.logprobs, parts.logprobs, strict=True)
        ),
        "saved": [len(partial.completion) for partial in saved],
        "saved_again": [len(partial.completion) for partial in saved_again],
        "prompt": [list(parts.prompt) == PROMPT, list(resumed.prompt) == PROMPT],
        "versions": resumed.versions.tolist(),
        "kept_logprobs": resumed.logprobs[:5] == parts.logprobs[:5],
        "ended": [len(ended.token_ids), ended.finish_reason],
        "full": [len(full.token_ids), full.finish_reason],
        "different": len({answer.token_ids for answer in samples}),
        "other_prompt": await _outcome(generate_in_parts(engine, PROMPT[1:], **other)),
    }


async def _hung(engine: Any) -> dict:
    pids = engine.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    asked = await _outcome(engine.generate(PROMPT, max_tokens=4, timeout_s=1.0))
    closed = await _outcome(engine.close(timeout_s=2.0))
    return {"asked": asked, "closed": closed, "left": [pid for pid in pids if not is_gone(pid)]}


async def _see(folder: Path) -> dict:
    from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args

    checkpoint = tiny_models.save("qwen3_moe", folder / "good", num_layers=2, dtype="float32")

    def start(path: Path):
        arguments = base_engine_args(
            path, seed=0, dtype="float32", max_model_len=256, max_num_seqs=8, kv_bytes=16 << 20
        )
        return VllmEngine.start(arguments, timeout_s=START_S)

    results: dict = {"missing": await _outcome(start(folder / "nowhere"))}
    torn = tiny_models.save("qwen3_moe", folder / "torn", num_layers=2, dtype="float32")
    weights = next(torn.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    results["torn"] = await _outcome(start(torn))
    # torchrun's variables must not reach the engine.
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1"}
    engine = await start(checkpoint)
    results["healthy"] = await _healthy(engine)
    results["parts"] = await _in_parts(engine)
    results["hung"] = await _hung(engine)
    return results


def test_it_samples_with_logprobs_and_versions(facts):
    healthy = facts["healthy"]
    assert healthy["completions"] == healthy["different"] == 3
    assert healthy["lengths"] == [12, 12, 12]
    assert healthy["negative_logprobs"]
    assert healthy["versions"] == [0]
    assert healthy["greedy_repeats"]
    assert healthy["rollout"] == [20, 12, "p"]
    assert healthy["rewarded"] == [0.5, {"routes": "r"}]


def test_a_completion_in_parts_is_the_whole_and_goes_on_after_a_crash(facts):
    parts = facts["parts"]
    assert parts["same_tokens"]
    assert parts["logprob_error"] < 1e-4  # float32; pages of a part are computed again.
    assert (parts["saved"], parts["saved_again"]) == ([5, 10], [10])
    assert parts["prompt"] == [True, True]
    assert parts["versions"] == [0] * 5 + [3] * 7
    assert parts["kept_logprobs"]
    assert parts["ended"] == parts["full"] == [10, "length"]
    assert parts["different"] == 3
    assert parts["other_prompt"]["error"] == "UsageError"


def test_a_bad_or_late_request_leaves_the_engine_well(facts):
    healthy = facts["healthy"]
    assert healthy["too_long"]["error"] == healthy["none"]["error"] == "UsageError"
    assert healthy["slow"]["error"] == "DeadlineError"
    assert healthy["slow"]["seconds"] < HANG_S
    assert healthy["after"]["error"] is None


def test_a_wrong_checkpoint_is_an_error_at_once(facts):
    for kind in ("missing", "torn"):
        assert facts[kind]["error"] == "EngineError"
        assert facts[kind]["seconds"] < START_S / 2


def test_a_hung_engine_ends_at_the_deadline_and_can_be_closed(facts):
    hung = facts["hung"]
    assert hung["asked"]["error"] == "DeadlineError"
    assert hung["asked"]["seconds"] < HANG_S
    assert hung["closed"]["error"] is None
    assert hung["closed"]["seconds"] < HANG_S
    assert hung["left"] == []


@pytest.mark.parametrize(
    "label",
    ["default", "", "-1", "1.0", str(1 << 63), pytest.param("9" * 5000, id="of 5000 digits")],
)
def test_a_label_that_is_no_version_is_refused(label):
    from primeblocks.async_loop.adapters.vllm.completion import completion_of

    span = SimpleNamespace(version=label, start=0, end=1)
    logprobs = [{3: SimpleNamespace(logprob=-1.0)}]
    output = SimpleNamespace(
        token_ids=[3], logprobs=logprobs, weight_versions=[span], finish_reason="stop"
    )
    with pytest.raises(EngineError, match="a policy version must be an integer"):
        completion_of((1,), output, num_cached_tokens=0)


@pytest.fixture(scope="module")
def module():
    """A module of the adapter, which imports vLLM into this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Parts of vLLM's own imports are deprecated.
        importlib.import_module("vllm.v1.engine.async_llm")
    return lambda name: importlib.import_module(f"primeblocks.async_loop.adapters.vllm.{name}")


def test_engines_of_a_fleet_have_different_seeds(module):
    """Without a seed of its own, a request would get the same noise from each engine."""
    sizes = {"dtype": "float32", "max_model_len": 8, "max_num_seqs": 1, "kv_bytes": 1 << 20}
    arguments = module("engine").base_engine_args
    assert len({arguments("model", **sizes)["seed"] for _ in range(4)}) > 1
    assert arguments("model", **sizes, seed=3)["seed"] == 3


@pytest.mark.parametrize(
    ("cause", "errored", "expected"),
    [
        (KeyError, False, PrimeblocksError),
        (KeyError, True, EngineError),
        (ValueError, False, UsageError),
        (ValueError, True, EngineError),
    ],
)
def test_a_request_that_fails_does_not_close_a_running_engine(module, cause, errored, expected):
    async def run():
        async def fail():
            try:
                raise cause("its own mistake")
            except cause as error:
                raise module("engine").EngineGenerateError from error

        llm: Any = SimpleNamespace(errored=errored)
        engine = module("engine").VllmEngine(llm, [], MonotonicClock())
        with pytest.raises(PrimeblocksError, match="its own mistake") as raised:
            await engine.call(fail(), timeout_s=HANG_S)
        assert type(raised.value) is expected

    asyncio.run(run())


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_was_cut_is_no_completion(module, reason):
    async def run():
        async def generate(*args, **kwargs):
            ended = SimpleNamespace(index=0, finish_reason=reason, token_ids=[3])
            yield SimpleNamespace(outputs=[ended], num_cached_tokens=0)

        llm: Any = SimpleNamespace(generate=generate, errored=False)
        engine = module("engine").VllmEngine(llm, [], MonotonicClock())
        with pytest.raises(PrimeblocksError, match=f"'{reason}' before the answer was") as raised:
            await engine.generate(PROMPT, max_tokens=4, timeout_s=HANG_S)
        assert type(raised.value) is PrimeblocksError

    asyncio.run(run())


class Process:
    """A process that runs until it is killed."""

    name, pid = "EngineCore", 1 << 30  # of no process

    def __init__(self):
        self.is_killed, (self.sentinel, self.end) = False, os.pipe()

    def is_alive(self):
        return not self.is_killed

    def kill(self):
        self.is_killed = True

    def join(self, timeout):
        pass


@pytest.mark.parametrize("waits_for", ["handler", "shutdown"])
def test_a_cancelled_close_kills_the_processes(module, waits_for):
    async def run():
        loop, reached, gate = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        async def handle():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if waits_for == "handler":
                    reached.set()
                    await asyncio.Event().wait()

        def shutdown(timeout):
            loop.call_soon_threadsafe(reached.set)
            gate.wait(HANG_S)

        handler, process = asyncio.create_task(handle()), Process()
        await asyncio.sleep(0)
        llm: Any = SimpleNamespace(output_handler=handler, shutdown=shutdown)
        engine = module("engine").VllmEngine(llm, [process], MonotonicClock())
        closing = asyncio.create_task(engine.close(timeout_s=HANG_S))
        await reached.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert process.is_killed
        assert llm.shutdown is not shutdown
        gate.set()
        handler.cancel()
        for end in (process.sentinel, process.end):
            os.close(end)

    asyncio.run(run())


@pytest.mark.parametrize("processes", [["EngineCore"], ["EngineCore_DP0", "EngineCore_DP1"], []])
def test_a_started_engine_has_the_processes_that_vllm_names(module, monkeypatch, processes):
    """Even if a process of another start appears first."""
    launch = module("launch")
    appeared, gate = [], threading.Event()
    manager = SimpleNamespace(processes=processes) if processes else None
    llm = SimpleNamespace(engine_core=SimpleNamespace(resources=SimpleNamespace()))
    llm.engine_core.resources.engine_manager = manager

    class Stranger:
        @property
        def name(self):
            gate.set()
            return "EngineCore"

    def build(*args, **named):
        appeared.append(Stranger())
        assert gate.wait(HANG_S)
        return llm

    arguments = SimpleNamespace(create_engine_config=lambda usage: None)
    arguments.enable_log_requests = arguments.disable_log_stats = False
    monkeypatch.setattr(launch, "AsyncEngineArgs", lambda **named: arguments)
    monkeypatch.setattr(launch, "AsyncLLM", SimpleNamespace(from_vllm_config=build))
    monkeypatch.setattr(launch.multiprocessing, "active_children", lambda: appeared)
    made = launch.Launch({"model": "x"}, MonotonicClock())
    assert asyncio.run(made.run()) is llm
    assert made.processes == processes


def test_workers_die_with_their_engine(module):
    sleeps = "import time; time.sleep(3600)"
    code = "import subprocess, sys\n"
    code += f"worker = subprocess.Popen([sys.executable, '-c', {sleeps!r}])\n"
    code += f"print(worker.pid, flush=True)\n{sleeps}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as core:
        worker = Path(f"/proc/{int(core.stdout.readline())}/fd/0")
        process: Any = SimpleNamespace(
            pid=core.pid, is_alive=lambda: True, kill=core.kill, join=lambda _: core.wait(HANG_S)
        )
        assert worker.exists()
        module("launch").kill([process])
    end = time.monotonic() + HANG_S
    while worker.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
