"""TRL 1.16's real AsyncGRPOTrainer on our worker, with an engine of our own that answers at once.

Run by scripts/peers. Real vLLM: tests/integration/test_trl_async_grpo.py.
"""

import asyncio
import concurrent.futures
import itertools
import queue
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from primeblocks import async_loop, losses
from primeblocks.errors import ClosedError, DeadlineError, EngineError, UsageError
from primeblocks.testing import tiny_models
from primeblocks.weightsync import SharedMemoryTransport, Subscriber
from primeblocks.weightsync.adapters.trl import TrlTransfer
from tests.deadlines import HANG_S as TIMEOUT_S

pytest.importorskip("trl", reason="TRL is tested by scripts/peers")
datasets = pytest.importorskip("datasets", reason="TRL's trainers need datasets")

pytestmark = pytest.mark.filterwarnings("default")  # Of TRL, which calls itself experimental.

MODEL = {"num_layers": 1, "hidden": 32, "num_experts": 4, "top_k": 2, "vocab": 32}
PROMPTS, GROUP = 2, 4


@pytest.fixture(autouse=True)
def _own_determinism():
    torch.use_deterministic_algorithms(False)  # TRL sums with index_add_.


@pytest.fixture(scope="module")
def adapter():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from primeblocks.async_loop.adapters import trl as adapter
    return adapter


@pytest.fixture
def thread(adapter):
    with adapter.EventThread() as thread:
        yield thread


def conversation(prompt, *, version, sample):
    """Two turns: sampled tokens, then two of a tool, then sampled ones again."""
    drawn = np.random.default_rng([prompt, sample]).integers(4, 32, 4)
    tokens = [prompt, *drawn[:2], 30, 31, *drawn[2:]]
    reward = float((drawn % 2).mean())
    return async_loop.Rollout(
        tokens=np.array(tokens),
        prompt_length=1,
        logprobs=np.array([-3.0, -3.5, 0.0, 0.0, -3.25, -3.75]),
        versions=np.array([version, version, -1, -1, version, version]),
        finish_reason="stop",
        prompt_id=prompt,
        reward=reward,
        rewards={"odd": reward},
    )


def make_worker(adapter, thread, generate, *, bound=1, on_stale="wait", prompts=None, **options):
    policy = async_loop.StalenessPolicy(bound, on_stale=on_stale, correction="TRL's ratio")
    return adapter.TrlWorker(
        thread,
        prompts=itertools.cycle(range(4, 20)) if prompts is None else prompts,
        generate=generate,
        buffer=async_loop.RolloutBuffer(capacity=8, staleness=policy),
        advantages=losses.advantages.group_advantages,
        batch_size=PROMPTS,
        group_size=GROUP,
        max_in_flight=16,
        step_timeout_s=TIMEOUT_S,
        **options,
    )


def take_all(worker, count):
    taken = []
    while len(taken) < count:
        try:
            taken.append(worker.rollout_buffer.get(timeout=1.0))
        except queue.Empty:
            worker.check_health(TIMEOUT_S)
    return taken


def watch(worker, stale_after_s=TIMEOUT_S):
    """As TRL does while its queue is empty: until there is an error."""
    while True:
        worker.check_health(stale_after_s)


def test_samples_are_the_rollouts_with_their_mask(adapter, thread):
    async def generate(prompt, *, version, sample):
        return conversation(prompt, version=version, sample=sample)

    worker = make_worker(adapter, thread, generate)
    worker.update_model_version(1)
    worker.start()
    samples = take_all(worker, PROMPTS * GROUP)
    worker.stop()
    for sample in samples:
        same = conversation(sample.input_ids[0], version=1, sample=0)
        assert sample.model_version == 1
        assert sample.completion_mask.tolist() == [0, 1, 1, 0, 0, 1, 1]
        assert sample.old_log_probs.tolist() == [0.0, *same.logprobs]
        assert sample.input_ids[3:5].tolist() == [30, 31]
        assert sample.metrics["rewards/odd"] == sample.metrics["reward"]
    rewards = torch.tensor([s.metrics["reward"] for s in samples]).view(PROMPTS, GROUP)
    expected = losses.advantages.group_advantages(rewards)
    assert [s.advantage for s in samples] == expected.flatten().tolist()
    assert [s.group_id for s in samples] == [g for g in range(PROMPTS) for _ in range(GROUP)]
    with pytest.raises(ClosedError, match="stopped"):
        worker.check_health(1.0)


def test_batches_follow_the_versions_that_trl_names(adapter, thread):
    """A batch ahead of the trainer and no more, sampled by the policy that the engine has."""
    asked = []

    async def generate(prompt, *, version, sample):
        asked.append(version)
        return conversation(prompt, version=version, sample=sample)

    worker = make_worker(adapter, thread, generate)
    worker.update_model_version(1)
    worker.start()
    rows = PROMPTS * GROUP
    take_all(worker, 2 * rows)  # The batch of step 1, and the one that TRL looks into.
    thread.call(asyncio.sleep(0), timeout_s=TIMEOUT_S)
    assert set(asked) == {1}
    for version in (2, 3):
        assert worker.rollout_buffer.empty()
        worker.update_model_version(version)
        assert {s.model_version for s in take_all(worker, rows)} <= {version - 1, version}
        worker.check_health(TIMEOUT_S)
    worker.stop()


def test_an_engine_that_dies_is_an_error_of_the_trainer(adapter, thread):
    async def generate(prompt, *, version, sample):
        raise EngineError("the engine's process was ended by SIGKILL")

    retries = async_loop.scheduler.Retries(attempts=1, give_up_after=1)
    worker = make_worker(adapter, thread, generate, retries=retries)
    with pytest.raises(UsageError, match="not started"):
        worker.check_health(1.0)
    worker.start()
    with pytest.raises(EngineError, match="SIGKILL"):
        watch(worker)
    worker.stop()


def test_a_blocked_event_loop_is_an_error_within_its_deadline(adapter, thread):
    go_on = threading.Event()

    async def generate(prompt, *, version, sample):
        go_on.wait(TIMEOUT_S)  # What nobody should do.
        return conversation(prompt, version=version, sample=sample)

    worker = make_worker(adapter, thread, generate)
    worker.start()
    with pytest.raises(DeadlineError, match="gave no answer within 0.1 s"):
        watch(worker, 0.1)
    go_on.set()
    worker.stop()


def test_misuse_is_refused_with_the_reason(adapter, thread):
    async def generate(prompt, *, version, sample):
        return conversation(prompt, version=version, sample=sample)

    with pytest.raises(UsageError, match="micro-batch of the next step"):
        make_worker(adapter, thread, generate, bound=0)
    worker = make_worker(adapter, thread, generate, prompts=range(4, 6))
    with pytest.raises(UsageError, match="8 rows"):
        worker.config_args(world_size=3)
    worker.start()
    take_all(worker, PROMPTS * GROUP)
    worker.update_model_version(1)
    with pytest.raises(UsageError, match="prompts are used up"):
        watch(worker)


@pytest.fixture
def checkpoint(tmp_path):
    return str(tiny_models.save("qwen3_moe", tmp_path / "model", dtype="float32", **MODEL))


def train(adapter, thread, checkpoint, monkeypatch, *, generate, receive, steps, transport):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    from async_grpo import trl_on_cpu
    from trl.experimental.async_grpo import AsyncGRPOConfig

    worker = make_worker(
        adapter, thread, generate, retries=async_loop.scheduler.Retries(1, give_up_after=1)
    )
    transfer = TrlTransfer(
        transport,
        attach=receive.attach,
        update=receive.update,
        run=thread.call,
        dtype=torch.float32,
        full_every=2,
        timeout_s=TIMEOUT_S,
    )
    config = AsyncGRPOConfig(
        **worker.config_args(accumulate=2), output_dir=f"{checkpoint}/out", max_steps=steps,
        learning_rate=1e-2, use_cpu=True, bf16=False, gradient_checkpointing=False,
        disable_tqdm=True, report_to=[], save_strategy="no",
    )  # fmt: skip
    trainer = trl_on_cpu.build(
        model=checkpoint,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": [""]}),
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    trainer.train()
    return trainer, transfer


def test_the_attention_needs_no_kernel_of_the_hub_on_any_device(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    from async_grpo import trl_on_cpu

    peer = trl_on_cpu.async_grpo_trainer
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # The part of the constructor that registers TRL's own attention.
    monkeypatch.setattr(peer, "AsyncGRPOTrainer", peer.register_tree_attention)
    trl_on_cpu.build()
    attention = AttentionInterface()[trl_on_cpu.TREE_ATTENTION]
    bounds = torch.tensor([0, 3, 5])
    query, key, value = (torch.empty(1, heads, 5, 8, device="meta") for heads in (4, 2, 2))
    out, _ = attention(
        None, query, key, value, None, tree_kv_index=torch.arange(5), tree_cu_seqlens_q=bounds,
        tree_cu_seqlens_k=bounds, scaling=1.0,
    )  # fmt: skip
    assert out.shape == (1, 5, 4, 8)


class Engine:
    """A reader of the transport that keeps what it is given."""

    def __init__(self, transport):
        self.transport, self.versions, self.weights = transport, [], {}

    async def attach(self, plan):
        self.subscriber = Subscriber(plan, self._load, self.transport)

    def _load(self, tensors):
        self.weights = {name: tensor.clone() for name, tensor in tensors}

    async def update(self, receipt):
        self.subscriber.receive(receipt.version, timeout_s=TIMEOUT_S)
        self.versions.append(receipt.version)


def test_the_trainer_takes_steps_and_the_engine_has_its_weights(
    adapter, thread, checkpoint, monkeypatch
):
    async def generate(prompt, *, version, sample):
        assert version == engine.versions[-1], "the version is the engine's"
        return conversation(prompt, version=version, sample=sample)

    with SharedMemoryTransport(f"trl-test-{id(thread)}", owner=True) as transport:
        engine = Engine(transport)
        trainer, transfer = train(
            adapter, thread, checkpoint, monkeypatch,
            generate=generate, receive=engine, steps=4, transport=transport,
        )  # fmt: skip
        engine.subscriber.close()
    assert trainer.state.global_step == 4
    assert engine.versions == [1, 2, 3, 4, 5]
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert all(entry["sample/staleness_max"] <= 1 for entry in history)
    assert "sample/dropped_stale_total" not in history[-1]
    assert any("rollout/generate_s" in entry for entry in history)  # a log may have two steps
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(engine.weights[name], parameter.detach()), name
    with pytest.raises(ClosedError):
        transfer.send_weights(iter(()))


def test_a_death_in_the_middle_ends_training_with_its_error(
    adapter, thread, checkpoint, monkeypatch
):
    async def generate(prompt, *, version, sample):
        if version >= 2:
            raise EngineError("the engine's process was ended by SIGKILL")
        return conversation(prompt, version=version, sample=sample)

    with SharedMemoryTransport(f"trl-test-{id(thread)}", owner=True) as transport:
        engine = Engine(transport)
        with pytest.raises(EngineError, match="SIGKILL"):
            train(
                adapter, thread, checkpoint, monkeypatch,
                generate=generate, receive=engine, steps=50, transport=transport,
            )  # fmt: skip
        engine.subscriber.close()
    assert 2 <= len(engine.versions) <= 5


def test_a_call_of_a_thread_that_is_closed_meanwhile_says_so(adapter):
    thread = adapter.EventThread()

    async def waits():
        closing.start()
        await asyncio.Event().wait()

    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        thread.call(cancelled(), timeout_s=TIMEOUT_S)
    closing = threading.Thread(target=thread.close)
    with pytest.raises(ClosedError, match="closed during the call"):
        thread.call(waits(), timeout_s=TIMEOUT_S)
    closing.join()
