"""What tests of real fleets share: policies by version, and a judge of rollouts token by token."""

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeblocks.errors import PrimeblocksError, how_it_ended
from primeblocks.replay import compare, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.replay.adapters.vllm import (
    RouterShape,
    join_prefill,
    routes_from_base64,
    server_args,
)
from primeblocks.replay.adapters.vllm.rows import routes_from_rows
from primeblocks.serving.adapters.vllm import FleetMember
from primeblocks.testing import tiny_models
from primeblocks.weightsync.adapters import vllm as into_vllm
from tests.deadlines import START_S
from tests.engine_forks import Nursery
from tests.ports import free_port
from tests.weightsync.vllm_site import SIZES, TIMEOUT_S, Served, Trainer

MODEL_TOKENS = 2048
LONG = 1000  # tokens of an answer that lasts until something has happened, on an idle machine too
ROUTER = shutil.which("vllm-router")
needs_router = pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed")
PROMPTS = np.random.default_rng(0).integers(4, 512, (6, 40)).tolist()
CAPTURE = [*server_args(max_bytes=1 << 22, device="cpu"), "--block-size", "32"]
# Float32 sums of up to 512 terms, over log-probabilities of about -8.
ROUNDING = 8 * 512 * 2**-24
# Router logits, each a float32 sum of 64 terms whose sizes add up to about 1.3, are this close in
# one of some thousand rows. Which of two such experts is chosen depends on the order of the sum.
TIE = 2 * 1.3 * 64 * 2**-24


class Policies:
    """A trainer whose version v has the weights of seed v % 2, and what each version says."""

    def __init__(self, folder: Path) -> None:
        self.trainer = Trainer("float32", folder)
        self.models = [self.trainer.build(seed=seed) for seed in (0, 1)]
        config: Any = self.models[0].config
        self.shape = RouterShape(
            config.num_hidden_layers,
            tuple(range(config.num_hidden_layers)),
            config.num_experts,
            config.num_experts_per_tok,
        )

    def publish(self, version: int) -> Any:
        return self.trainer.publish(version, seed=version % 2)

    async def attach(self, engine: Any) -> None:
        plan, transport = self.trainer.plan, self.trainer.transport
        await into_vllm.attach(engine, plan, transport, timeout_s=TIMEOUT_S)

    def routes(self, rollout: Any) -> Any:
        told, tokens = rollout.attachments["routed_experts"], len(rollout.tokens)
        if isinstance(told, str):
            return routes_from_base64(told, self.shape, tokens=tokens)
        return routes_from_rows(told, self.shape, tokens=tokens, prompt_start=0)

    def join(self, first: Any, second: Any) -> Any:
        """Routes of a prompt that one engine computed, and of the answer of another."""
        return join_prefill(
            self.routes(first),
            self.routes(second),
            prompt_tokens=second.prompt_length,
            versions=(int(first.versions[0]), int(second.versions[0])),
        )

    @torch.no_grad()
    def judge(self, rollout: Any, *, routes: Any = None) -> dict[str, Any]:
        """Versions of a rollout; how far its tokens are from the policies that it names, and from
        the others at least; which part of its routes are theirs, and how many rows have routes.
        Rows from a model's first tie on are not compared.
        """
        ids, start = torch.from_numpy(rollout.tokens.copy()), rollout.prompt_length
        routes = self.routes(rollout) if routes is None else routes
        gaps, others, agreed, rows = [], [], [], 0
        # A row is of the weights that sampled the token after it; the prompt's of the first.
        by_row = np.concatenate([np.full(start - 1, rollout.versions[0]), rollout.versions])
        for seed, model in enumerate(self.models):
            with record(routers(model)) as tape:
                said = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
            logits = said.logits[0, start - 1 : -1]
            best = torch.stack(said.router_logits).topk(self.shape.top_k + 1).values
            is_tied = (best[..., -2] - best[..., -1] < TIE).any(0).numpy()
            is_clear = np.cumsum(is_tied) == 0
            mine = logits.double().log_softmax(-1).gather(-1, ids[start:, None])[:, 0].numpy()
            named = rollout.versions % 2 == seed
            far = np.abs(mine - rollout.logprobs)
            gaps += far[named & is_clear[start - 1 : -1]].tolist()
            others.append(far[~named].max(initial=0.0))
            of_it = np.append(by_row % 2 == seed, False)
            rows += int(of_it.sum())
            if (of_it & is_clear).any():
                agreed.append(compare(routes, tape.routes, mask=of_it & is_clear).overall)
        return {
            "versions": sorted({int(each) for each in rollout.versions}),
            "is_rising": bool((np.diff(rollout.versions) >= 0).all()),
            "gap": max(gaps, default=0.0),
            "compared": len(gaps),
            "other": max(others),
            "agreement": min(agreed, default=1.0),
            "rows": rows,
            "missing": int(routes.missing.sum()),
            "tokens": len(ids),
        }


def save(folder: Path) -> Path:
    """Write the checkpoint that all engines start from: seed 0, without an end of text, so that
    an answer has all tokens that were asked for.
    """
    path = tiny_models.save("qwen3_moe", folder / "start", seed=0, dtype="float32", **SIZES)
    for name in ("config.json", "generation_config.json"):
        told = json.loads((path / name).read_text()) | {"eos_token_id": None}
        (path / name).write_text(json.dumps(told))
    return path


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Any]:
    """Start servers by name, more of them later, and end them all."""
    with Nursery() as nursery, contextlib.ExitStack() as stack:

        def start(name: str, *words: str, **more: Any) -> Served:
            every = ("--max-model-len", str(MODEL_TOKENS), *CAPTURE, *words)
            log = folder / f"{name}.log"
            served = Served(folder / "start", log, *every, nursery=nursery, **more)
            stack.callback(served.close)
            return served

        yield start


@contextlib.contextmanager
def router(program: str, log: Path, *words: str) -> Iterator[str]:
    """Run vllm-router until it answers; its address."""
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port), *words]
    command += ["--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            for _ in range(int(START_S)):
                ended = process.poll()
                assert ended is None, f"the router {how_it_ended(ended)}\n{log.read_text()[-4000:]}"
                with (
                    contextlib.suppress(OSError, urllib.error.URLError),
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2),
                ):
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)  # there is no event to wait for
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def client_of(url: str) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def retried(ask: Any, *args: Any, attempts: int = 3, **kwargs: Any) -> tuple[Any, int]:
    """Ask again after an error, as `AsyncLoop` does; how often it failed."""
    for failures in range(attempts):
        try:
            return await ask(*args, **kwargs), failures
        except PrimeblocksError:
            if failures == attempts - 1:
                raise
    raise AssertionError


def member_of(served: Any) -> FleetMember:
    from primeblocks.async_loop.adapters.openai import generate_tokens

    return FleetMember(partial(generate_tokens, client_of(served.url)), served.engine)


def updating() -> Any:
    """KV of requests in flight is computed again: each token is of one version's weights."""
    from primeblocks.weightsync.adapters import vllm as into_vllm

    return partial(into_vllm.update_all, in_flight="recompute")


def check(judged: list[dict[str, Any]], *versions: int) -> None:
    assert sum(each["compared"] for each in judged) > 0
    for each in judged:
        assert set(each["versions"]) <= set(versions)
        assert each["is_rising"]
        assert each["gap"] < ROUNDING, judged
        assert each["other"] > 100 * ROUNDING
        assert each["agreement"] == 1.0
        assert (each["rows"], each["missing"]) == (each["tokens"] - 1, 1)
