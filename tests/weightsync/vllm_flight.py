"""Requests in flight while an AsyncLLM is updated; run by vllm_fleet_job.py."""

import asyncio
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

from primeblocks.weightsync.adapters import vllm as adapter
from tests.weightsync.vllm_site import (
    PROMPTS,
    TIMEOUT_S,
    Requests,
    Trainer,
    cost,
    names,
    seen,
    spans,
)


async def flight(requests: Requests, trainer: Trainer) -> dict[str, Any]:
    """Every mode once, what was aborted sent again, ten updates; leaves version 14 of seed 0."""
    result: dict[str, Any] = {"reference": await requests.all("reference", 200)}
    for version, mode in enumerate(("continue", "recompute", "abort"), start=1):
        result[mode] = await one_update(requests, trainer, mode, version)
    result["resumed"] = await resume(requests, trainer, result["abort"]["outputs"])
    result["ten"] = await ten_updates(requests, trainer, 4)
    return result | await late_call(requests, trainer, 14)


async def one_update(requests: Requests, trainer: Trainer, mode: Any, version: int) -> Any:
    """An update under requests in flight. Odd versions are the weights of seed 1."""
    engine = requests.engine
    tasks = requests.start(mode, 200)
    await requests.reach(*names(mode), tokens=20)
    receipt = trainer.publish(version, seed=version % 2)
    report = await adapter.update(engine, receipt, in_flight=mode, timeout_s=TIMEOUT_S)
    outputs = await asyncio.gather(*tasks)
    told = [seen(output) for output in outputs]
    return {
        "outputs": told,
        "gaps": [
            trainer.gap(ids + tokens[:switch], [tokens[switch:], logprobs[switch:]])
            for ids, (tokens, logprobs), output in zip(PROMPTS, told, outputs, strict=True)
            for _, switch, _ in spans(output)[-1:]
        ],
        "finish": [output.outputs[0].finish_reason for output in outputs],
        "spans": [spans(output) for output in outputs],
        "report": cost(report),
        "paused": await engine.is_paused(),
        "after": await requests.all(f"after {mode}", 24),
    }


async def resume(requests: Requests, trainer: Trainer, partial: list[Any]) -> list[Any]:
    """Go on with what was aborted: tokens, and the gap to the trainer's own model."""
    result = []
    for index, (ids, (tokens, _)) in enumerate(zip(PROMPTS, partial, strict=True)):
        prompt = ids + tokens
        output = await requests.one(f"resumed{index}", prompt, 60)
        result.append([seen(output), spans(output), trainer.gap(prompt, seen(output))])
    return result


async def ten_updates(requests: Requests, trainer: Trainer, first: int) -> dict[str, Any]:
    """Requests that live through ten updates."""
    tasks = requests.start("ten", 950)
    reports = []
    for index in range(10):
        await requests.reach(*names("ten"), tokens=20 * (index + 1))
        receipt = trainer.publish(first + index, seed=index % 2)
        reports.append(cost(await adapter.update(requests.engine, receipt, timeout_s=TIMEOUT_S)))
    outputs = await asyncio.gather(*tasks)
    return {
        "lengths": [len(output.outputs[0].token_ids) for output in outputs],
        "finish": [output.outputs[0].finish_reason for output in outputs],
        "spans": [spans(output) for output in outputs],
        "reports": reports,
    }


async def late_call(requests: Requests, trainer: Trainer, version: int) -> dict[str, Any]:
    """What an update leaves behind that was given up: an open session, a call that comes late."""
    engine = requests.engine
    receipt = trainer.publish(version, seed=0)
    await engine.start_weight_update()
    late = {"version": version, "transaction": "given up", "timeout_s": TIMEOUT_S}
    await engine.update_weights(WeightTransferUpdateRequest(late))
    (state,) = await engine.collective_rpc("primeblocks_state")
    await adapter.update(engine, receipt, timeout_s=TIMEOUT_S)
    return {"late": state["version"], "after_late": await engine.get_weight_version()}
