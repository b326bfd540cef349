"""A taskset of verifiers 0.4.0 with its own harness: find a hidden number by guessing.

The harness plays in the process that calls it. Others start a program or a container.
"""

import random
import re

import httpx
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["GuessHarness", "GuessTaskset"]

MAX_GUESSES = 4
# one for all episodes of a process, as making one takes 25 ms. A busy process may miss time limits,
# also that of a connection that waits to be used again
CLIENT = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_keepalive_connections=0))


class GuessData(vf.TaskData):
    number: int
    """The hidden number."""


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.info["found"])

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    num_tasks: int = 100
    seed: int = 1


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        rng = random.Random(self.config.seed)
        for _ in range(self.config.num_tasks):
            first = rng.randint(10, 85)
            last = first + rng.randint(11, 14)
            prompt = f"Find my number from {first} to {last}."
            yield GuessTask(GuessData(prompt=prompt, number=rng.randint(first, last)))


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    """Answers each guess with a message of the user."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        trace.info["found"] = False
        messages = [{"role": "user", "content": data.prompt}]
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=CLIENT)
        for _ in range(MAX_GUESSES):
            completion = await client.chat.completions.create(model=ctx.model, messages=messages)
            message = completion.choices[0].message
            answer = self.answer(message.content or "", trace.task.data)
            trace.info["found"] = not answer
            if not answer:
                break
            # as it came, with reasoning_content: another message would begin another branch
            messages.append(message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": answer})
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def answer(self, text: str, data: GuessData) -> str:
        """Return the answer to a guess, the last number of a text; empty if it is found."""
        first, last = re.findall("[0-9]+", data.prompt)
        guess = int((re.findall("[0-9]{1,9}", text) or ["-1"])[-1])
        if guess == data.number:
            return ""
        if not int(first) <= guess <= int(last):
            return f"not a number from {first} to {last}"
        return "higher" if guess < data.number else "lower"
