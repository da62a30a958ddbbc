"""Trainer and engines run as the example says, and one engine is killed."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from primeblocks.errors import how_it_ended
from tests.deadlines import JOB_S
from tests.ports import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_processes.py"


@pytest.mark.example
def test_a_killed_engine_is_replaced_and_no_group_is_trained_on_twice(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:

        def start(side, **options):
            command = [sys.executable, EXAMPLE, side, tmp_path / "weights", "--address", address]
            process = stack.enter_context(subprocess.Popen(command, text=True, **options))
            stack.callback(process.kill)
            return process

        trainer = start("trainer", stdout=subprocess.PIPE)
        killed, lives = start("engine"), start("engine")
        lines = [trainer.stdout.readline() for _ in range(20)]
        killed.kill()
        newcomer = start("engine")
        lines += trainer.communicate(timeout=JOB_S)[0].splitlines()
        for process in (trainer, lives, newcomer):
            ended = process.wait(JOB_S)
            assert ended == 0, how_it_ended(ended)
        assert killed.wait(JOB_S) == -signal.SIGKILL
    steps = [re.fullmatch(r"step (\d+): mean reward (\S+), staleness (\d)\n?", x) for x in lines]
    assert [int(step[1]) for step in steps] == [*range(1, 61)]
    assert max(int(step[3]) for step in steps) <= 2
    rewards = [float(step[2]) for step in steps]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 2
