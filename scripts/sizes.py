"""Lines and files of each package and of the tests, at one commit or beside another's.

python scripts/sizes.py [BEFORE]
"""

import subprocess
import sys
from collections import Counter

NOTHING = (0, 0)


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], capture_output=True, check=True).stdout


def sizes(commit: str) -> dict[str, tuple[int, int]]:
    """Return lines and files by package, and of tests."""
    lines, files = Counter[str](), Counter[str]()
    for name in git("ls-tree", "-r", "--name-only", commit).decode().split():
        parts = name.split("/")
        if not name.endswith(".py") or parts[0] not in ("primeblocks", "tests"):
            continue
        floor = "the floor" if len(parts) == 2 else parts[1]
        part = "tests" if parts[0] == "tests" else floor
        count = git("show", f"{commit}:{name}").count(b"\n")
        for each in (part, *(["package"] if part not in ("tests", "contrib") else [])):
            lines[each] += count
            files[each] += 1
    return {part: (lines[part], files[part]) for part in lines}


def main() -> None:
    now = sizes("HEAD")
    before = sizes(sys.argv[1]) if len(sys.argv) > 1 else {}
    for part in sorted({*now, *before}, key=lambda each: (each in ("package", "tests"), each)):
        columns = [f"{count:>8}" for count in (*before.get(part, NOTHING), *now.get(part, NOTHING))]
        print(f"{part:<12}" + "".join(columns if before else columns[2:]))


if __name__ == "__main__":
    main()
