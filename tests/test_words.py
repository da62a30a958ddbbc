"""The words of the library: what docstrings begin with, one meaning a name, one spelling."""

import ast
import re
from pathlib import Path

import primeblocks
from primeblocks import errors

PACKAGE = Path(primeblocks.__file__).parent
# A docstring begins with a verb or a noun; these begin a clause.
OPENERS = {
    *("What", "How", "Which", "Nothing", "Where", "Who", "Whose", "Why"),
    *("So", "Those", "It", "There", "When"),
}
# Of these there is one each, as the glossary has it.
ONCE = ("Rollout", "Rollouts", "Routes", "UpdateReport", "Receipt", "PageKey", "KeptTokens")
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _trees():
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file.relative_to(PACKAGE).as_posix(), ast.parse(file.read_text())


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


def test_a_word_names_one_class():
    homes = {name: [] for name in ONCE}
    for file, tree in _trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in homes:
                homes[node.name].append(file)
    assert {name: files for name, files in homes.items() if len(files) != 1} == {}


def test_words_have_one_spelling():
    words = re.compile(r"quantis\w*", re.IGNORECASE)
    found = {
        file.relative_to(PACKAGE).as_posix(): sorted(set(words.findall(file.read_text())))
        for file in PACKAGE.rglob("*.py")
    }
    assert {file: spellings for file, spellings in found.items() if spellings} == {}


def test_the_tree_of_errors_is_drawn_as_it_is():
    drawn, branch = {}, []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([\s│├└─]*)(\w+Error)\b", line):
            depth = len(found[1]) // 4 - 1
            branch = [*branch[:depth], found[2]]
            drawn[found[2]] = branch[-2] if len(branch) > 1 else None
    classes = {name: getattr(errors, name) for name in errors.__all__ if name.endswith("Error")}
    bases = {name: value.__bases__[0].__name__ for name, value in classes.items()}
    assert drawn == bases | {"PrimeblocksError": None}
