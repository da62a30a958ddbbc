"""A device that is none, in a process of its own: torch has it for good."""

import subprocess
import sys
from pathlib import Path

BODY = """
import pytest, torch
from tests.pretend import Device

with Device():
    x = torch.randn(4, 5).to("pretend").requires_grad_()
    weight = torch.randn(5, 6, device="pretend")
    (x @ weight).relu().sum().backward()
    right = torch.autograd.functional.jacobian(
        lambda x: (x @ weight.cpu()).relu().sum(), x.detach().cpu()
    )
    assert x.grad.device.type == "pretend"
    assert torch.equal(x.grad.cpu(), right)
    table = torch.zeros(3, 2, device="pretend")
    table[1:].fill_(2)
    table[torch.tensor([0])] = torch.tensor(7.0)  # Places, and one number: as on a GPU.
    assert table.tolist() == [[7, 7], [2, 2], [2, 2]]
    for mixed in (
        lambda: x @ weight.cpu(),
        lambda: table.index_add_(0, torch.tensor([1]), table[:1]),
        lambda: torch.cat([table, torch.zeros(1, 2)]),
        lambda: torch.zeros(3)[table[:, 0].long() % 3],
    ):
        with pytest.raises(RuntimeError, match="of the host"):
            mixed()
    assert (torch.tensor(1.0) + table).device.type == "pretend"
"""


def test_it_computes_and_does_not_mix():
    command = [sys.executable, "-c", BODY]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
