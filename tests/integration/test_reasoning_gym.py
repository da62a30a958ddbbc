"""The example in short form: both arms are killed, go on, and keep their steps. Its calculator."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from primeblocks import weightsync
from primeblocks.errors import how_it_ended
from primeblocks.rollout import Group, Rollout
from primeblocks.testing import ranks, tiny_models
from tests.deadlines import JOB_S
from tests.engine_job import ENVIRONMENT

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, KILL_AT = 8, 6


def processes_of(out: Path) -> list[str]:
    """Command lines of what still runs with this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # It ended.
            continue
        found += [command] if str(out) in command else []
    return found


@pytest.mark.vllm
@pytest.mark.example
def test_an_agent_learns_with_and_without_replay_through_kills(tmp_path):
    pytest.importorskip("reasoning_gym", reason="`make test-examples` installs reasoning-gym")
    out = tmp_path / "out"
    command = [sys.executable, EXAMPLES / "reasoning_gym_grpo.py", "--out", out]
    command += ["--steps", STEPS, "--kill-at", KILL_AT, "--warm-steps", 120]
    log = tmp_path / "printed"
    with log.open("w") as file:
        code = subprocess.run(
            [*map(str, command)],
            env=os.environ | ENVIRONMENT,
            stdout=file,
            stderr=file,
            timeout=JOB_S,
            check=False,
        ).returncode
    assert code == 0, f"the example {how_it_ended(code)}\n{log.read_text()[-8000:]}"
    summary = json.loads((out / "curve.json").read_text())
    assert (out / "curve.svg").read_text().count("<svg") == 1
    assert processes_of(out) == []
    measured = []  # of both arms: k3 at one version, without replay and with it; routes that agree
    assert summary["killed_after"].keys() == summary["arms"].keys()
    for name, lines in summary["arms"].items():
        # Killed at step 6 or 7; weights were saved at step 5, which is policy 6.
        assert KILL_AT <= summary["killed_after"][name] < STEPS
        assert [each["version"] for each in lines if "resumed" in each] == [6]
        steps = [each for each in lines if "reward" in each]
        assert [each["version"] for each in steps] == [*range(2, STEPS + 2)]
        assert max(each["staleness"] for each in steps) <= 2
        assert sum(each["calls"] for each in steps) > 0
        measured += [each["mismatch"] for each in steps if "mismatch" in each]
        assert 0 <= lines[0]["solved_greedily"] <= 1
    without, imposed, agreement = map(statistics.mean, zip(*measured, strict=True))
    assert len(measured) == 4
    assert 0 < imposed < without
    assert 0.5 < agreement < 1


@pytest.fixture
def calculator(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from async_grpo.calculator import Calculator

    return Calculator


def test_the_calculator_answers_and_ends_what_is_late(calculator):
    asked = ["92 - 12", "56 - -1218", "80 / 16", "7 / 2", "9**9**9", "1 + 1", "1 / 0", "(", "x"]
    asked += ["open('/etc/passwd')", "__import__('os').getpid()", "(1).real", "'a' * 9"]

    async def main():
        calculate = calculator(deadline_s=5.0)
        try:
            return [await calculate(each) for each in asked]
        finally:
            await calculate.close()

    said = asyncio.run(main())
    assert said[:4] == ["80", "1274", "5", "3.5"]
    assert said[4] == "error: no result within 5 s"
    assert said[5] == "2"
    assert all(each.startswith("error: ") for each in said[6:])


def test_a_cancelled_call_leaves_no_result_behind(calculator):
    async def main():
        calculate = calculator(deadline_s=60.0)
        try:
            assert await calculate("1 + 1") == "2"
            late = asyncio.create_task(calculate("9**9**9"))
            while calculate.calls < 2:
                await asyncio.sleep(0)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            return await calculate("2 + 3")
        finally:
            await calculate.close()

    assert asyncio.run(main()) == "5"


def test_the_calculators_process_can_open_nothing(calculator):
    """As if an expression could run any code: it gets no file, no socket and little memory."""
    body = """
import socket, sys
sys.path.insert(0, {folder!r})
from async_grpo import calculator
sys.stdin = iter(())
calculator.serve()
tried = [
    lambda: open({file!r}),
    lambda: socket.socket(),
    lambda: bytearray(calculator.MEMORY_BYTES),
]
for each in tried:
    try:
        each()
        print("done")
    except (OSError, MemoryError):
        print("refused")
"""
    code = body.format(folder=str(EXAMPLES), file=__file__)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=JOB_S, check=True
    )
    assert done.stdout.split() == ["ready", "refused", "refused", "refused"]


def test_a_run_keeps_its_newest_weights_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from async_grpo import saved

    versions = [saved.WARM_VERSION + saved.SAVE_EVERY * i for i in (1, 2, 3)]
    found = []

    def write(folder):
        """As the trainer does, after a look at what a kill at this moment would leave."""
        unfinished = folder.with_suffix(".unfinished")
        unfinished.mkdir(exist_ok=True)
        (unfinished / "weights").write_text(folder.name)
        found.append(sorted(path.name for path in tmp_path.glob("step-*")))
        unfinished.rename(folder)

    async def train():
        run = saved.SavedRun(tmp_path)
        run.close()
        run.journal = mock.Mock()  # of a loop that made these steps
        (tmp_path / "step-3.unfinished").mkdir()  # A kill left it.
        for version in range(run.version + 1, versions[-1] + 1):
            await run.save(write, version=version)

    asyncio.run(train())
    first, second, third = (f"step-{version}" for version in versions)
    assert found[0] == sorted(["step-3.unfinished", f"{first}.unfinished"])
    for later, names in zip((second, third), found[1:], strict=True):
        before = {second: first, third: second}[later]
        assert names == sorted([before, f"{later}.unfinished"])
    run = saved.SavedRun(tmp_path)
    run.close()
    assert (run.version, run.weights.name) == (versions[-1], third)
    assert [path.name for path in tmp_path.glob("step-*")] == [third]
    assert (run.weights / "weights").read_text() == third


LAYERS, EXPERTS, VOCABULARY, PROMPT = 2, 4, 64, 3


def _rollout(reward, length):
    chance = np.random.default_rng(length)
    rows = chance.random((length - 1, LAYERS, EXPERTS)).argsort(-1)[..., :2].astype(np.uint8)
    return Rollout(
        tokens=chance.integers(4, VOCABULARY, length),
        prompt_length=PROMPT,
        logprobs=-4 - chance.random(length - PROMPT),
        versions=np.zeros(length - PROMPT, int),
        finish_reason="stop",
        reward=reward,
        attachments={"routed_experts": rows},
    )


def _train(checkpoint, folder, use_replay):
    """Bytes that one step stores for backward, and its gradients: without and with recomputing."""
    sys.path.insert(0, str(EXAMPLES))
    from async_grpo.trainer import Trainer

    groups = [Group("a prompt", [_rollout(i % 2, 9 + 2 * i) for i in range(6)], version=0)]
    found = []
    for recompute in (False, True):
        transport = weightsync.SharedMemoryTransport(
            f"recompute-{recompute}", owner=torch.distributed.get_rank() == 0, root=folder
        )
        trainer = Trainer(
            checkpoint,
            torch.device("cpu"),
            transport,
            use_replay=use_replay,
            recompute=recompute,
        )
        stored, gradients = 0, {}

        def count(tensor):
            nonlocal stored
            stored += tensor.nbytes
            return tensor

        def keep(optimizer, *_, model=trainer.model, gradients=gradients):
            gradients.update({n: p.grad.full_tensor() for n, p in model.named_parameters()})

        trainer.optimizer.register_step_pre_hook(keep)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            trainer.train(groups)
        trainer.close()
        found.append((stored, gradients))
    return found


@pytest.mark.parametrize("use_replay", [True, False])
def test_a_trainer_that_recomputes_layers_stores_less_and_has_the_same_gradients(
    tmp_path, use_replay
):
    sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "top_k": 2, "vocab": VOCABULARY}
    checkpoint = tiny_models.save("qwen3_moe", tmp_path / "model", dtype="float32", **sizes)
    for each in ranks.run(_train, checkpoint, str(tmp_path), use_replay, world_size=2):
        (most, wanted), (least, found) = each
        assert least < most / 3
        assert wanted.keys() == found.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, msg=name)
