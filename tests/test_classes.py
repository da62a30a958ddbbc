"""Which class derives from which: errors as they are drawn, and nothing for reuse."""

import ast
import inspect
import re
from collections import Counter
from functools import cache
from pathlib import Path

from primeblocks import errors

PACKAGE = Path(errors.__file__).parent
# What a directory shares is inherited here still.
NOT_YET = {"FileTransport", "SharedMemoryTransport"}


@cache
def _defined():
    """Names of all classes of the package, each with its bases; a host's class may have a dot."""
    return [*_classes()]


def _classes():
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, [ast.unparse(base).partition("[")[0] for base in node.bases]


def test_no_class_is_subclassed_for_reuse():
    defined = _defined()
    ours = {name for name, _ in defined} - set(errors.__all__)
    heirs = {name for name, bases in defined if ours & set(bases)}
    assert len(ours) > 200
    assert heirs == NOT_YET


def test_the_tree_of_errors_is_drawn_as_it_is():
    drawn, branch = {}, ["Exception"]
    for line in errors.__doc__.splitlines():
        if found := re.match(r"([ │├└─]{4,})(\w+Error)(?: \((\w+)\))?", line):
            indent, name, other = found.groups()
            del branch[len(indent) // 4 :]
            drawn[name] = [branch[-1], *([other] if other else [])]
            branch.append(name)
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    real = {
        value.__name__: [base.__name__ for base in value.__bases__]
        for value in classes
        if issubclass(value, Exception)
    }
    assert len(real) > 10
    assert drawn == real


def test_no_two_classes_share_a_name():
    """But for private ones, which nobody meets outside their file."""
    found = Counter(name for name, _ in _defined() if not name.startswith("_"))
    assert {name for name, count in found.items() if count > 1} == set()
