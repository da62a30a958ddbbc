"""Mutation score of a package: how many small errors its tests notice.

python scripts/mutants.py PACKAGE [--tests PATH ...] [--count 30] [--seed 0]

Works on a copy of the checkout. A mutant is one change of one expression or statement: a comparison
or an operator turned around, an integer one larger, a condition negated, a statement left out. One
that lives is printed with its line; some change nothing that can be seen (an error's words, a limit
that is never met), so compare scores of one seed, and read what lives. Needs a clean checkout.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr},
}
DEADLINE_S = 600.0


def is_place(node: ast.AST) -> bool:
    """Whether it can be changed; texts, annotations and imports are none."""
    match node:
        case ast.Compare(ops=[op]) | ast.BoolOp(op=op) | ast.BinOp(op=op):
            return type(op) in SWAPS
        case ast.Constant(value=value):
            return type(value) is int
    return isinstance(node, ast.If | ast.While | ast.IfExp | ast.AugAssign | ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )


def places(tree: ast.Module) -> list[Any]:
    nodes = list(ast.walk(tree))
    notes = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    noted = {id(node) for note in notes if note is not None for node in ast.walk(note)}
    return [node for node in nodes if is_place(node) and id(node) not in noted]


class Change(ast.NodeTransformer):
    """Change one node of a tree."""

    def __init__(self, chosen: ast.AST) -> None:
        self.chosen = chosen

    def visit(self, node: ast.AST) -> Any:
        if node is not self.chosen:
            return self.generic_visit(node)
        match node:
            case ast.Compare(ops=[op]):
                node.ops = [SWAPS[type(op)]()]
            case ast.BoolOp(op=op) | ast.BinOp(op=op):
                node.op = SWAPS[type(op)]()
            case ast.Constant(value=int(value)):
                node.value = value + 1
            case ast.If() | ast.While() | ast.IfExp():
                node.test = ast.UnaryOp(ast.Not(), node.test)
            case _:
                return ast.Pass()
        return node


def mutants(package: Path, count: int, seed: int) -> list[tuple[Path, int]]:
    """Return files and numbers of places, drawn from all of the package."""
    found = [
        (file, number)
        for file in sorted(package.rglob("*.py"))
        for number in range(len(places(ast.parse(file.read_text()))))
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def failure(copy: Path, tests: list[str]) -> str:
    """Return the end of what failing tests print, or nothing."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = {
        **os.environ,
        "PYTHONPATH": str(copy),
    }  # Processes that tests start import the copy, too.
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"longer than {DEADLINE_S:g} s"
    return f"{done.stdout[-4000:]}\nexit code {done.returncode}" if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("--tests", nargs="+", help="default: tests/PACKAGE")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tests = options.tests or [f"tests/{options.package}"]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
        if found := failure(copy, tests):
            raise SystemExit(f"{found}\n{' '.join(tests)} fails as it is")
        package = copy / "primeblocks" / options.package
        chosen = mutants(package, options.count, options.seed)
        noticed = 0
        for file, number in chosen:
            kept = file.with_suffix(".kept")
            shutil.copy(file, kept)
            tree = ast.parse(file.read_text())
            node = places(tree)[number]
            line = file.read_text().splitlines()[node.lineno - 1].strip()
            changed = ast.fix_missing_locations(Change(node).visit(tree))
            file.write_text(ast.unparse(changed) + "\n")
            if failure(copy, tests):
                noticed += 1
            else:
                print(
                    f"lives: {file.relative_to(copy)}:{node.lineno} ({type(node).__name__}) {line}",
                    flush=True,
                )
            kept.replace(file)
        print(f"{options.package}: {noticed} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
