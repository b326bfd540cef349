"""A taskset of verifiers 0.4.0 with its own harness: the game of examples/environment.

It runs in a Python that has verifiers, and imports nothing else of this project.
"""

import re

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["GuessHarness", "GuessTaskset"]

MAX_GUESSES = 4


class GuessData(vf.TaskData):
    number: int
    """The hidden number."""
    trick: str = ""
    """What the harness or the task does wrong, for tests of failures."""


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        if self.data.trick == "reward":
            raise ValueError("no reward")
        return float(trace.info["found"])

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    highest: int = 9


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for number in range(self.config.highest + 1):
            prompt = f"Find my number from 0 to {self.config.highest}."
            yield GuessTask(GuessData(prompt=prompt, number=number))


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    """Plays in the worker itself; each answer of the game is a message of the user."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": data.prompt}]
        if data.trick == "prompt":
            messages.insert(0, {"role": "system", "content": "Play."})
        trace.info["found"] = False
        options = {"stop": ["."]} if data.trick == "stop" else {}
        for _ in range(0 if data.trick == "silent" else MAX_GUESSES):
            completion = await client.chat.completions.create(
                model=ctx.model, messages=messages, **options
            )
            text = completion.choices[0].message.content or ""
            if data.trick == "harness":
                raise RuntimeError("the game is gone")
            numbers = re.findall("[0-9]{1,9}", text)
            guess = int(numbers[-1]) if numbers else -1
            trace.info["found"] = guess == data.number
            if trace.info["found"]:
                break
            answer = "higher" if guess < data.number else "lower"
            told = "..." if data.trick == "compact" else text
            messages.append({"role": "assistant", "content": told})
            messages.append({"role": "user", "content": answer})
        await client.close()
        return ProgramResult(exit_code=0, stdout="", stderr="")
