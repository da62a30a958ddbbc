"""Versions of a LoRA adapter in a vLLM that is generating, and in one of two workers."""

import asyncio
from functools import partial

import pytest

from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from tests.engine_job import call
from tests.weightsync.vllm_site import (
    LORA_ENGINE,
    PROMPTS,
    SIZES,
    TIMEOUT_S,
    AdapterTrainer,
    Requests,
    error_of,
    greedy,
    names,
    needs,
    seen,
)

SHORT, LONG = 16, 400
pytestmark = needs("vllm", "peft")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("running")
    tiny_models.save("qwen3", folder / "model", seed=0, dtype="float32", **SIZES)
    return call(_run, folder)


def _run(folder):
    register()
    return asyncio.run(_running(folder))


async def _running(folder):
    """A new version, and a corrupt one, while requests on the first one are in flight."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from primeblocks.weightsync.adapters.vllm import lora

    policy, critic = AdapterTrainer.pair(folder / "model", folder / "adapters")
    settings = {**LORA_ENGINE, **lora.lora_engine_args()}
    arguments = AsyncEngineArgs(str(folder / "model"), dtype="float32", **settings)
    engine = AsyncLLM.from_engine_args(arguments)
    requests = Requests(engine)

    async def answers(name, lora, tokens=SHORT):
        return [seen(o) for o in await asyncio.gather(*requests.start(name, tokens, lora))]

    def update(trainer, receipt):
        return lora.update_lora(engine, trainer.spec.name, receipt, timeout_s=TIMEOUT_S)

    async def error(call):
        (met,) = await asyncio.gather(call, return_exceptions=True)
        return type(met).__name__, str(met)

    for trainer in (policy, critic):
        attach = (trainer.spec, trainer.plan, trainer.transport)
        await lora.attach_lora(engine, *attach, timeout_s=TIMEOUT_S)
    first = await update(policy, policy.publish(1))
    saw = {"one": await answers("reference", first, LONG)}
    second, third = policy.publish(2), policy.publish(3)
    policy.flip(3)
    flying = asyncio.ensure_future(answers("flying", first, LONG))
    await requests.reach(*names("flying"), tokens=10)
    second = await update(policy, second)
    await engine.pause_generation(mode="keep", clear_cache=False)  # Else they may end.
    saw["still_flying"] = not flying.done()
    saw["in_use"] = await error(lora.remove_lora(engine, first, timeout_s=TIMEOUT_S))
    saw["corrupt"] = await error(update(policy, third))
    await engine.resume_generation()
    saw["two"] = await answers("new", second)
    saw["flown"] = await flying
    saw["critic"] = await answers("critic", await update(critic, critic.publish(1)))
    await lora.remove_lora(engine, first, timeout_s=TIMEOUT_S)
    saw["refused"] = await error(requests.one("late", PROMPTS[0], SHORT, first))
    saw["two_again"] = await answers("again", second)
    engine.shutdown()
    for trainer in (policy, critic):
        trainer.transport.close()
    return saw


def test_requests_in_flight_finish_on_their_version(running):
    assert running["still_flying"]
    assert running["flown"] == running["one"]
    assert running["two"] == running["two_again"]
    assert [tokens for tokens, _ in running["two"]] != [row[:16] for row, _ in running["one"]]


def test_the_same_over_files_and_processes(running):
    assert running["critic"] == [[row[:SHORT] for row in one] for one in running["one"]]


def test_a_version_in_use_is_not_removed(running):
    kind, message = running["in_use"]
    assert kind == "UsageError"
    assert "3 requests such as 'flying0' still use 'policy@1'" in message


def test_a_request_on_a_removed_version_leaves_the_engine_alive(running):
    kind, message = running["refused"]
    assert kind == "VLLMValidationError"
    assert "does not hold 'policy@1'" in message
    assert running["two"] == running["two_again"]


def test_a_flipped_byte_while_running(running):
    assert running["corrupt"][0] == "CorruptionError"


# --- two workers with parts of each layer --------------------------------------------------------


def _break_second(worker):
    """Let the second worker fail once to take an adapter."""
    manager = worker.model_runner.lora_manager
    stock = manager.add_adapter

    def broken(request):
        manager.add_adapter = stock
        raise RuntimeError("no memory")

    if worker.rank == 1:
        manager.add_adapter = broken


def _held_here(worker):
    return len(worker.model_runner.lora_manager.list_adapters())


def _workers(folder):
    import vllm
    from vllm.lora.request import LoRARequest

    from primeblocks.weightsync.adapters.vllm import lora

    register()
    policy, critic = AdapterTrainer.pair(folder / "model", folder / "adapters")
    settings = {**LORA_ENGINE, **lora.lora_engine_args(), "tensor_parallel_size": 2}
    llm = vllm.LLM(str(folder / "model"), dtype="float32", **settings)
    lora.attach_lora_llm(llm, policy.spec, policy.plan, policy.transport)
    receipt = policy.publish(1)
    update = partial(lora.update_lora_llm, llm, "policy", receipt, timeout_s=TIMEOUT_S)
    llm.collective_rpc(_break_second)
    assert error_of(update) == ("EngineError", "RuntimeError: no memory")
    assert llm.collective_rpc(_held_here) == [0, 0]
    synced = greedy(llm, update())
    assert llm.collective_rpc(_held_here) == [1, 1]
    assert synced == greedy(llm, LoRARequest("disk", 1, policy.save(1)))
    for trainer in (policy, critic):
        trainer.transport.close()


def test_workers_hold_a_version_all_or_none(full, tmp_path):
    if not full:
        pytest.skip("runs under --full")
    from transformers import AutoModelForCausalLM

    config = tiny_models.config("qwen3", **SIZES)
    config.num_key_value_heads = 1  # Of which each worker has a copy.
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    call(_workers, tmp_path)
