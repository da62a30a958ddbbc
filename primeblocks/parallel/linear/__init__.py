"""Linear attention and state-space recurrences over a sequence that ranks share."""

from .convolution import causal_conv1d
from .recurrence import gated_delta_rule, state_space
from .scan import cut_runs, scan_states

__all__ = ["causal_conv1d", "cut_runs", "gated_delta_rule", "scan_states", "state_space"]
