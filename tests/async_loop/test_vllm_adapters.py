"""Completions of LoRA adapters on a real vLLM, with the version of the adapter, and its death."""

import asyncio
import importlib.util
import os
import signal
import time

import pytest
import torch

from primeblocks.async_loop import cache_salt
from primeblocks.async_loop.ledger import Draft
from primeblocks.errors import PrimeblocksError
from primeblocks.testing import tiny_models
from tests.deadlines import HANG_S, START_S
from tests.engine_job import call
from tests.weightsync.vllm_site import SIZES, AdapterTrainer

MISSING = [name for name in ("vllm", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
PROMPT = list(range(5, 75))  # Two pages, and some.
BASE_VERSION, LONG, SHORT = 5, 100, 12


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    tiny_models.save("qwen3", folder / "model", seed=0, dtype="float32", **SIZES)
    return call(_run, folder)


def _run(folder):
    return asyncio.run(_see(folder))


async def _see(folder):
    from primeblocks.async_loop.adapters.vllm import (
        VllmEngine,
        base_engine_args,
        generate_in_parts,
    )
    from primeblocks.weightsync.adapters.vllm import lora

    policy, critic = AdapterTrainer.pair(folder / "model", folder / "adapters")
    arguments = base_engine_args(
        folder / "model",
        seed=0,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        kv_bytes=16 << 20,
        max_loras=2,
        max_lora_rank=8,
    )
    arguments |= lora.lora_engine_args()
    async with await VllmEngine.start(arguments, timeout_s=START_S, version=BASE_VERSION) as engine:
        for trainer in (policy, critic):
            await lora.attach_lora(
                engine.llm, trainer.spec, trainer.plan, trainer.transport, timeout_s=HANG_S
            )

        async def load(trainer, receipt):
            return await lora.update_lora(engine.llm, trainer.spec.name, receipt, timeout_s=HANG_S)

        async def ask(lora_request, version, tokens=SHORT, **options):
            return (
                await engine.generate(
                    PROMPT,
                    max_tokens=tokens,
                    temperature=0.0,
                    timeout_s=HANG_S,
                    lora_request=lora_request,
                    adapter_version=version,
                    **options,
                )
            )[0]

        async def error(*asked):
            try:
                await ask(*asked)
            except PrimeblocksError as met:
                return type(met).__name__, str(met)
            return "", ""

        one = await load(policy, policy.publish(1))
        other = await load(critic, critic.publish(1))
        saw = {"pages": [(await ask(one, 1)).num_cached_tokens for _ in range(2)]}
        salted = {"cache_salt": cache_salt(1)}
        saw["salted_pages"] = [(await ask(one, 1, **salted)).num_cached_tokens for _ in range(2)]
        saved, in_parts = [], {"sample": 0, "part_tokens": 5, "timeout_s": 60}
        draft = Draft(0, {}, lambda *what: saved.append(what))
        in_parts |= {"max_tokens": SHORT, "temperature": 0.0}
        await generate_in_parts(
            engine, PROMPT, draft=draft, lora_request=one, adapter_version=1, **in_parts
        )
        second = policy.publish(2)
        # A request in flight while the next version is loaded.
        long = asyncio.create_task(ask(one, 1, LONG))
        while not engine.llm.output_processor.request_states:
            await asyncio.sleep(0)
        await engine.llm.pause_generation(mode="keep", clear_cache=False)  # Else it may end.
        two = await load(policy, second)
        saw["was_in_flight"] = not long.done()
        await engine.llm.resume_generation()
        seen = {"two": await ask(two, 2), "other": await ask(other, 1), "long": await long}
        draft = Draft(0, {0: saved[0][2]}, lambda *what: None)
        parts = await generate_in_parts(
            engine, PROMPT, draft=draft, lora_request=two, adapter_version=2, **in_parts
        )
        seen |= {"parts": parts, "base": await ask(None, None)}
        saw["pages_of_others"] = [seen[name].num_cached_tokens for name in ("two", "other", "base")]
        saw["versions"] = {name: answer.versions.tolist() for name, answer in seen.items()}
        saw["no_version"], saw["no_adapter"] = await error(one, None), await error(None, 1)
        saw["negative"] = await error(one, -1)
        saw["in_place"] = await error(type(one)("x", 7, "x", load_inplace=True), 1)
        await lora.remove_lora(engine.llm, one, timeout_s=HANG_S)
        saw["removed"], saw["after"] = await error(one, 1), await error(two, 2)
        pending = [asyncio.create_task(error(two, 2, LONG)) for _ in range(4)]
        await asyncio.sleep(0)  # They are sent.
        for pid in engine.pids:
            os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        saw["killed"] = [*await asyncio.gather(*pending), await error(two, 2)]
        saw["killed_s"] = time.monotonic() - killed_s
    saw["gaps"] = {
        "long": [_gap(policy, version, seen["long"]) for version in (1, 2)],
        "two": [_gap(policy, version, seen["two"]) for version in (2, 1)],
        "other": [_gap(critic, 1, seen["other"]), _gap(critic, 2, seen["other"])],
    }
    for trainer in (policy, critic):
        trainer.transport.close()
    return saw


@torch.no_grad()
def _gap(trainer, version, answer):
    """How far the log-probabilities are from those of a version of an adapter."""
    trainer.draw(version)
    logits = trainer.model(torch.tensor([[*answer.prompt, *answer.token_ids]])).logits[0]
    logprobs = logits[len(answer.prompt) - 1 : -1].log_softmax(-1)
    mine = logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    return float((mine - torch.tensor(answer.logprobs)).abs().max())


def test_tokens_have_the_version_of_their_adapter(saw):
    assert saw["was_in_flight"]
    assert saw["versions"] == {
        "long": [1] * LONG,
        "two": [2] * SHORT,
        "other": [1] * SHORT,
        "parts": [1] * 5 + [2] * 7,
        "base": [BASE_VERSION] * SHORT,
    }
    for right, wrong in saw["gaps"].values():
        assert right < 1e-4  # float32, in other kernels.
        assert wrong > 0.01


def test_pages_belong_to_one_version_of_one_adapter(saw):
    assert saw["pages"] == saw["salted_pages"] == [0, 64]
    assert saw["pages_of_others"] == [0, 0, 0]


def test_what_would_be_labelled_wrong_is_refused(saw):
    for name, message in {
        "no_version": "must be passed together",
        "no_adapter": "must be passed together",
        "negative": "a policy version must be an integer",
        "in_place": "load_inplace",
        "removed": "does not hold 'policy@1'",
    }.items():
        assert saw[name][0] == "UsageError"
        assert message in saw[name][1]
    assert saw["after"] == ("", "")


def test_a_killed_engine_fails_every_request_at_once(saw):
    assert [kind for kind, _ in saw["killed"]] == ["EngineError"] * 5
    assert saw["killed_s"] < HANG_S / 2
