"""MTP heads of a real vLLM: updated with their target, and told from stale ones."""

import importlib.util
import itertools
import logging

import pytest
import torch
from safetensors.torch import load_file

from primeblocks.testing import tiny_models
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    describe,
    plan_sync,
    verify_engine,
)
from primeblocks.weightsync.adapters import vllm as adapter
from tests.engine_job import call
from tests.replay.test_vllm_speculation import (
    ACCEPTED,
    DRAFTS,
    METHODS,
    SPECIAL,
    WORDS,
    _add_drafting_layer,
)
from tests.replay.vllm_served import EXACT
from tests.weightsync.vllm_site import ENGINE, TIMEOUT_S, sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

HEAD = f"model.layers.{EXACT.num_layers}."
SHARED = HEAD + "embed_tokens.weight", HEAD + "shared_head.head.weight"


@pytest.fixture(scope="module")
def saw(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    tiny_models.save(
        "glm4_moe", folder / "model", dtype="float32", init_std=0.06, vocab=SPECIAL + WORDS
    )
    _add_drafting_layer(folder / "model")
    return call(_updated, folder, 20 if request.config.getoption("--full") else 4)


def _updated(folder, versions):
    """What is found after each version, some loaded without their head."""
    import vllm

    from primeblocks.plugins.vllm import register

    register()
    weights = load_file(folder / "model" / "model.safetensors")
    copies = {name: weights.pop(name) for name in SHARED}  # The engine has these in its target.
    first = {name: tensor.clone() for name, tensor in weights.items()}
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=1 << 16)
    transport = SharedMemoryTransport("policy", owner=True, root=str(folder))
    publisher = Publisher(plan, weights, transport)
    llm = vllm.LLM(
        str(folder / "model"),
        dtype="float32",
        speculative_config=METHODS["mtp"],
        disable_log_stats=False,
        **ENGINE,
        **adapter.engine_args(),
    )
    core = llm.llm_engine.engine_core.engine_core
    draft = core.model_executor.driver_worker.worker.get_draft_model()
    load = draft.load_weights
    found = {}
    adapter.attach_llm(llm, plan, transport)

    def look():
        return verify_engine(weights, adapter.observe_llm(llm), plan=plan)

    found["start"] = look()
    numbers = itertools.count(1)

    def counted():
        return {one.name: one.value for one in llm.get_metrics() if one.name in (ACCEPTED, DRAFTS)}

    def accepted():
        """The share of drafts that are accepted."""
        before = counted()
        prompts = [{"prompt_token_ids": [SPECIAL + n, SPECIAL]} for n in range(WORDS)]
        llm.generate(prompts, sampling(64), use_tqdm=False)
        after = counted()
        return (after[ACCEPTED] - before[ACCEPTED]) / (after[DRAFTS] - before[DRAFTS])

    def update(kept=None):
        version = next(numbers)
        noise = torch.Generator().manual_seed(version)
        for name, tensor in weights.items():
            step = torch.randn(tensor.shape, generator=noise) * 0.02
            tensor.copy_(first[name] + step.to(tensor.dtype))
        if kept is not None:
            draft.load_weights = lambda tensors: load([(n, kept[n]) for n, _ in tensors])
        receipt = publisher.publish(version, timeout_s=TIMEOUT_S)
        adapter.update_llm(llm, receipt, timeout_s=TIMEOUT_S)
        draft.load_weights = load

    found["flown"] = list(_flown(llm.llm_engine, versions, update, look))
    update(kept=first)
    found["stale"] = look()
    found["stale rate"] = accepted()
    update()
    found["fresh"] = look()
    found["fresh rate"] = accepted()
    transport.close()
    return found | _others(llm, folder, first, weights, copies)


def _flown(engine, versions, update, look):
    """Updates while requests run: what is found after each, and whether requests still run."""
    names = [str(index) for index in range(4)]
    for index, name in enumerate(names):
        engine.add_request(name, {"prompt_token_ids": [SPECIAL + index, SPECIAL]}, sampling(900))
    for _ in range(versions):
        for _ in range(3):
            engine.step()
        update()
        yield look(), engine.has_unfinished_requests()
    engine.abort_request(names)


def _others(llm, folder, first, weights, copies):
    """What is found with copies of shared tensors, and without a head."""
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("primeblocks").addHandler(handler)

    def once(name, tensors):
        source = describe(tensors)
        plan = plan_sync([source], source.whole(), bucket_bytes=1 << 16)
        transport = SharedMemoryTransport(name, owner=True, root=str(folder))
        adapter.attach_llm(llm, plan, transport)
        for version in (1, 2):
            receipt = Publisher(plan, tensors, transport).publish(version, timeout_s=TIMEOUT_S)
            adapter.update_llm(llm, receipt, timeout_s=TIMEOUT_S)
        transport.close()
        return verify_engine(tensors, adapter.observe_llm(llm), plan=plan)

    found = {"copies": once("copies", first | {n: t + 1 for n, t in copies.items()})}
    assert not logged
    bare = {n: t for n, t in weights.items() if not n.startswith(HEAD)}
    found["bare"], found["logged"] = once("bare", bare), logged
    return found


def test_heads_are_updated_with_their_target_while_requests_run(saw):
    assert saw["start"].is_proved, saw["start"].table()
    for found, is_running in saw["flown"]:
        assert is_running
        assert found.is_proved, found.table()
        assert not found.unexpected


def test_a_stale_head_is_told_from_a_fresh_one(saw):
    assert saw["stale"].wrong
    assert all(name.startswith(HEAD) for name in saw["stale"].wrong), saw["stale"].table()
    assert saw["fresh"].is_proved, saw["fresh"].table()
    print("accepted drafts, stale and fresh:", saw["stale rate"], saw["fresh rate"])


def test_copies_of_what_a_head_shares_do_not_touch_the_target(saw):
    assert set(saw["copies"].wrong) <= set(SHARED), saw["copies"].table()


def test_a_head_that_the_trainer_lacks_is_left_and_logged_once(saw):
    assert saw["bare"].is_proved, saw["bare"].table()
    (told,) = saw["logged"]
    assert "MTP, which drafts tokens, keeps its weights" in told
