"""Every snippet of Python in the README and the docs runs: a page's in order, in one namespace."""

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from primeblocks.testing import ranks

from .engine_job import call
from .pages import PAGES

ROOT = Path(__file__).parent.parent
SHARED = ("docs/dsa.md", "docs/parallel.md", "docs/recipes/batches.md", "docs/recipes/long.md")
VLLM = (
    "docs/async_loop.md",
    "docs/kvoffload_vllm.md",
    "docs/recipes/kv_cache.md",
    "docs/weightsync.md",
)


def snippets(page):
    """Yield the Python of a page: the line where it begins, and the code."""
    text = (ROOT / page).read_text()
    for found in re.finditer(r"^```py\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield text[: found.start(1)].count("\n"), found[1]


def play(page, folder):
    """Run a page's snippets as they are written, `await` included, in a folder of their own."""
    os.chdir(folder)
    torch.manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with PAGES[page]() as names, asyncio.Runner() as runner:
        for line, code in snippets(page):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compiled = compile("\n" * line + code, str(ROOT / page), "exec", flags=flags)
            pending = eval(compiled, names)
            if inspect.iscoroutine(pending):
                runner.run(pending)


# Names that stand-ins bring, or several snippets bind anew; torch types every attribute of a module
# as a tensor. In each page, for other options of the command would have mypy read all anew.
LENIENT = (
    "# mypy: allow-redefinition-new, local-partial-types",
    '# mypy: disable-error-code="name-defined, used-before-def, has-type, assignment, operator"',
)

LISTS = """
from primeblocks.async_loop import Group, Rollout
from primeblocks.kvoffload import HostTier

ends = Rollout(tokens=[5, 6], prompt_length=1, logprobs=[-1.0], versions=(3,), finish_reason="stop")
group = Group("a prompt", [ends], version=3)
print(float(ends.logprobs.sum()), ends.tokens[1:], group.rollouts[0].loss_mask.tolist())
sizes = {"page_bytes": 48, "attachment_bytes": 64}
HostTier(capacity_bytes=4096, **sizes).close()
"""


def test_snippets_are_typed(tmp_path):
    """By mypy, each page as one function, so that `await` is allowed; and what takes lists."""
    exec(LISTS, {})
    (tmp_path / "lists.py").write_text(LISTS)
    for page in PAGES:
        lines = []
        for line, code in snippets(page):
            lines += [""] * (line - len(lines)) + [f" {each}" for each in code.splitlines()]
        lines[next(at for at, each in enumerate(lines) if each) - 1] = "async def page():"
        lines[:2] = LENIENT  # Where the title of the page is.
        (tmp_path / f"{page.replace('/', '_')[:-3]}.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", *map(str, tmp_path.iterdir())]
    named = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=named, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_with_snippets_is_run():
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    counts = {str(file.relative_to(ROOT)): file.read_text().count("```py") for file in files}
    assert {page: count for page, count in counts.items() if count} == {
        page: len(list(snippets(page))) for page in PAGES
    }


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.vllm] * (page in VLLM)) for page in PAGES]
)
def test_snippets_run(page, tmp_path):
    if page in VLLM:
        call(play, page, str(tmp_path))
    else:
        ranks.run(play, page, str(tmp_path), world_size=2 if page in SHARED else 1)
