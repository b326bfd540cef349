"""The taskset of examples/verifiers with a trick in each task, for tests of failures and tools.

It runs in a Python that has verifiers, beside guess_taskset.py.
"""

import json
from pathlib import Path

import verifiers.v1 as vf
from guess_taskset import CLIENT, GuessData, GuessHarness
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["TrickyHarness", "TrickyTaskset"]


class TrickyData(GuessData):
    trick: str = ""
    file: str = ""
    """File for the tokens of the episode, as verifiers knows them."""
    tools: list[dict] = []
    """Schemas of the tools that the harness shows."""


class TrickyTask(vf.Task[TrickyData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        if self.data.trick == "reward":
            raise ValueError("no board")
        if self.data.file:
            branches = [
                {"ids": one.token_ids, "mask": one.sampled_mask, "logprobs": one.logprobs}
                for one in trace.branches
            ]
            Path(self.data.file).write_text(json.dumps(branches))
        return float(trace.info["found"])


class TrickyTaskset(vf.Taskset[TrickyTask]):
    def load(self):
        for number in range(12, 27):
            prompt = "Find my number from 12 to 26."
            system = "Play well." if number == 12 else None
            yield TrickyTask(TrickyData(prompt=prompt, system_prompt=system, number=number))


class TrickyHarness(GuessHarness):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if data.trick == "tool":
            return await self.launch_tool(ctx, trace, endpoint, secret, data)
        if data.trick == "system":
            data = data.model_copy(update={"prompt": f"Play! {data.prompt}"})
        return await super().launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data)

    def answer(self, text: str, data: TrickyData) -> str:
        if data.trick == "harness":
            raise RuntimeError("the board is gone")
        return super().answer(text, data)

    async def launch_tool(self, ctx, trace, endpoint, secret, data):
        """Play by calls of a tool, whose results are messages of the role "tool"."""
        trace.info["found"] = False
        messages = [{"role": "user", "content": data.prompt}]
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=CLIENT)
        while not trace.info["found"]:
            completion = await client.chat.completions.create(
                model=ctx.model, messages=messages, tools=data.tools
            )
            message = completion.choices[0].message
            [call] = message.tool_calls
            answer = self.answer(call.function.arguments, data)
            trace.info["found"] = not answer
            messages.append(message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        return ProgramResult(exit_code=0, stdout="", stderr="")
