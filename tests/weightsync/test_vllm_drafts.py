"""Models that draft tokens for a real vLLM: updated with their target, and told from stale ones."""

import itertools
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from primeblocks.errors import EngineError
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
from tests.replay.test_vllm_speculation import ACCEPTED, DRAFTS, SPECIAL, WORDS, _add_drafting_layer
from tests.replay.vllm_served import EXACT
from tests.weightsync.vllm_site import ENGINE, TIMEOUT_S, needs, sampling

pytestmark = needs("vllm")

HEAD = f"model.layers.{EXACT.num_layers}."
PREFIX = "draft.", HEAD
SHARED = HEAD + "embed_tokens.weight", HEAD + "shared_head.head.weight"


TARGET = {"dtype": "float32", "init_std": 0.06, "vocab": SPECIAL + WORDS}
# Kinds of drafters, and whether they start only with --full.
KINDS = {"mtp": False, "eagle": False, "draft_model": True, "eagle3": True, "medusa": True}


@pytest.fixture(scope="module", params=KINDS)
def saw(request, tmp_path_factory):
    is_full = request.config.getoption("--full")
    if KINDS[request.param] and not is_full:
        pytest.skip("an engine more: --full")
    folder = tmp_path_factory.mktemp("drafts")
    if request.param == "mtp":
        tiny_models.save("glm4_moe", folder / "model", **TARGET)
        _add_drafting_layer(folder / "model")
    else:
        # EAGLE-3 reads hidden states of layers 2, 4 and 5 of 8.
        layers = 8 if request.param == "eagle3" else 2
        tiny_models.save("llama", folder / "model", num_layers=layers, **TARGET)
        _save_draft(request.param, folder / "model", folder / "draft")
    return request.param, call(_updated, folder, request.param, is_full)


def _save_draft(kind, target, path):
    """Write a random drafter, as its trainers name tensors."""
    if kind == "draft_model":
        tiny_models.save("llama", path, seed=1, num_layers=1, **TARGET)
        return
    path.mkdir()
    config = json.loads((target / "config.json").read_text())
    width, words = config["hidden_size"], config["vocab_size"]
    layer = "model.layers.0."
    block = {
        name.removeprefix(layer): tensor
        for name, tensor in load_file(target / "model.safetensors").items()
        if name.startswith(layer)
    }
    sizes: dict[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in block.items()}
    if kind == "medusa":
        rows = {"0.linear.weight": (width, width), "0.linear.bias": (width,)}
        rows["1.weight"] = (words, width)
        sizes = {f"{head}.{name}": shape for head in range(2) for name, shape in rows.items()}
        config = {"model_type": "medusa", "hidden_size": width, "vocab_size": words}
        config |= {"num_heads": 2, "medusa_fc_bias": True}
    elif kind == "eagle":
        del sizes["input_layernorm.weight"]
        sizes = {f"layers.0.{name}": shape for name, shape in sizes.items()}
        sizes["fc.weight"] = width, 2 * width
        config["num_hidden_layers"] = 1
    else:
        for name in ("q_proj", "k_proj", "v_proj"):
            sizes[f"self_attn.{name}.weight"] = sizes[f"self_attn.{name}.weight"][0], 2 * width
        sizes["hidden_norm.weight"] = (width,)
        sizes = {f"midlayer.{name}": shape for name, shape in sizes.items()}
        sizes |= {"fc.weight": (width, 3 * width), "norm.weight": (width,)}
        sizes["lm_head.weight"] = words, width
        config |= {"num_hidden_layers": 1, "draft_vocab_size": words}
        config["architectures"] = ["LlamaForCausalLMEagle3"]
    noise = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.ones(shape) if "norm" in name else 0.06 * torch.randn(shape, generator=noise)
        for name, shape in sizes.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


def _start(folder, kind):
    """The engine, and its drafter."""
    import vllm

    from primeblocks.plugins.vllm import register

    register()
    speculation = {"method": kind, "num_speculative_tokens": 2}
    if kind != "mtp":
        speculation["model"] = str(folder / "draft")
    llm = vllm.LLM(
        str(folder / "model"),
        dtype="float32",
        speculative_config=speculation,
        disable_log_stats=False,
        **ENGINE,
        **adapter.engine_args(),
    )
    core = llm.llm_engine.engine_core.engine_core
    return llm, core.model_executor.driver_worker.worker.get_draft_model()


def _updated(folder, kind, is_full):
    """What is found after each version, some loaded without their drafter."""
    weights, copies = load_file(folder / "model" / "model.safetensors"), {}
    if kind == "mtp":
        copies = {name: weights.pop(name) for name in SHARED}  # The engine has these in its target.
    else:
        weights = adapter.with_draft(weights, load_file(folder / "draft" / "model.safetensors"))
    prefix = PREFIX[kind == "mtp"]
    first = {name: tensor.clone() for name, tensor in weights.items()}
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=1 << 16)
    transport = SharedMemoryTransport("policy", owner=True, root=str(folder))
    publisher = Publisher(plan, weights, transport)
    llm, draft = _start(folder, kind)
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
            added = "" if kind == "mtp" else prefix
            draft.load_weights = lambda tensors: load([(n, kept[added + n]) for n, _ in tensors])
        receipt = publisher.publish(version, timeout_s=TIMEOUT_S)
        adapter.update_llm(llm, receipt, timeout_s=TIMEOUT_S)
        draft.load_weights = load

    found["flown"] = list(_flown(llm.llm_engine, 20 if is_full else 2, update, look))
    for case, kept in (("stale", first), ("fresh", None)):
        update(kept)
        found[case] = look()
        if is_full:
            print("accepted drafts:", kind, case, accepted())
    transport.close()
    return found | _others(llm, folder, first, weights, copies, prefix)


def _flown(engine, versions, update, look):
    """Updates while requests run: what is found after each, and whether requests still run."""
    names = [str(index) for index in range(4)]
    for index, name in enumerate(names):
        engine.add_request(name, {"prompt_token_ids": [SPECIAL + index, SPECIAL]}, sampling(900))
    for _ in range(versions):
        for _ in range(3):
            engine.step()
        with pytest.raises(EngineError, match="did not clear KV pages of earlier weights"):
            update()
        yield look(), engine.has_unfinished_requests()
    engine.abort_request(names)


def _others(llm, folder, first, weights, copies, prefix):
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
    bare = {n: t for n, t in weights.items() if not n.startswith(prefix)}
    found["bare"], found["logged"] = once("bare", bare), logged
    return found


def test_drafters_are_updated_with_their_target_while_requests_run(saw):
    _, found = saw
    assert found["start"].is_proved, found["start"].table()
    for seen, is_running in found["flown"]:
        assert is_running
        assert seen.is_proved, seen.table()
        assert not seen.unexpected


def test_a_stale_drafter_is_told_from_a_fresh_one(saw):
    kind, found = saw
    assert found["stale"].wrong
    prefix = PREFIX[kind == "mtp"]
    assert all(name.startswith(prefix) for name in found["stale"].wrong), found["stale"].table()
    assert found["fresh"].is_proved, found["fresh"].table()


def test_copies_of_what_a_drafter_shares_do_not_touch_the_target(saw):
    _, found = saw
    assert set(found["copies"].wrong) <= set(SHARED), found["copies"].table()


def test_a_drafter_that_the_trainer_lacks_is_left_and_logged_once(saw):
    _, found = saw
    assert found["bare"].is_proved, found["bare"].table()
    (told,) = found["logged"]
    assert "which drafts tokens, keeps its weights" in told
