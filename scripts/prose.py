"""Count the sentences of documents that break the rules of plain English which a program can see.

Usage: python scripts/prose.py [--list] FILE...
Without files: README.md, docs/*.md and docs/recipes/*.md. Of a Python file it reads the docstrings
of its module and of what is public there.
"""

import ast
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted((*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "recipes").glob("*.md")))
MAX_WORDS = 25
RULES = {
    "begins with a question word": re.compile(
        r"^(What|Who|Whoever|Whose|Where|Which|Of)\b(?!.*\?$)"
    ),
    "is no, is none, nobody": re.compile(
        r"\b(is|are|was|were) (no|none)\b|\bnobody\b|\bnothing of (it|them)\b|\bbut for\b",
        re.IGNORECASE,
    ),
    "semicolon": re.compile(r";"),
    "history": re.compile(r"\b(as before|no longer|used to be|was asked for)\b", re.IGNORECASE),
}
FENCE = re.compile(r"^(`{3,}|:{3,}|~{3,}).*?^\1\s*$", re.DOTALL | re.MULTILINE)
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|al|No|Fig)\.$")


def docstrings(source):
    """The docstrings of a module and of its public classes and functions, as Markdown."""

    def walk(node):
        if found := ast.get_docstring(node, clean=False):
            text = re.sub(r"^ *Source: .*", "", inspect.cleandoc(found), flags=re.DOTALL | re.M)
            text = re.sub(r":\n\n(?: {4}.*\n?|\n)+", ":\n\n", text)  # An example is code.
            text = re.sub(r"^(Args|Raises|Returns|Yields|Attributes):$", "\n\n", text, flags=re.M)
            # An entry of a section is a list item: its name begins no sentence.
            yield re.sub(r"^    [\w*`, .]+: ", "\n- ", text, flags=re.M)
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if named and not child.name.startswith("_"):
                yield from walk(child)

    return "\n\n".join(walk(ast.parse(source)))


def sentences(text):
    """Yield the sentences of a Markdown text outside code, tables and headings."""
    text = FENCE.sub("\n\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)|\n(?=[#|])", text):
        plain = paragraph.strip()
        if not plain or plain[0] in "#|<!" or plain.startswith(("---", "===", "(")):
            continue
        plain = re.sub(r"`[^`]*`", "CODE", plain)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        plain = re.sub(r"^\s*(?:[-*+]|\d+\.)\s+", "", plain)
        plain = re.sub(r"[*_]{1,2}(\S.*?\S|\S)[*_]{1,2}", r"\1", plain)
        plain = " ".join(plain.split())
        start = 0
        for end in re.finditer(r"[.!?:](?=\s+[A-Z\"(`]|$)", plain):
            piece = plain[start : end.end()]
            if ABBREVIATION.search(piece):
                continue
            yield piece.strip()
            start = end.end()
        if plain[start:].strip():
            yield plain[start:].strip()


def faults(sentence):
    """The rules that a sentence breaks."""
    found = [name for name, rule in RULES.items() if rule.search(sentence)]
    if len(sentence.split()) > MAX_WORDS:
        found.append(f"over {MAX_WORDS} words")
    return found


def main(names):
    shown = "--list" in names
    files = [Path(name) for name in names if not name.startswith("--")]
    total = wrong = 0
    for file in files or [ROOT / "README.md", *PAGES]:
        text = file.read_text()
        text = docstrings(text) if file.suffix == ".py" else text
        each = [(sentence, faults(sentence)) for sentence in sentences(text)]
        bad = [(sentence, rules) for sentence, rules in each if rules]
        total, wrong = total + len(each), wrong + len(bad)
        print(f"{len(bad):4d} of {len(each):4d}  {file}")
        if shown or len(files) == 1:
            for sentence, rules in bad:
                print(f"      {', '.join(rules)}: {sentence}")
    print(f"{wrong:4d} of {total:4d}  sentences break a rule")
    sys.exit(min(wrong, 1))


if __name__ == "__main__":
    main(sys.argv[1:])
