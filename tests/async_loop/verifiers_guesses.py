"""A plug-in of verifiers, as a user writes one: a task set, and a program that edits its history.

verifiers finds it by its name, so its folder must be on the path.
"""

import openai
import verifiers.v1 as vf

__all__ = ["EditingHarness", "Guesses"]


class GuessTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Guesses(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        data = vf.TaskData(prompt="guess", system_prompt="be brief")
        yield GuessTask(data, self.config.task)


class EditingHarness(vf.Harness[vf.HarnessConfig]):
    """Five calls: the second and fourth go on, the third drops a message, the last asks again."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        first = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:

            async def say(*messages):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                content = answer.choices[0].message.content
                return [*messages, {"role": "assistant", "content": content}]

            one = await say(*first)
            two = await say(*one, {"role": "user", "content": "again"})
            await say(*two[1:], {"role": "user", "content": "without the system"})
            await say(*two, {"role": "user", "content": "more"})
            await say(*first)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
