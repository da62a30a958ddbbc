"""The example runs as it is, and trains as one rank would that never stopped."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from primeblocks.errors import how_it_ended
from tests.deadlines import JOB_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrained_to_shards.py"
STEPS, ROWS, TOKENS, RATE = 4, 8, 32, 1e-2


def _run(ranks, folder):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(ranks), EXAMPLE],
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert done.returncode == 0, f"torchrun {how_it_ended(done.returncode)}\n{done.stderr}"
    return done.stdout


def _one_rank(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(512, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def _write(path):
    """Every token goes to every expert: a near tie of two would be decided by rounding."""
    config = runpy.run_path(str(EXAMPLE))["CONFIG"]
    config.num_experts_per_tok = config.num_experts
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


@pytest.mark.example
def test_a_run_goes_on_on_fewer_ranks_as_one_rank_would(tmp_path):
    folder = tmp_path / "pretrained_to_shards"
    _write(folder / "pretrained")
    said = _run(4, tmp_path) + _run(2, tmp_path)
    counts = re.findall(r"^(\d) ranks, from step (\d): rank 0 holds (\d+) of (\d+)$", said, re.M)
    assert [(ranks, step) for ranks, step, *_ in counts] == [("4", "0"), ("2", "2")]
    assert all(int(held) * int(ranks) == int(whole) for ranks, _, held, whole in counts)
    before = AutoModelForCausalLM.from_pretrained(folder / "pretrained").state_dict()
    losses, weights = _one_rank(folder / "pretrained")
    printed = [float(x) for x in re.findall(r"^step \d, loss (\S+)$", said, re.M)]
    assert printed[0] == pytest.approx(losses[0], abs=1e-5)
    assert printed == pytest.approx(losses, abs=1e-3)
    (run,) = folder.glob("*pretrained_to_shards-pretrained")  # Named after its checkpoint.
    trained = AutoModelForCausalLM.from_pretrained(run / "trained").state_dict()
    # Adam takes a whole step where a gradient is rounding, so an element proves nothing. Weights
    # that differ by 1e-6 end within 0.03 of a tensor's update; moments that are lost, at 0.29.
    for name, was in before.items():
        off = (trained[name] - weights[name]).norm() / (weights[name] - was).norm()
        assert off <= 0.1, name
