"""Estimates of how soon pages are used again, learned from the waits of rollouts."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

__all__ = ["BACK", "Phase", "Reuse", "Waits", "learn"]

BACK = "back"  # follows a phase that ends with the use of its pages

_BINS = 256
# Fewer waits than _FEW tell nothing; more than _MANY are halved, so that old ones fade.
_FEW, _MANY = 8, 1 << 12
_PRICES = [1e-9 * 1.5**step for step in range(52)]  # of a place for one tick, up to about 1
_ROUNDS = 4  # phases considered between two uses: answer, tool, queue, one more
_ALL = "all"  # every wait, for phases of which little is known


@dataclass(slots=True)
class Waits:
    """Ends of one phase, by how long it took, in bins of a quarter octave.

    Args:
        ended: those followed by another phase or a use.
        gone: those followed by nothing.
        then: what followed.
    """

    ended: list[int] = field(default_factory=lambda: [0] * _BINS)
    gone: list[int] = field(default_factory=lambda: [0] * _BINS)
    then: Counter[Hashable] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.ended) + sum(self.gone)

    def add(self, ticks: int, then: Hashable | None) -> None:
        (self.ended if then is not None else self.gone)[_bin(ticks)] += 1
        if then is not None:
            self.then[then] += 1

    def fade(self) -> None:
        self.ended = [count >> 1 for count in self.ended]
        self.gone = [count >> 1 for count in self.gone]
        self.then = Counter({name: count >> 1 for name, count in self.then.items()})


@dataclass(frozen=True, slots=True)
class Phase:
    """The worth of a place in a tier as a function of how long the phase has lasted.

    Args:
        ages: ticks since the phase began, ascending.
        rates: at each age, ends per tick held, given up at the best moment.
        ends: rates, ascending, 0 first.
        worths: for each of `ends`, uses per tick held, if later phases may be given up too.
    """

    ages: Sequence[float]
    rates: Sequence[float]
    ends: Sequence[float]
    worths: Sequence[float]

    def worth(self, age: float) -> float:
        return _between(self.ends, self.worths, self._rate(age))

    def _rate(self, age: float) -> float:
        right = bisect_right(self.ages, age)
        if right == len(self.ages):
            return 0.0
        before, after = self.rates[right - 1], self.rates[right]
        share = (age - self.ages[right - 1]) / (self.ages[right] - self.ages[right - 1])
        if before == 0 or after == 0:
            return before * (1 - share) + after * share
        # Where nothing ends, the ticks until the best moment fall as fast as the age grows.
        return 1 / ((1 - share) / before + share / after)


class Reuse:
    """Waits by phase, and the worth of a place in each phase. Learned while it is used.

    Cost: O(1) a wait; worths are computed again once there are an eighth more waits, in a few
    milliseconds.
    """

    def __init__(self) -> None:
        self._waits: defaultdict[Hashable, Waits] = defaultdict(Waits)
        self._known: dict[Hashable, Phase] = {}
        self._count: Counter[Hashable] = Counter()
        self._new = 0

    def add(self, phase: Hashable, ticks: int, *, then: Hashable | None) -> None:
        """Add a phase of `ticks`; `then` is the next phase, `BACK`, or None if nothing followed."""
        for name in (phase, _ALL):
            waits = self._waits[name]
            waits.add(ticks, then)
            self._count[name] += 1
            if self._count[name] > _MANY:
                waits.fade()
                self._count[name] = waits.total
        self._new += 1

    def worth(self, phase: Hashable, age: int) -> float:
        """Return expected uses per tick that a page is kept from now to the best moment to give up.

        While nothing is known, the worth falls with the age.
        """
        if self._new > _FEW + self._count[_ALL] // 8:
            self._new = 0
            self._known = learn(self._waits)
        known = self._known.get(phase) or self._known.get(_ALL)
        return known.worth(age) if known is not None else 1 / (age + 1)


def learn(waits: Mapping[Hashable, Waits]) -> dict[Hashable, Phase]:
    """Learn the worths of each phase that has enough waits. Pure.

    A page is worth a place while it brings more uses per tick than others, so its worth is the
    highest price per tick at which keeping it, up to the best moment to give up, still pays: the
    Gittins index. Waits that take about the same time are worth more the longer they have lasted;
    where most are short and some very long, less. A phase that is followed by others is worth what
    those are, given up where they do not pay: a turn that may end with a test suite is kept for
    the tools that are quick.

    Source: Gittins, Bandit processes and dynamic allocation indices, 1979; hit density as a rule
    of eviction: Beckmann, Chen and Cidon, LHD, NSDI 2018.
    """
    curves = {name: _curve(found) for name, found in waits.items() if found.total >= _FEW}
    rates = {name: _rates(curve) for name, curve in curves.items()}
    hulls = {name: _hull(curve, rates[name]) for name, curve in curves.items()}
    values = {name: [1.0] * len(_PRICES) for name in curves}
    after: dict[Hashable, list[float]] = {}
    for _ in range(_ROUNDS):
        after = {name: _after(waits[name].then, values) for name in curves}
        values = {
            name: [
                max(then * ended - price * held for ended, held in hulls[name])
                for price, then in zip(_PRICES, after[name], strict=True)
            ]
            for name in curves
        }
    return {name: _phase(curves[name], rates[name], after[name]) for name in curves}


_Curve = list[tuple[float, float, float]]


def _curve(waits: Waits) -> _Curve:
    """Return points (age, share that ended by then, ticks held until then), both for one wait."""
    total = waits.total
    points = [(0.0, 0.0, 0.0)]
    age = ended = held = 0.0
    here = 1.0
    for index, (end, gone) in enumerate(zip(waits.ended, waits.gone, strict=True)):
        if not end and not gone:
            continue
        start, stop, leave = _start(index), _start(index + 1), (end + gone) / total
        if start > age:
            held += (start - age) * here
            points.append((start, ended, held))
        # Within a bin, waits are spread evenly.
        held += (stop - start) * (here - leave / 2)
        ended, here, age = ended + end / total, here - leave, stop
        points.append((age, ended, held))
    return points


def _rates(curve: _Curve) -> list[float]:
    """Return the steepest slope from each point to a later one; 0 from the last."""
    hull: list[tuple[float, float]] = []
    answer = []
    for _, ended, held in reversed(curve):
        while len(hull) > 1 and _slope(ended, held, hull[-1]) <= _slope(ended, held, hull[-2]):
            hull.pop()
        answer.append(_slope(ended, held, hull[-1]) if hull else 0.0)
        hull.append((ended, held))
    return answer[::-1]


def _hull(curve: _Curve, rates: list[float]) -> list[tuple[float, float]]:
    """Return (ended, held) where giving up can be best, at some price; first: at once."""
    kept: list[tuple[float, float, float]] = []
    for (_, ended, held), rate in zip(curve, rates, strict=True):
        if not kept or rate < kept[-1][2]:
            kept.append((ended, held, rate))
    return [(ended, held) for ended, held, _ in kept]


def _slope(ended: float, held: float, later: tuple[float, float]) -> float:
    return (later[0] - ended) / (later[1] - held)


def _after(then: Counter[Hashable], values: dict[Hashable, list[float]]) -> list[float]:
    """Return the worth of the end of a phase at each price; a use is worth 1."""
    worths = {BACK: [1.0] * len(_PRICES)} | values
    total = max(then.total(), 1)
    shares = [(count / total, worths.get(name, worths[_ALL])) for name, count in then.items()]
    return [sum(share * worth[at] for share, worth in shares) for at in range(len(_PRICES))]


def _phase(curve: _Curve, rates: list[float], after: list[float]) -> Phase:
    # The worth is the price at which rate x what follows = price.
    pays = [(price / then, price) for price, then in zip(_PRICES, after, strict=True) if then > 0]
    ends, worths = zip((0.0, 0.0), *pays, strict=True)
    return Phase([age for age, _, _ in curve], rates, list(accumulate(ends, max)), worths)


def _between(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Interpolate from the first point; beyond the last, return its value."""
    right = bisect_right(points, at)
    if right == len(points):
        return values[-1]
    share = (at - points[right - 1]) / (points[right] - points[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def _bin(ticks: int) -> int:
    bits = max(ticks, 1).bit_length()
    return min(4 * bits + (((ticks << 2) >> (bits - 1)) & 3), _BINS - 1)


def _start(index: int) -> float:
    bits, quarter = divmod(index, 4)
    return (4 + quarter) * 2.0 ** (bits - 3)
