"""Linear attention and state-space recurrences over a sequence that ranks share."""

from .convolution import causal_conv1d
from .recurrence import gated_delta_rule, state_space

__all__ = ["causal_conv1d", "gated_delta_rule", "state_space"]
