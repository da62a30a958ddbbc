"""What a VllmEngine does when all is well, when it hangs, when it dies. Prints JSON."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from primeblocks.async_loop import cache_salt
from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args
from primeblocks.errors import PrimeblocksError
from primeblocks.testing import tiny_models

PROMPT = list(range(5, 25))


async def outcome(awaitable) -> dict:
    start = time.monotonic()
    try:
        await awaitable
    except PrimeblocksError as error:
        return {"error": type(error).__name__, "seconds": time.monotonic() - start}
    return {"error": None, "seconds": time.monotonic() - start}


async def healthy(engine: VllmEngine) -> dict:
    first = await engine.generate(
        PROMPT, n=3, max_tokens=12, timeout_s=60, cache_salt=cache_salt(0), seed=7
    )
    greedy = [
        (await engine.generate(PROMPT, max_tokens=8, temperature=0.0, timeout_s=60))[0].token_ids
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
        "greedy_repeats": greedy[0] == greedy[1],
        "rollout": [rollout.prompt_length, len(rollout.completion), rollout.prompt_id],
        "rewarded": [rewarded.reward, dict(rewarded.attachments)],
        "too_long": await outcome(engine.generate(PROMPT * 40, max_tokens=4, timeout_s=60)),
        "slow": await outcome(engine.generate(PROMPT, max_tokens=200, timeout_s=0.02)),
        "after": await outcome(engine.generate(PROMPT, max_tokens=4, timeout_s=60)),
    }


async def hung(engine: VllmEngine) -> dict:
    pids = engine.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    asked = await outcome(engine.generate(PROMPT, max_tokens=4, timeout_s=1.0))
    closed = await outcome(engine.close(timeout_s=2.0))
    return {"asked": asked, "closed": closed, "left": [pid for pid in pids if alive(pid)]}


async def killed(engine: VllmEngine) -> dict:
    requests = [
        asyncio.create_task(outcome(engine.generate(PROMPT, max_tokens=200, timeout_s=60)))
        for _ in range(4)
    ]
    await asyncio.sleep(0)  # let them be sent
    for pid in engine.pids:
        os.kill(pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*requests)
    return {
        "pending": outcomes,
        "later": await outcome(engine.generate(PROMPT, max_tokens=4, timeout_s=60)),
        "closed": await outcome(engine.close(timeout_s=2.0)),
    }


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def main(folder: Path) -> None:
    checkpoint = tiny_models.save("qwen3_moe", folder / "good", num_layers=2, dtype="float32")

    def start(path: Path):
        arguments = base_engine_args(
            path, dtype="float32", max_model_len=256, max_num_seqs=8, kv_bytes=16 << 20
        )
        return VllmEngine.start(arguments, timeout_s=90)

    results: dict = {"missing": await outcome(start(folder / "nowhere"))}
    torn = tiny_models.save("qwen3_moe", folder / "torn", num_layers=2, dtype="float32")
    weights = next(torn.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    results["torn"] = await outcome(start(torn))
    # torchrun's variables must not reach the engine.
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1"}
    engine = await start(checkpoint)
    results["healthy"] = await healthy(engine)
    results["hung"] = await hung(engine)
    engine = await start(checkpoint)
    results["killed"] = await killed(engine)
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
