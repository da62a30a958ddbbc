"""Folders that stock loaders read: whole, checked, named for their bytes."""

import errno
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from primeblocks.contrib.model_folders import ModelFolders
from primeblocks.errors import (
    CapacityError,
    CorruptionError,
    DeadlineError,
    PlanError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.testing import tiny_models
from primeblocks.testing.oracles import assert_same_bits
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import flip_sent


class Trainer:
    """Publishes random weights into shared memory."""

    def __init__(self, path):
        self.path = path
        self.weights = {n: torch.zeros(s) for n, s in {"a": (3, 5), "b": (7,)}.items()}
        self.like = path / "like"
        self.like.mkdir()
        save_file(self.weights, self.like / "model-00001-of-00001.safetensors")
        (self.like / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}')
        (self.like / "config.json").write_text('{"model_type": "ours"}')
        (self.like / "tokenizer.json").write_text("{}")
        (self.like / "deeper").mkdir()
        source = describe(self.weights)
        self.plan = plan_sync([source], source.whole(), bucket_bytes=1 << 10)
        self.transport = self.open(owner=True)
        self.publisher = Publisher(self.plan, self.weights, self.transport)

    def open(self, *, owner=False):
        return SharedMemoryTransport("policy", owner=owner, root=str(self.path))

    def publish(self, version):
        torch.manual_seed(version)
        for tensor in self.weights.values():
            tensor.copy_(torch.randn(tensor.shape))
        self.publisher.publish(version, timeout_s=TIMEOUT_S)
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def folders(self, **kwargs):
        kwargs = {"like": self.like, "root": self.path / "folders", **kwargs}
        return ModelFolders(self.plan, self.open(), **kwargs)

    def close(self):
        self.publisher.close()
        self.transport.close()


@pytest.fixture
def trainer(tmp_path):
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.close()


def assert_whole(folder, weights):
    loaded = load_file(folder.path / "model.safetensors")
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert_same_bits(loaded[name], tensor)
    files = {"model.safetensors", "config.json", "tokenizer.json"}
    assert {path.name for path in folder.path.iterdir()} == files
    assert (folder.path / "config.json").read_text() == '{"model_type": "ours"}'


def test_a_folder_holds_the_version_and_the_small_files(trainer):
    weights, folders = trainer.publish(3), trainer.folders()
    folder = folders.make(3, timeout_s=TIMEOUT_S)
    assert_whole(folder, weights)
    assert (folder.version, folder.path.parent) == (3, trainer.path / "folders")
    again = folders.make(3, timeout_s=TIMEOUT_S)
    assert again == folder
    with pytest.raises(DeadlineError):
        folders.make(4, timeout_s=0.05)
    assert [path.name for path in folder.path.parent.iterdir()] == [folder.path.name]


def test_folders_outlive_the_transport_and_the_oldest_go(trainer):
    made, folders = [], trainer.folders(keep=3)
    for version in range(1, 6):
        weights = trainer.publish(version)
        made.append((folders.make(version, timeout_s=TIMEOUT_S), weights))
    (trainer.path / "folders" / "mine").mkdir()
    folders.make(5, timeout_s=TIMEOUT_S)
    trainer.close()
    assert [folder.path.exists() for folder, _ in made] == [False, False, True, True, True]
    for folder, weights in made[2:]:
        assert_whole(folder, weights)
    assert (trainer.path / "folders" / "mine").exists()


def test_a_trainer_that_starts_over_takes_other_names(trainer):
    folders = trainer.folders()
    weights = trainer.publish(1)
    first = folders.make(1, timeout_s=TIMEOUT_S)
    trainer.close()
    trainer.transport = trainer.open(owner=True)
    trainer.publisher = Publisher(trainer.plan, trainer.weights, trainer.transport)
    trainer.weights["a"].zero_()
    trainer.publisher.publish(1, timeout_s=TIMEOUT_S)
    second = trainer.folders().make(1, timeout_s=TIMEOUT_S)
    assert first.path != second.path
    assert_whole(first, weights)
    assert not load_file(second.path / "model.safetensors")["a"].any()


def test_transformers_loads_a_folder(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_models.build("qwen3_moe", num_layers=1, hidden=32, num_experts=2, vocab=64, seed=0)
    model.save_pretrained(tmp_path / "start")
    weights = load_file(tmp_path / "start" / "model.safetensors")
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=1 << 20)
    for tensor in weights.values():
        tensor.normal_()
    with (
        SharedMemoryTransport("p", owner=True, root=str(tmp_path)) as transport,
        Publisher(plan, weights, transport) as publisher,
    ):
        publisher.publish(1, timeout_s=TIMEOUT_S)
        folders = ModelFolders(plan, transport, like=tmp_path / "start", root=tmp_path / "made")
        folder = folders.make(1, timeout_s=TIMEOUT_S)
    AutoModelForCausalLM.from_pretrained(folder.path).save_pretrained(tmp_path / "again")
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert_same_bits(tensor, weights[name])


def test_corrupt_bytes_make_no_folder(trainer):
    trainer.publish(1)
    flip_sent(trainer.transport, trainer.path, 1, -2)
    with pytest.raises(CorruptionError):
        trainer.folders().make(1, timeout_s=TIMEOUT_S)
    assert not (trainer.path / "folders").exists()
    weights = trainer.publish(2)
    assert_whole(trainer.folders().make(2, timeout_s=TIMEOUT_S), weights)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, CapacityError), (errno.EACCES, TransferError)]
)
def test_a_failure_leaves_nothing_and_the_retry_succeeds(trainer, monkeypatch, number, error):
    weights, folders = trainer.publish(1), trainer.folders()

    def full(source, to):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(error, match=f"version 1 was not made in .*{os.strerror(number)}"):
            folders.make(1, timeout_s=TIMEOUT_S)
    assert list((trainer.path / "folders").iterdir()) == []
    assert_whole(folders.make(1, timeout_s=TIMEOUT_S), weights)


def test_versions_must_cover_the_checkpoint(trainer):
    with pytest.raises(UsageError, match="keep=1 leaves no version"):
        trainer.folders(keep=1)
    save_file({"a": torch.zeros(3, 5), "c": torch.zeros(1)}, trainer.like / "x.safetensors")
    with pytest.raises(PlanError, match="1 of 3 tensors of .*like are not in the plan, .* 'c'"):
        trainer.folders()
    save_file({"a": torch.zeros(5, 3)}, trainer.like / "x.safetensors")
    with pytest.raises(PlanError, match=r"'a' is planned as \(3, 5\); .*like has \(5, 3\)"):
        trainer.folders()
    with pytest.raises(UnsupportedError, match="has no \\*.safetensors"):
        trainer.folders(like=trainer.path)


def test_every_tensor_must_be_checked_whole(tmp_path):
    trainer = Trainer(tmp_path)
    source = describe(trainer.weights)
    only_b = describe({"b": trainer.weights["b"]})
    trainer.plan = plan_sync([source], [only_b, source.whole()], bucket_bytes=1 << 10)
    with pytest.raises(PlanError, match="reader 0 of the plan wants only a part of 'a'"):
        trainer.folders()
    trainer.close()


def test_no_room_to_write(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path)
    trainer.publish(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3))
    with pytest.raises(CapacityError, match="has 3 bytes free; version 1 needs 88"):
        trainer.folders().make(1, timeout_s=TIMEOUT_S)
    trainer.close()
