"""The words of the library: what docstrings begin with, one meaning a name, one spelling."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import primeblocks

PACKAGE = Path(primeblocks.__file__).parent
GLOSSARY = PACKAGE.parent / "docs" / "glossary.md"
# A docstring begins with a verb or a noun; these begin a clause.
OPENERS = {
    *("What", "How", "Which", "Nothing", "Where", "Who", "Whose", "Why"),
    *("So", "Those", "It", "There", "When"),
}
# What a host calls its own, or a name that is keyed by a word, or counts it.
HOSTS = {"adapters", "plugins"}
OTHERWISE = {"by", "of", "num"}
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_documents_are_in_plain_english():
    script = PACKAGE.parent / "scripts" / "prose.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_docstrings_are_in_plain_english():
    script = PACKAGE.parent / "scripts" / "prose.py"
    examples = (PACKAGE.parent / "examples").rglob("*.py")
    command = [sys.executable, script, *PACKAGE.rglob("*.py"), *examples, "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def _trees():
    files = sorted(PACKAGE.rglob("*.py"))
    return [(file.relative_to(PACKAGE).as_posix(), ast.parse(file.read_text())) for file in files]


def _opening_clauses(tree):
    """Public docstrings that begin with a clause: the name, and the first line."""
    for node in ast.walk(tree):
        name = getattr(node, "name", "the module")
        if not isinstance(node, ast.Module | DEFINITIONS) or name.startswith("_"):
            continue
        text = ast.get_docstring(node) or "."
        if re.match(r"\w*", text)[0] in OPENERS:
            yield f"{name}: {text.splitlines()[0]}"


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = {file: [*_opening_clauses(tree)] for file, tree in _trees()}
    assert len(found) > 200
    assert {file: faults for file, faults in found.items() if faults} == {}
    assert [*_opening_clauses(ast.parse('def f():\n    """What it does."""'))] != []


def _table():
    """Return the glossary's table of names: a word, its types, and where it may stand."""
    for row in GLOSSARY.read_text().splitlines():
        if found := re.fullmatch(r"\| `(\w+)` \|(.*)\|(.*)\|", row):
            types, where = (re.findall(r"`([^`]+)`", cell) for cell in found.groups()[1:])
            yield found[1], types, None if "everywhere" in found[3] else where


def _names(tree):
    """Yield the names that a file gives, each with its annotation or None."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=kind):
                yield name, kind
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
                yield name, node.annotation
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                is_read = any("property" in ast.unparse(each) for each in node.decorator_list)
                yield name, node.returns if is_read else None
            case ast.ClassDef(name=name):
                yield name, None


def _misused(file, tree, table):
    """Yield the names in a file whose words stand elsewhere, or have another type."""
    home = file.removesuffix(".py").partition("/")[0]
    for name, kind in _names(tree):
        parts = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
        for word, types, where in table:
            if where is not None and home not in where and {word, f"{word}s"} & {*parts}:
                yield f"{name}: {word} is a word of {where}"
            if kind is None or not types or parts[-1:] != [word] or parts[0] in OTHERWISE:
                continue
            if ast.unparse(kind).removesuffix(" | None") not in types:
                yield f"{name}: {ast.unparse(kind)} is none of {types}"


def test_names_mean_what_the_glossary_says():
    table = [*_table()]
    defined = re.findall(r"^(\w[\w ]*)\n  \S", GLOSSARY.read_text(), re.MULTILINE)
    assert defined == sorted(set(defined))
    assert {word for word, _, where in table if where != []} <= {*defined, "versions"}
    assert {home for *_, where in table for home in where or ()} <= {
        path.stem for path in PACKAGE.iterdir()
    }
    found = {
        file: [*_misused(file, tree, table)]
        for file, tree in _trees()
        if not HOSTS & {*file.split("/")}
    }
    assert {file: faults for file, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "broken",
    [
        "def f(version: str): ...",
        "def f(*, base_version: Version | None): ...",
        "class A:\n    version: Version",
        "class A:\n    @property\n    def version(self) -> str: ...",
        "self.block_size = 1",
        "for slot in row: ...",
        "class Slots: ...",
        "lambda axis: axis",
        "def f(dim: str): ...",
    ],
)
def test_a_name_that_means_something_else_is_found(broken):
    assert len([*_misused("async_loop/x.py", ast.parse(broken), [*_table()])]) == 1


def _unkept(trees):
    """Yield the functions named `plan_*` that are not pure by their docstring, or print no plan."""
    tables = {
        each.name
        for tree in trees
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        and any(isinstance(part, ast.FunctionDef) and part.name == "table" for part in each.body)
    }
    for tree in trees:
        for each in ast.walk(tree):
            if isinstance(each, DEFINITIONS) and each.name.startswith("plan_"):
                is_pure = re.search(r"\bpure\b", ast.get_docstring(each) or "", re.IGNORECASE)
                if not is_pure or ast.unparse(each.returns) not in tables:
                    yield each.name


def test_a_plan_is_pure_and_prints_itself():
    trees = [tree for file, tree in _trees() if not HOSTS & {*file.split("/")}]
    assert [*_unkept(trees)] == []
    assert [*_unkept([ast.parse('def plan_x() -> int:\n    """Pure."""')])] == ["plan_x"]


def test_words_have_one_spelling():
    words = re.compile(r"quantis\w*", re.IGNORECASE)
    found = {
        file.relative_to(PACKAGE).as_posix(): sorted(set(words.findall(file.read_text())))
        for file in PACKAGE.rglob("*.py")
    }
    assert {file: spellings for file, spellings in found.items() if spellings} == {}
