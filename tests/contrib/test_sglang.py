"""The client of SGLang's endpoints against a fake of ours. No SGLang was run here.

`sglang_fake` says from which source it was written down. What holds against the fake is that the
client keeps its promises if SGLang behaves as that source reads.
"""

import json
import threading

import pytest
import torch
from safetensors.torch import save_file

from primeblocks.contrib.adapters.sglang import Sglang
from primeblocks.contrib.model_folders import ModelFolders
from primeblocks.errors import (
    DeadlineError,
    EngineError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from tests.contrib.sglang_fake import FakeSglang
from tests.deadlines import EXPIRES_S
from tests.deadlines import HANG_S as TIMEOUT_S


class Trainer:
    """Publishes random weights and lays out their folders; `start` is the first checkpoint."""

    def __init__(self, path):
        self.path, self.weights = path, _random(0)
        self.start = path / "start"
        self.start.mkdir()
        save_file(self.weights, self.start / "model.safetensors")
        (self.start / "config.json").write_text("{}")
        source = describe(self.weights)
        plan = plan_sync([source], source.whole(), bucket_bytes=1 << 10)
        self.transport = SharedMemoryTransport("policy", owner=True, root=str(path))
        self.publisher = Publisher(plan, self.weights, self.transport)
        self.folders = ModelFolders(
            plan, self.transport, like=self.start, root=path / "folders", keep=3
        )

    def folder(self, version):
        """New weights, published and laid out."""
        for name, tensor in _random(version).items():
            self.weights[name].copy_(tensor)
        self.publisher.publish(version, timeout_s=TIMEOUT_S)
        return self.folders.make(version, timeout_s=TIMEOUT_S)

    def close(self):
        self.publisher.close()
        self.transport.close()


def _random(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (8, 4), "layer.0.w": (4, 4), "layer.1.w": (4, 4), "norm": (4,)}
    return {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}


@pytest.fixture
def trainer(tmp_path):
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.close()


@pytest.fixture
def fake(trainer):
    fake = FakeSglang(trainer.start)
    yield fake
    fake.close()


@pytest.fixture
def engine(fake):
    engine = Sglang(fake.url)
    engine.attach(timeout_s=TIMEOUT_S)
    return engine


def assert_serves(fake, version, *, paused=False):
    """Whole weights of one version, under its label, generating or not."""
    for name, tensor in _random(version).items():
        assert torch.equal(fake.weights[name], tensor), name
    label = str(version) if version else "default"
    assert (fake.label, fake.scheduler_label) == (label, label)
    assert fake.blocked == paused
    if not paused:
        assert not fake.engine_paused


@pytest.mark.parametrize(
    ("in_flight", "running", "aborted", "cached"),
    [("continue", 5, 0, {"default"}), ("recompute", 5, 0, set()), ("abort", 0, 5, set())],
)
def test_an_update_and_what_becomes_of_requests(
    trainer, fake, engine, in_flight, running, aborted, cached
):
    fake.running, fake.waiting = 3, 2
    assert engine.version is None
    folder = trainer.folder(7)
    report = engine.update(folder, in_flight=in_flight, timeout_s=TIMEOUT_S)
    assert_serves(fake, 7)
    assert (fake.path, engine.version, report.version) == (str(folder.path), 7, 7)
    assert (fake.running, fake.waiting, fake.aborted) == (running, 0, aborted)
    assert fake.cached == cached
    assert report.checksum == fake.checksum()
    assert 0 < report.pause_seconds <= report.seconds


@pytest.mark.parametrize("taken", [0, 2])
def test_a_refused_load_goes_back_where_sglang_does_not(trainer, fake, engine, taken):
    engine.update(trainer.folder(1), timeout_s=TIMEOUT_S)
    folder = trainer.folder(2)
    # Its rollback reads the new path again, and so ends with the weights that it says it refused.
    fake.break_after[str(folder.path)] = [taken]
    with pytest.raises(TransferError, match=f"version 2: .*broken at tensor {taken}.* was loaded"):
        engine.update(folder, timeout_s=TIMEOUT_S)
    assert_serves(fake, 1)
    assert engine.version == 1
    engine.update(folder, timeout_s=TIMEOUT_S)
    assert_serves(fake, 2)


def test_a_folder_that_the_server_cannot_see(trainer, fake, engine):
    folder = trainer.folder(1)
    folder.path.rename(folder.path.with_name("elsewhere"))
    with pytest.raises(TransferError, match="no weights"):
        engine.update(folder, timeout_s=TIMEOUT_S)
    assert_serves(fake, 0)


def test_weights_that_changed_without_their_cache_are_taken_back(trainer, fake, engine):
    folder = trainer.folder(1)
    arrivals = [4]

    def arrive(path):
        fake.running = arrivals.pop() if arrivals else 0

    fake.before_load = arrive
    with pytest.raises(TransferError, match="cache was not flushed"):
        engine.update(folder, in_flight="recompute", timeout_s=TIMEOUT_S)
    assert_serves(fake, 0)


def test_an_engine_that_cannot_go_back_stays_paused(trainer, fake, engine):
    folder = trainer.folder(1)
    fake.break_after |= {str(folder.path): [1], str(trainer.start): [3]}
    with pytest.raises(EngineError, match="Going back to .*start failed too: .*broken at tensor 3"):
        engine.update(folder, timeout_s=TIMEOUT_S)
    assert fake.blocked
    engine.update(folder, timeout_s=TIMEOUT_S)
    assert_serves(fake, 1)


def test_weights_that_are_others_after_going_back_are_noticed(trainer, fake, engine):
    folder = trainer.folder(1)
    fake.break_after[str(folder.path)] = [1]
    save_file(_random(9), trainer.start / "model.safetensors")
    with pytest.raises(EngineError, match="its checksum changed"):
        engine.update(folder, timeout_s=TIMEOUT_S)
    assert fake.blocked


def test_a_server_that_ends_itself(trainer, fake, engine):
    folder = trainer.folder(1)
    fake.break_after[str(folder.path)] = [1, 1]  # SGLang does not catch what its rollback raises.
    with pytest.raises(EngineError, match="POST /update_weights_from_disk .* Restart the server"):
        engine.update(folder, timeout_s=TIMEOUT_S)
    with pytest.raises(EngineError, match="POST /pause_generation"):
        engine.update(folder, timeout_s=TIMEOUT_S)


CALLS = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


def _hang_at(endpoint, go_on):
    """What makes the first answer of an endpoint wait."""
    hung = []

    def hang(asked):
        if asked == endpoint and not hung:
            hung.append(asked)
            go_on.wait(TIMEOUT_S)

    return hang


@pytest.mark.parametrize("hangs_at", CALLS)
def test_a_hang_ends_at_the_deadline_and_the_retry_succeeds(trainer, fake, engine, hangs_at):
    folder = trainer.folder(1)
    go_on = threading.Event()
    fake.before_answer = _hang_at(hangs_at, go_on)
    with pytest.raises(DeadlineError, match=hangs_at):
        engine.update(folder, timeout_s=EXPIRES_S)  # Else it hangs for ever.
    # Paused where it may be torn; where nothing was loaded, or all of it, it is asked to go on.
    assert fake.blocked == (hangs_at not in {"/pause_generation", "/continue_generation"})
    go_on.set()
    engine.update(folder, timeout_s=TIMEOUT_S)
    assert_serves(fake, 1)


def test_what_may_be_torn_stays_paused_when_the_retry_fails_too(trainer, fake, engine):
    folder, go_on = trainer.folder(1), threading.Event()
    fake.before_load = lambda path: go_on.wait(TIMEOUT_S)
    with pytest.raises(DeadlineError, match="/update_weights_from_disk"):
        engine.update(folder, timeout_s=5)
    fake.before_answer = _hang_at("/pause_generation", go_on)
    with pytest.raises(DeadlineError, match="/pause_generation"):
        engine.update(folder, timeout_s=5)
    assert ("/continue_generation", {}) not in fake.asked
    go_on.set()
    engine.update(folder, timeout_s=TIMEOUT_S)
    assert_serves(fake, 1)


def test_answers_to_an_abandoned_load_are_not_taken_for_those_to_the_next(trainer, fake, engine):
    slow, broken = trainer.folder(1), trainer.folder(2)
    go_on = threading.Event()
    fake.before_load = lambda path: path == str(slow.path) and go_on.wait(TIMEOUT_S)
    fake.break_after[str(broken.path)] = [2]
    with pytest.raises(DeadlineError):
        engine.update(slow, timeout_s=5)
    threading.Timer(0.2, go_on.set).start()
    with pytest.raises(TransferError, match="broken at tensor 2"):
        engine.update(broken, timeout_s=TIMEOUT_S)
    assert_serves(fake, 0)


def test_a_server_that_dies(trainer, fake, engine):
    hangs_up_at = "/update_weights_from_disk"
    folder = trainer.folder(1)
    exchange = fake.answer

    def answer(method, path, body):
        fake.dead |= path == hangs_up_at
        return exchange(method, path, body)

    fake.answer = answer
    with pytest.raises(EngineError, match=f"{hangs_up_at} .*Restart the server"):
        engine.update(folder, timeout_s=TIMEOUT_S)


def test_answers_that_no_sglang_gives(trainer, fake, engine):
    folder = trainer.folder(1)
    fake.before_answer = lambda endpoint: b"[]" if endpoint == "/weights_checker" else None
    with pytest.raises(EngineError, match="answered 200 .*'per_engine_checksum' was expected"):
        engine.update(folder, timeout_s=TIMEOUT_S)
    assert fake.blocked


def test_a_server_that_says_it_holds_something_else(trainer, fake, engine):
    folder = trainer.folder(1)
    lies = [json.dumps({"weight_version": "1", "model_path": "elsewhere"}).encode()]
    fake.before_answer = lambda endpoint: lies.pop() if endpoint == "/model_info" and lies else None
    with pytest.raises(TransferError, match="holds version '1' from elsewhere"):
        engine.update(folder, timeout_s=TIMEOUT_S)
    assert_serves(fake, 0)


def test_several_engines_change_together(trainer, fake, engine):
    before, folder = trainer.folder(1), trainer.folder(2)
    engine.update(before, timeout_s=TIMEOUT_S)
    engine.pause("recompute", timeout_s=TIMEOUT_S)
    engine.load(folder, timeout_s=TIMEOUT_S)
    assert_serves(fake, 2, paused=True)
    engine.load(before, timeout_s=TIMEOUT_S)  # Another engine could not.
    engine.resume(timeout_s=TIMEOUT_S)
    assert_serves(fake, 1)


def test_attach_refuses_what_it_does_not_know(trainer, fake):
    fake.version = "0.5.22.post1"
    with pytest.raises(
        UnsupportedError, match=r"runs SGLang 0.5.22.post1; this client needs 0.5.23"
    ):
        Sglang(fake.url).attach(timeout_s=TIMEOUT_S)
    fake.version, fake.api_key = "0.6.0rc1", "secret"
    with pytest.raises(EngineError, match="401 .*Unauthorized"):
        Sglang(fake.url).attach(timeout_s=TIMEOUT_S)
    engine = Sglang(fake.url, api_key="secret")
    with pytest.raises(UsageError, match="call attach"):
        engine.update(trainer.folder(1), timeout_s=TIMEOUT_S)
    engine.attach(timeout_s=TIMEOUT_S)
    with pytest.raises(UsageError, match="pause"):
        engine.load(trainer.folder(2), timeout_s=TIMEOUT_S)
