"""What jaxtyping checks every annotation with, under pytest."""

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception

# An int does where a float is asked for, as in PEP 484: timeout_s=5.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typecheck(function):
    """Check the annotations of a function at every call.

    Not where beartype cannot: `Self` in a method, and Protocols that know no isinstance.
    """
    try:
        return _checked(function)
    except (BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception):
        return function
