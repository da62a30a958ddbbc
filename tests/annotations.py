"""The check of shapes at every call, in the modules whose annotations state shapes."""

import sys
from importlib.util import find_spec
from pathlib import Path

import jaxtyping

ROOT = Path(__file__).parents[1]


def typecheck(function):
    from beartype import BeartypeConf, beartype
    from beartype.roar import BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception

    try:
        # An int does where a float is asked for, as in PEP 484: timeout_s=5.
        return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)
    except (BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception):
        # It takes neither `Self` in a method nor Protocols that know no isinstance.
        return function


def check_shapes():
    """Check the calls of modules that are imported later. mypy checks all other annotations."""
    if find_spec("beartype"):  # Machines with a GPU lack it.
        files = (ROOT / "primeblocks").rglob("*.py")
        shaped = [file for file in files if "from jaxtyping import" in file.read_text()]
        names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in shaped]
        assert not {*names} & {*sys.modules}, "too late: these modules are imported"
        jaxtyping.install_import_hook(names, f"{__name__}.typecheck")
