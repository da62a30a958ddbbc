"""Run by `buffer` in a Python that has TransferQueue: prints seconds by step as JSON.

Arguments: groups, timed rounds, storage units.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from primeblocks.async_loop import Group, StalenessPolicy
from primeblocks.async_loop.shared import SharedRolloutBuffer

from .rollouts import digest, make_groups

WARM, BATCH = 2, 32
ARRAYS = ("tokens", "logprobs", "versions", "loss_mask")
FIELDS = (*ARRAYS, "routes", "prompt_length", "reward", "version", "ordinal")
PARTITION, TASK = "train", "trainer"


def _jagged(arrays: list[np.ndarray]) -> torch.Tensor:
    tensors = [torch.from_numpy(np.array(array)) for array in arrays]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def as_fields(groups: list[Group]) -> TensorDict:
    """The same bytes as columns: a row is a rollout."""
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    columns: dict[str, Any] = {
        name: _jagged([getattr(rollout, name) for _, rollout in rows]) for name in ARRAYS
    }
    columns["routes"] = _jagged(
        [np.frombuffer(rollout.attachments["routes"], np.uint8) for _, rollout in rows]
    )
    columns["prompt_length"] = torch.tensor([rollout.prompt_length for _, rollout in rows])
    columns["reward"] = torch.tensor([rollout.reward for _, rollout in rows])
    columns["version"] = torch.tensor([group.version for group, _ in rows])
    columns["ordinal"] = torch.tensor([group.ordinal for group, _ in rows])
    return TensorDict(columns, batch_size=len(rows))


def keys_of(groups: list[Group]) -> list[str]:
    return [f"{group.ordinal}-{i}" for group in groups for i in range(len(group.rollouts))]


class _Side:
    """What both processes have: each times its own calls, for they are started at a distance."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        transfer_queue.init(OmegaConf.create(settings))

    def ready(self) -> None:
        pass


@ray.remote(num_cpus=0)
class Producer(_Side):
    def __init__(self, settings: dict[str, Any], name: str, count: int) -> None:
        super().__init__(settings)
        self.groups = make_groups(count)
        self.fields = as_fields(self.groups)
        self.by_group = [as_fields([group]) for group in self.groups]
        size = sum(group.nbytes for group in self.groups)
        self.buffer = SharedRolloutBuffer.create(
            name,
            capacity=count,
            capacity_bytes=size + size // 16,
            staleness=StalenessPolicy(2, correction="none: a benchmark"),
        )

    def sent(self) -> tuple[str, int]:
        rows = (
            [*(getattr(rollout, name) for name in ARRAYS), rollout.attachments["routes"]]
            for group in self.groups
            for rollout in group.rollouts
        )
        return digest(rows), sum(group.nbytes for group in self.groups)

    def put_ours(self) -> float:
        groups = [replace(group) for group in self.groups]  # Without what it has computed already.
        start = time.perf_counter()
        for group in groups:
            self.buffer.put(group, timeout_s=600)
        return time.perf_counter() - start

    def put_theirs(self) -> float:
        start = time.perf_counter()
        transfer_queue.kv_batch_put(
            keys=keys_of(self.groups), partition_id=PARTITION, fields=self.fields
        )
        return time.perf_counter() - start

    def put_theirs_by_group(self) -> float:
        start = time.perf_counter()
        for group, fields in zip(self.groups, self.by_group, strict=True):
            transfer_queue.kv_batch_put(
                keys=keys_of([group]), partition_id=PARTITION, fields=fields
            )
        return time.perf_counter() - start

    def close(self) -> None:
        self.buffer.unlink()
        self.buffer.close()
        transfer_queue.close()


@ray.remote(num_cpus=0)
class Consumer(_Side):
    def __init__(self, settings: dict[str, Any], name: str, count: int) -> None:
        super().__init__(settings)
        self.buffer = SharedRolloutBuffer.attach(name)
        self.count = count
        self.groups: list[Group] = []
        self.fields: list[TensorDict] = []
        self.keys = [f"{ordinal}-{i}" for ordinal in range(count) for i in range(8)]

    def forget(self) -> None:
        self.groups, self.fields = [], []

    def take_ours(self, batch: int) -> float:
        start = time.perf_counter()
        for _ in range(self.count // batch):
            self.groups += self.buffer.take(batch, version=3, timeout_s=600)
        return time.perf_counter() - start

    def get_theirs(self) -> float:
        """All that was put, by keys that need no asking; clearing it is not timed."""
        start = time.perf_counter()
        self.fields = [transfer_queue.kv_batch_get(keys=self.keys, partition_id=PARTITION)]
        return time.perf_counter() - start

    def get_theirs_by_batch(self, batch: int) -> float:
        """Batches of whatever has arrived, cleared as they are taken."""
        client = transfer_queue.get_client()
        start = time.perf_counter()
        for _ in range(self.count // batch):
            while True:
                meta = client.get_meta(
                    data_fields=list(FIELDS),
                    batch_size=8 * batch,
                    partition_id=PARTITION,
                    task_name=TASK,
                )
                if meta.size:
                    break
                time.sleep(0.001)
            self.fields.append(client.get_data(meta))
            client.clear_samples(meta)
        return time.perf_counter() - start

    def clear_theirs(self) -> float:
        start = time.perf_counter()
        transfer_queue.kv_clear(keys=self.keys, partition_id=PARTITION)
        return time.perf_counter() - start

    def taken_ours(self) -> str:
        groups = sorted(self.groups, key=lambda group: group.ordinal)
        return digest(
            [*(getattr(rollout, name) for name in ARRAYS), rollout.attachments["routes"]]
            for group in groups
            for rollout in group.rollouts
        )

    def taken_theirs(self) -> str:
        rows: list[tuple[int, list[np.ndarray]]] = []
        for fields in self.fields:
            columns = [[x.numpy() for x in fields[name].unbind()] for name in (*ARRAYS, "routes")]
            ordinals = fields["ordinal"].flatten().tolist()
            rows += zip(ordinals, map(list, zip(*columns, strict=True)), strict=True)
        rows.sort(key=lambda row: row[0])
        return digest(arrays for _, arrays in rows)

    def close(self) -> None:
        self.buffer.close()
        transfer_queue.close()


def measure(count: int, runs: int, units: int) -> dict[str, Any]:
    """All ways of every round in turn; each has to bring the bytes that were sent."""
    settings = {
        # An empty answer instead of a wait of seconds, where a batch is not complete.
        "controller": {"polling_mode": True},
        "backend": {"SimpleStorage": {"num_data_storage_units": units}},
    }
    ray.init(
        num_cpus=8, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False
    )
    name = f"benchmark-{os.getpid()}"
    producer = Producer.remote(settings, name, count)
    ray.get(producer.ready.remote())
    consumer = Consumer.remote(settings, name, count)
    sent, nbytes = ray.get(producer.sent.remote())
    seconds: dict[str, list[float]] = defaultdict(list)

    def both(put: Any, take: Any) -> float:
        start = time.perf_counter()
        ray.get([put, take])
        return time.perf_counter() - start

    for number in range(WARM + runs):
        taken = {}
        taken["put"] = ray.get(producer.put_ours.remote())
        taken["take"] = ray.get(consumer.take_ours.remote(count))
        check("taken", ray.get(consumer.taken_ours.remote()), sent)
        ray.get(consumer.forget.remote())
        taken["their_put"] = ray.get(producer.put_theirs.remote())
        taken["their_get"] = ray.get(consumer.get_theirs.remote())
        check("got", ray.get(consumer.taken_theirs.remote()), sent)
        ray.get(consumer.forget.remote())
        taken["their_clear"] = ray.get(consumer.clear_theirs.remote())
        taken["stream"] = both(producer.put_ours.remote(), consumer.take_ours.remote(BATCH))
        check("streamed", ray.get(consumer.taken_ours.remote()), sent)
        ray.get(consumer.forget.remote())
        taken["their_stream"] = both(
            producer.put_theirs_by_group.remote(), consumer.get_theirs_by_batch.remote(BATCH)
        )
        check("got as a stream", ray.get(consumer.taken_theirs.remote()), sent)
        ray.get(consumer.forget.remote())
        if number >= WARM:
            for key, value in taken.items():
                seconds[key].append(value)
    ray.get(consumer.close.remote())
    ray.get(producer.close.remote())
    ray.shutdown()
    return {"bytes": nbytes, "seconds": seconds}


def check(what: str, found: str, sent: str) -> None:
    if found != sent:
        raise AssertionError(f"{what}: digest {found}; {sent} was put")


if __name__ == "__main__":
    measured = measure(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(measured))
