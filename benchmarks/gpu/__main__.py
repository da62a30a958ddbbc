"""`python -m benchmarks.gpu --part A [--dry-run] [FOLDER]`: one part, and a JSON file of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..harness import commit
from .cases import CASES, PARTS
from .machine import describe_machine, refusal
from .runner import run_part

# Machines with a GPU are seldom at hand for longer; a dry run has the time that it takes.
BUDGET_S, DRY_S = 480.0, 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh")
    parser.add_argument("--part", choices=PARTS, required=True, help=str(PARTS))
    parser.add_argument("--dry-run", action="store_true", help="the same at small sizes on a CPU")
    parser.add_argument("--only", action="append", help="a case; may be given again")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("benchmarks/results"))
    options = parser.parse_args()
    said = describe_machine()
    print(json.dumps(said, indent=1))
    if not options.dry_run and (why := refusal(said)):
        raise SystemExit(why)
    cases = [case for case in CASES if case.part == options.part]
    if options.only:
        cases = [case for case in cases if case.name in options.only]
    options.folder.mkdir(parents=True, exist_ok=True)
    done = run_part(
        cases,
        report=options.folder / f"gpu_{options.part}{'_dry' if options.dry_run else ''}.json",
        head={"part": options.part, "commit": commit(), "machine": said},
        dry=options.dry_run,
        budget_s=DRY_S if options.dry_run else BUDGET_S,
    )
    bad = [each.case for each in done if each.status in {"failed", "timed out"}]
    if bad:
        raise SystemExit(f"part {options.part}: {', '.join(bad)} did not pass")


if __name__ == "__main__":
    main()
