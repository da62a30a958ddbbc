"""A plug-in of verifiers, as a user writes one: a task set with a tool that it serves.

verifiers finds it by its name, so its folder must be on the path. The tool's server is this file.
"""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    numbers: list[int]


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.rpartition(" ")[2] == str(sum(self.data.numbers)))

    @vf.reward(weight=0.25)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for numbers in ([1, 2, 3], [40, 50, 60, 70], [500, 13], [7, 8, 9]):
            prompt = " + ".join(map(str, numbers))
            data = SumData(prompt=f"{prompt} = ?", system_prompt="Add.", numbers=numbers)
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Calculator.run()
