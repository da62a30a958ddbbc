"""What a real vLLM samples where it is shown images, and its routes, as transformers has them."""

import asyncio
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from primeblocks import replay
from primeblocks.async_loop import cache_salt
from primeblocks.async_loop.ledger import pack_trajectory, unpack_trajectory
from primeblocks.attachments import Aligned
from primeblocks.capture import Conversation
from primeblocks.errors import UsageError
from primeblocks.losses.packing import pack
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import tiny_models
from primeblocks.weightsync import Publisher, describe, plan_sync
from primeblocks.weightsync.transports import FileTransport
from tests.deadlines import HANG_S, START_S
from tests.engine_job import call
from tests.integration.vision import (
    EARLY,
    END,
    LATE,
    START,
    A,
    alone,
    packed_logprobs,
    packed_routes,
    said,
)


def _retrain(worker):
    with torch.no_grad():
        for parameter in worker.model_runner.model.visual.parameters():
            parameter.mul_(1.5)


async def _serve(folder):
    from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args

    arguments = base_engine_args(
        folder,
        seed=0,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        kv_bytes=16 << 20,
        enable_return_routed_experts=True,
        skip_tokenizer_init=False,
        limit_mm_per_prompt={"image": 4, "video": 0},
    )
    made = []
    async with await VllmEngine.start(arguments, timeout_s=START_S) as engine:

        async def ask(conversation, prompt, shown):
            answers = await engine.generate(
                prompt, images=shown, n=8, max_tokens=5, timeout_s=HANG_S
            )
            # A random model may say that here is an image.
            answer = next(x for x in answers if max(x.token_ids) < END)
            values = {"images": tuple(shown), "routes": Aligned.rows(answer.routed_experts)}
            conversation.append(
                prompt,
                answer.token_ids,
                logprobs=answer.logprobs,
                versions=answer.versions,
                attachments=values,
            )
            return [*prompt, *answer.token_ids]

        for first, second in (LATE, EARLY):
            conversation = Conversation()
            prompt, shown = said([], *first)
            prompt, more = said(await ask(conversation, prompt, shown), *second)
            await ask(conversation, prompt, [*shown, *more])
            made += conversation.rollouts()
        prompt, shown = said([], *EARLY[0])
        greedy = {"images": shown, "max_tokens": 1, "temperature": 0.0, "timeout_s": 60}
        first = []
        for version in (0, 0, 1):
            if version:
                await engine.call(engine.llm.collective_rpc(_retrain), timeout_s=HANG_S)
            (answer,) = await engine.generate(prompt, **greedy, cache_salt=cache_salt(version))
            first += answer.logprobs
        with pytest.raises(UsageError, match="and 7 tokens"):
            await engine.generate(prompt, **greedy | {"images": [Aligned(A, 1, 8)]})
    return [pack_trajectory(rollout, name="r") for rollout in made], first


def _served(folder):
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # For a function of this file.
    return asyncio.run(_serve(folder))


async def _update(folder, root):
    """Show an image, update the vision tower in each mode, and show it again behind other words.

    Without a salt vLLM finds image features by the image alone, and KV pages by all before them.
    """
    from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args
    from primeblocks.weightsync.adapters import vllm as into_vllm

    weights = load_file(next(Path(folder).glob("*.safetensors")))
    source = describe(weights)
    arguments = base_engine_args(
        folder,
        seed=0,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        kv_bytes=16 << 20,
        skip_tokenizer_init=False,
        limit_mm_per_prompt={"image": 4, "video": 0},
    )
    found = []
    with FileTransport(root, owner=True) as transport:
        async with await VllmEngine.start(
            arguments | into_vllm.engine_args(), timeout_s=300
        ) as engine:

            async def ask(first):
                prompt, shown = said([], [first, START], [A])
                greedy = {"max_tokens": 1, "temperature": 0.0, "timeout_s": 300}
                (answer,) = await engine.generate(prompt, images=shown, **greedy)
                return prompt, answer.token_ids, answer.logprobs

            reads = await into_vllm.describe(engine.llm, source, timeout_s=300)
            plan = plan_sync([source], reads)
            publisher = Publisher(plan, weights, transport)
            await into_vllm.attach(engine.llm, plan, transport, timeout_s=300)
            found.append((0, *await ask(5)))
            for version, mode in enumerate(("continue", "recompute", "abort"), 1):
                for name, tensor in weights.items():
                    if ".visual." in name:
                        tensor.mul_(1.5)
                receipt = publisher.publish(version, timeout_s=300)
                await into_vllm.update(engine.llm, receipt, in_flight=mode, timeout_s=300)
                found.append((version, *await ask(5 + version)))
    return found


def _updated(folder, root):
    return asyncio.run(_update(folder, root))


NEEDS_VISION = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="vLLM's Qwen3-VL imports torchvision, which has no wheel for torch's CPU build on PyPI",
)


@pytest.mark.vllm
@NEEDS_VISION
def test_an_update_forgets_what_the_old_vision_tower_saw(tmp_path):
    path = tiny_models.save(
        "qwen3_vl_moe", tmp_path, dtype="float32", num_layers=3, hidden=64, vocab=64, init_std=0.2
    )
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    model.set_attn_implementation("eager")
    moved = []
    for version, prompt, (token,), logprobs in call(_updated, path, tmp_path / "sent"):
        before = alone_logprob(model, prompt, token)
        if version:
            with torch.no_grad():
                for parameter in model.model.visual.parameters():
                    parameter.mul_(1.5)
            moved.append(abs(alone_logprob(model, prompt, token) - before))
        assert abs(alone_logprob(model, prompt, token) - logprobs[0]) < 1e-4
    assert min(moved) > 1e-2  # Old features would show.


def alone_logprob(model, prompt, token):
    with torch.no_grad():
        logits = alone(model, prompt, [A])
    return float(torch.log_softmax(logits[-1].double(), -1)[token])


@pytest.mark.vllm
@NEEDS_VISION
def test_a_real_engine_saw_the_same_images(tmp_path):
    """What vLLM sampled in two turns each, and its routes, as transformers has them in a pack."""
    path = tiny_models.save(
        "qwen3_vl_moe", tmp_path, dtype="float32", num_layers=3, hidden=64, vocab=64, init_std=0.2
    )
    made, first = call(_served, path)
    rollouts = [unpack_trajectory(each, name="r") for each in made]
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    model.set_attn_implementation("eager")
    packed = pack(rollouts, [1, 0], per_token=["routes"], multiple_of=16)
    with torch.no_grad(), replay.record(routers(model)) as tape:
        logprobs = packed_logprobs(model, packed)
    assert [len(each.attachments["images"]) for each in rollouts] == [2, 3]
    routes = packed_routes(packed)
    assert replay.compare(routes, tape.routes).overall == 1.0
    mask = packed.loss_mask
    found = logprobs.numpy()[mask]
    np.testing.assert_allclose(found, packed.logprobs[mask], rtol=0, atol=1e-4)
    # Images are seen anew by a vision tower that has changed.
    assert abs(first[0] - first[1]) < 1e-4
    assert abs(first[0] - first[2]) > 1e-2
