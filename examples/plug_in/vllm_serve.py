"""Sample rollouts from a vLLM server with OpenAI's client, and update the weights over HTTP.

    python examples/plug_in/vllm_serve.py

The script starts the server with a tiny random model, and updates the weights twice. After each
update, the script prints the largest difference between log-probabilities of server and trainer.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import partial

import openai
import tiny
import torch

from primeblocks import weightsync
from primeblocks.async_loop.adapters.openai import generate, served_version
from primeblocks.testing import tiny_models
from primeblocks.weightsync.adapters import vllm as into_vllm
from primeblocks.weightsync.adapters.transformers import to_checkpoint

PROMPTS, GROUP, START_S, TIMEOUT_S = [[4, 5, 6, 7], [8, 9, 10, 11]], 4, 600.0, 120.0
NAME = f"vllm-serve-{os.getpid()}"
# vLLM on a CPU: no model hub, no compilation, one thread.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


# glue
WORDS = into_vllm.server_args()  # of the server's command line
NEEDS = {"VLLM_SERVER_DEV_MODE": "1"}  # in its environment


async def sample(client, model, prompts):
    version = partial(served_version, client)
    ask = partial(generate, client, model=model, version=version, timeout_s=TIMEOUT_S)
    asked = (ask(prompt, n=GROUP, max_tokens=tiny.ANSWER) for prompt in prompts)
    return [rollout for group in await asyncio.gather(*asked) for rollout in group]


class Weights:
    async def attach(self, url, model):
        wiring = to_checkpoint(model)
        plan, memory = weightsync.announce(NAME, model, convert=wiring)
        self.publisher = weightsync.Publisher(plan, model, memory, convert=wiring, full_every=4)
        self.server = into_vllm.VllmServer(url)
        await into_vllm.attach(self.server, plan, memory, timeout_s=TIMEOUT_S)

    async def publish(self, version):
        receipt = await asyncio.to_thread(self.publisher.publish, version, timeout_s=TIMEOUT_S)
        return await into_vllm.update(
            self.server, receipt, in_flight="continue", timeout_s=TIMEOUT_S
        )


# end of glue


@contextlib.contextmanager
def serving(path: str):
    """Start a server, wait until the server is ready, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # `vllm serve PATH` accepts the same options, but the package vllm-cpu does not have this
    # command.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "64", "--max-num-seqs", "8", "--block-size", "32"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", *WORDS]
    command += ["--disable-uvicorn-access-log"]
    server = subprocess.Popen(command, env={**ENVIRONMENT, **os.environ, **NEEDS})
    try:
        deadline = time.monotonic() + START_S
        while not answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {server.poll()}")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(TIMEOUT_S)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
    except OSError:
        return False


@torch.no_grad()
def largest_difference(model: torch.nn.Module, rollouts) -> float:
    """Return the largest difference between log-probabilities of server and trainer."""
    worst = 0.0
    for rollout in rollouts:
        ids = torch.tensor(rollout.tokens)[None]
        scores = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
        own = scores[0, rollout.prompt_length - 1 :, 0]
        worst = max(worst, (own - torch.tensor(rollout.logprobs)).abs().max().item())
    return worst


async def run(url: str, path: str) -> None:
    model, weights = tiny.model(), Weights()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        await weights.attach(url, model)
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            await weights.publish(version)
            rollouts = await sample(client, path, PROMPTS)
            served = {int(each) for rollout in rollouts for each in rollout.versions}
            difference = largest_difference(model, rollouts)
            print(f"versions {served}: {len(rollouts)} rollouts, off by {difference:.1e}")


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = str(tiny_models.save("qwen3_moe", f"{folder}/model", dtype="float32", **tiny.SIZES))
        with serving(path) as url:
            asyncio.run(run(url, path))


if __name__ == "__main__":
    main()
