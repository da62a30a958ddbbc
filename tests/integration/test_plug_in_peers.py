"""examples/plug_in in TRL, verl and torchtitan, which scripts/peers installs."""

import asyncio
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from primeblocks.testing import ranks, tiny_models

from .plug_in import FOLDER, as_sent, example, plain_loss, received

STEPS = 3
BOTH_CLIPS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")  # of verl

# Of the hosts: they warn of versions, of devices, and of what they deprecate.
pytestmark = pytest.mark.filterwarnings("default")


def imported(monkeypatch, name, *packages):
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is tested by scripts/peers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return example(monkeypatch, name)


def slopes(loss, model):
    return torch.autograd.grad(loss, [model.lm_head.weight], retain_graph=True)[0]


# --- TRL -----------------------------------------------------------------------------------------


def test_trl_grpo(monkeypatch, tmp_path):
    host = imported(monkeypatch, "trl_grpo", "trl", "datasets")
    monkeypatch.setattr(host, "NAME", f"test-trl-{os.getpid()}")
    seen = []

    class Both(host.PolicyTrainer):
        """Compares with TRL's own loss, also for log-probabilities of an older policy."""

        def _compute_loss(self, model, inputs):
            ours = super()._compute_loss(model, inputs)
            chance = torch.Generator().manual_seed(len(seen))
            older = 0.3 * torch.randn(inputs["completion_ids"].shape, generator=chance) - 3.4
            older = inputs | {"old_per_token_logps": older}
            tools = (torch.rand(older["completion_ids"].shape, generator=chance) < 0.8).long()
            ratio = 2 * torch.rand(len(tools), 1, generator=chance)  # of sequences
            of_vllm = {"tool_mask": tools, "importance_sampling_ratio": ratio}
            for each in (inputs, older, older | of_vllm):
                self.use_vllm = "importance_sampling_ratio" in each
                mine = super()._compute_loss(model, each)
                theirs = host.GRPOTrainer._compute_loss(self, model, each)
                seen.append(theirs.item())
                torch.testing.assert_close(mine, theirs)
                torch.testing.assert_close(slopes(mine, model), slopes(theirs, model))
            self.use_vllm = False
            return ours

    torch.use_deterministic_algorithms(False)  # TRL sums with index_add_.
    trainer = host.build(str(tmp_path), kind=Both, steps=STEPS)
    trainer.train()
    assert len(set(seen)) == len(seen) == 3 * 2 * STEPS
    held = received(host.NAME, STEPS)
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(held.pop(name), as_sent(name, weight)), name
    assert not held


# --- verl ----------------------------------------------------------------------------------------


def responses():
    """Random responses as verl's actor gets them, with a mask that is not full."""
    from tensordict import TensorDict

    chance = torch.Generator().manual_seed(0)
    rows, prompt, answer = 4, 3, 9
    lengths = torch.tensor([9, 5, 7, 1])
    mask = torch.arange(answer) < lengths[:, None]
    nested = [
        torch.randn(prompt + int(length), generator=chance, dtype=torch.float64) - 2
        for length in lengths
    ]
    logprobs = torch.cat(nested).requires_grad_()
    values = {
        "prompts": torch.zeros(rows, prompt, dtype=torch.long),
        "responses": torch.zeros(rows, answer, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(rows, prompt, dtype=torch.bool), mask], 1),
        "response_mask": mask,
        "old_log_probs": torch.randn(rows, answer, generator=chance, dtype=torch.float64) - 2,
        "advantages": torch.randn(rows, answer, generator=chance, dtype=torch.float64),
        "rollout_is_weights": torch.rand(rows, answer, generator=chance, dtype=torch.float64),
    }
    return logprobs, TensorDict(values, batch_size=[rows])


@pytest.mark.parametrize("ranks_and_tokens", [(1, None), (2, 50)])
def test_verl_loss(monkeypatch, ranks_and_tokens):
    host = imported(monkeypatch, "verl_loss", "verl", "tensordict", "ray")
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    found = []
    for mode in (host.NAME, "vanilla"):
        config = FSDPActorConfig(
            rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28, clip_ratio_c=1.5,
            policy_loss=PolicyLossConfig(loss_mode=mode),
        )  # fmt: skip
        logprobs, data = responses()
        for name, value in zip(("dp_size", "batch_num_tokens"), ranks_and_tokens, strict=True):
            data.set_non_tensor(name, value)
        data.set_non_tensor("global_batch_size", None)
        loss, metrics = ppo_loss(config, {"log_probs": logprobs}, data)
        loss.backward()
        # Ours counts both clips in one number.
        names = ("actor/clipped",) if mode == host.NAME else BOTH_CLIPS
        clipped = sum(metrics[name].aggregate() for name in names)
        found.append((loss.detach(), logprobs.grad, clipped))
    assert found[0][0].isfinite()
    assert 0 < found[0][2] < 1
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs).to(ours))


class Adapter:
    """In the place of verl's vLLM: it keeps what it is given."""

    async def update_weights(self, weights, *, global_steps, wire_format):
        from verl.workers.rollout.utils import ensure_async_iterator as iterate

        assert wire_format == "named_tensors"
        self.step = global_steps
        self.held = {name: tensor.clone() async for name, tensor in iterate(weights)}


def _verl_syncs(folder, name):
    """Two trainer ranks, of which the first sends, and a rollout worker of verl."""
    import sys

    sys.path.insert(0, folder)
    import tiny
    import verl_weights  # noqa: F401
    from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker

    rank, model, seen = dist.get_rank(), tiny.model("bfloat16"), []
    trains = {"is_master": rank == 0} if rank < 2 else {}
    engine = CheckpointEngineRegistry.new("primeblocks", bucket_size=1 << 20, name=name, **trains)
    worker = object.__new__(CheckpointEngineWorker)  # Its __init__ starts Ray's process group.
    worker.checkpoint_engine, worker.server_adapter = engine, Adapter()
    for step in range(3):
        weights = model.state_dict()
        engine.prepare()
        assert engine.build_topology(2, 1, [None] * 3) == ({}, {})
        engine.init_process_group()
        if rank < 2:
            seen.append(asyncio.run(engine.send_weights(iter(weights.items()), global_steps=step)))
        else:
            asyncio.run(worker.update_weights(global_steps=step))
            assert worker.server_adapter.step == step
            assert worker.server_adapter.held.keys() == weights.keys()
            for key, tensor in weights.items():
                assert torch.equal(worker.server_adapter.held[key], tensor), key
        engine.finalize()
        dist.barrier()
        with torch.no_grad():
            model.lm_head.weight[step] += 1
    return seen


def test_verl_weights(monkeypatch):
    imported(monkeypatch, "verl_weights", "verl", "ray")
    sent, other, _ = ranks.run(_verl_syncs, str(FOLDER), f"test-verl-{os.getpid()}", world_size=3)
    full, *deltas = (metrics["sync/bytes"] for metrics in sent)
    assert max(deltas) < full / 50
    assert other == [None] * 3


# --- torchtitan ----------------------------------------------------------------------------------


def _torchtitan_trains(folder, here, name):
    import sys

    size, rank = dist.get_world_size(), dist.get_rank()
    os.environ |= {"WORLD_SIZE": f"{size}", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
    sys.path.insert(0, folder)
    import tiny
    import torchtitan_trainer as host

    trainer = host.build(here, steps=STEPS)
    (model,) = trainer.model_parts
    batch, losses = tiny.rollouts(host.ROLLOUTS), []
    ids = batch["input_ids"][:, :-1]
    trainer.open_publisher(name)
    with torch.no_grad():
        wanted = plain_loss(model(ids), batch).item()
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    trainer.train()
    # Of its own way to a checkpoint, which gathers shards and splits fused weights.
    whole = {
        key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for key, tensor in model.state_dict().items()
    }
    checkpoint = trainer.config.model_spec.state_dict_adapter(trainer.model_config, None)
    saved = {key: as_sent(key, one) for key, one in checkpoint.to_hf(whole).items()}
    held = received(name, STEPS) if rank == 0 else None
    dist.barrier()  # Its memory ends with its process.
    trainer.close()
    return losses, wanted, saved, held


@pytest.mark.parametrize("world_size", [1, 2])
def test_torchtitan_trainer(monkeypatch, tmp_path, world_size):
    imported(monkeypatch, "torchtitan_trainer", "torchtitan", "tensorboard", "datasets")
    name = f"test-torchtitan-{world_size}-{os.getpid()}"
    found = ranks.run(_torchtitan_trains, str(FOLDER), str(tmp_path), name, world_size=world_size)
    losses, wanted, saved, held = found[0]
    assert losses[0] == pytest.approx(wanted, abs=1e-6)
    assert losses[-1] < losses[0] - 0.02
    assert held.keys() == saved.keys()
    for key, tensor in held.items():
        assert torch.equal(tensor, saved[key]), key
    # transformers finds each of its weights under these names.
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    tiny = example(monkeypatch, "tiny")
    tiny_models.config("qwen3_moe", **tiny.SIZES).save_pretrained(tmp_path)
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
