"""`python -m benchmarks.gpu [--dry-run] [--only PART ...] [FOLDER]`: the suite, its JSON file."""

from __future__ import annotations

import argparse
import json
import re
from datetime import datetime
from pathlib import Path

from ..harness import commit
from .cases import CASES, PARTS
from .machine import describe_machine, refusal
from .runner import run_cases

# Machines with a GPU are seldom at hand for longer; a dry run has the time that it takes.
BUDGET_S, PART_S, DRY_S = 480.0, 180.0, 7200.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh")
    parser.add_argument("--dry-run", action="store_true", help="the same at small sizes on a CPU")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=(*PARTS, *(case.name for case in CASES if case.arguments)),
        metavar="PART",
        help=f"a block's tests and figures, or a case; again for more; {PART_S:g} s at most each",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("benchmarks/results/gpu"))
    options = parser.parse_args()
    said = describe_machine()
    print(json.dumps(said, indent=1))
    if not options.dry_run and (why := refusal(said)):
        raise SystemExit(why)
    only = options.only
    cases = [case for case in CASES if not only or {case.part, case.name} & {*only}]
    options.folder.mkdir(parents=True, exist_ok=True)
    at = commit()
    name = "-".join(filter(None, [said["device"], at, *only, "dry" * options.dry_run]))
    budget_s = min(BUDGET_S, PART_S * len(only)) if only else BUDGET_S
    done = run_cases(
        cases,
        report=options.folder / f"{re.sub(r'[^A-Za-z0-9-]+', '_', name)}.json",
        head={"commit": at, "date": datetime.now().isoformat("T", "minutes"), "machine": said},
        dry=options.dry_run,
        budget_s=DRY_S if options.dry_run else budget_s,
    )
    bad = [each.case for each in done if each.status in {"failed", "timed out"}]
    if bad:
        raise SystemExit(f"{', '.join(bad)} did not pass")


if __name__ == "__main__":
    main()
