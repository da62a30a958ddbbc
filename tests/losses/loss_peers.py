"""Operands of losses, and functions of a peer's file without its imports."""

import ast
import importlib.util
import math
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

BAND = {"clip_low": 0.2, "clip_high": 0.28}


def folder(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed; scripts/peers does")
    return Path(spec.submodule_search_locations[0])


def functions(file, *names, **known):
    """Functions of a file, compiled alone; methods too, and only those asked for."""
    found = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert {node.name for node in found} == set(names)
    for node in found:
        node.decorator_list = []
    tree = ast.Module([ast.parse("from __future__ import annotations").body[0], *found], [])
    space = {"torch": torch, "math": math, "F": F, **known}
    exec(compile(ast.fix_missing_locations(tree), str(file), "exec"), space)
    return types.SimpleNamespace(**{name: space[name] for name in names})


def draw(spread=0.8, *, by_rollout=False):
    """Operands `[4, 9]` with ratios within exp(+-spread): one row short, one of one token."""
    generator = torch.Generator().manual_seed(8)
    x = torch.rand(4, 4, 9, generator=generator, dtype=torch.float64)
    p = -0.05 - 2 * x[0]
    q = (p + spread * (2 * x[1] - 1)).clamp(max=-0.01)
    a = 4 * x[2] - 2
    if by_rollout:
        a = a[:, :1].expand(4, 9).contiguous()
    mask = torch.arange(9) < torch.tensor([9, 4, 1, 7])[:, None]
    return p.requires_grad_(), q, a, x[3] + 0.5, mask


def slope(value, p):
    return torch.autograd.grad(value, p, retain_graph=True)[0]


def same(mine, theirs, p, rel=1e-12):
    assert mine.item() == pytest.approx(theirs.item(), rel=rel)
    assert torch.allclose(slope(mine, p), slope(theirs, p), rtol=rel, atol=rel)
