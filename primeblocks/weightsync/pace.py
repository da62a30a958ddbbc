"""Choice between a full version and a delta, from what those before have cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Pace", "Sent"]

# Less takes so little time either way that a clock tells nothing: there the fewer bytes win.
_WORTH_A_CHOICE_BYTES = 8 << 20


@dataclass(frozen=True)
class Sent:
    """The cost of one version.

    Attributes:
        bytes: as it travelled, of all ranks.
        seconds: until all ranks had taken, encoded and sent it.
        apply_s: what a reader needs for it beyond what a full version needs.
    """

    bytes: int
    seconds: float
    apply_s: float = 0.0

    def expected_s(self, link_bytes_per_s: float | None) -> float:
        """Return the seconds from a publish until readers have it."""
        carry_s = 0.0 if link_bytes_per_s is None else self.bytes / link_bytes_per_s
        return self.seconds + self.apply_s + carry_s


@dataclass(frozen=True)
class Pace:
    """The costs of the last full version and the last delta, and what was sent since.

    Attributes:
        fulls: full versions since the last delta.
        deltas: deltas since the last full version, of `delta_bytes` in all.
    """

    full: Sent | None = None
    delta: Sent | None = None
    fulls: int = 0
    deltas: int = 0
    delta_bytes: int = 0

    def after(self, sent: Sent, *, is_delta: bool) -> Pace:
        """Return the pace after one more version."""
        if is_delta:
            size = self.delta_bytes + sent.bytes
            return replace(self, delta=sent, fulls=0, deltas=self.deltas + 1, delta_bytes=size)
        return replace(self, full=sent, fulls=self.fulls + 1, deltas=0, delta_bytes=0)

    def wants_delta(self, *, full_every: int, link_bytes_per_s: float | None) -> bool:
        """Tell whether the next version is to be a delta.

        It is full where `full_every` or the bytes of the deltas since the last full one say so;
        else whichever is expected sooner. What was not tried for `full_every` versions is tried.
        """
        if self.full is None or self.deltas + 1 >= full_every:
            return False
        if self.delta_bytes >= self.full.bytes:
            return False
        if self.delta is None or self.fulls >= full_every:
            return True
        if self.full.bytes < _WORTH_A_CHOICE_BYTES:
            return True
        delta_s, full_s = (one.expected_s(link_bytes_per_s) for one in (self.delta, self.full))
        return delta_s <= full_s
