"""Record environments of verifiers 0.4 with a capture server, and return rollouts.

You do not need to change an environment, its tools or its rewards. The capture server renders the
messages, calls the engine, and records the tokens that the engine sampled. Use `record` like this:

    async with CaptureServer(generate, ChatTemplate(tokenizer)) as server, env.serving():
        rollouts = scored(*await record(server, env, task))

`tests/async_loop/test_verifiers_capture.py` uses this example in environments with tools and with a
shell.
"""

import os
from typing import Any

import verifiers.v1 as vf

from primeblocks.async_loop import Rollout
from primeblocks.capture import CaptureSession
from primeblocks.capture.adapters.uvicorn import CaptureServer

__all__ = ["record", "scored"]


# glue
async def record(
    server: CaptureServer, env: vf.SingleAgentEnv, task: vf.Task, **sampling: Any
) -> tuple[CaptureSession, vf.Episode]:
    async with server.session(prompt_id=task.data.prompt) as session:
        variable = f"API_KEY_OF_{session.name}"  # verifiers hides such names from its programs.
        os.environ[variable] = session.key
        client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=variable)
        context = vf.ModelContext("policy", client, vf.Sampling(**sampling))
        (slot,) = env.slots(task)
        try:
            return session, await env.run_slot(slot, context)
        finally:
            del os.environ[variable]


def scored(session: CaptureSession, episode: vf.Episode) -> list[Rollout]:
    (trace,) = episode.traces
    if not episode.ok:
        return session.rollouts()  # without a reward
    rewards = {name: each.value for name, each in trace.rewards.items()}
    return session.rollouts(reward=trace.reward, rewards=rewards)


# end of glue
