"""How long tests wait for what must happen.

These deadlines end a hang. Each is at least ten times what an idle machine needs, so that a busy
machine passes too. A test that waits for an expiry states a deadline of up to five seconds, or
takes `EXPIRES_S`.
"""

HANG_S = 120.0  # for a step that takes an idle machine up to some seconds
START_S = 300.0  # until an engine has started and answers
JOB_S = 1200.0  # for a process with engines or an example; below pytest's own timeout
EXPIRES_S = 10.0  # expires for one participant; the others need less than a hundredth of it
