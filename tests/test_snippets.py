"""Every snippet of Python in the README and the docs runs: a page's in order, in one namespace."""

import ast
import asyncio
import inspect
import os
import re
from pathlib import Path

import pytest
import torch

from primeblocks.testing import ranks

from .pages import PAGES

ROOT = Path(__file__).parent.parent
SHARED = ("docs/dsa.md", "docs/parallel.md")
VLLM = (
    "docs/async_loop.md",
    "docs/kvoffload.md",
    "docs/kvoffload_vllm.md",
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
    with PAGES[page]() as names, asyncio.Runner() as runner:
        for line, code in snippets(page):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compiled = compile("\n" * line + code, str(ROOT / page), "exec", flags=flags)
            pending = eval(compiled, names)
            if inspect.iscoroutine(pending):
                runner.run(pending)


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
    ranks.run(play, page, str(tmp_path), world_size=2 if page in SHARED else 1)
