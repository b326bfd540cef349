"""An OpenEnv server that plays tests.support.environments.games:CountedGuess, and can be killed.

    python tools/faults/episode_server.py LOG PORT

Each action adds a line EPISODE/TURN to LOG, which is on disk before the answer is sent. Messages
are those of openenv-core 0.3. A session ends with its connection, and all end with the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from megadapo.environments.environment import Action, Observation, Task

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.environments.games import CountedGuess  # noqa: E402 - needs the path above

SERVER = "server"
"""The target of a kill."""
HOST = "127.0.0.1"
LONGEST_AWAY_S = 2.0
START_S = 20.0
"""Seconds in which a server must have started."""


class EpisodeServer:
    """A server's process, which is killed and started again, and its log FOLDER/actions."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "port"
        if not kept.exists():
            # a run that is continued knows its address
            with socket.create_server((HOST, 0)) as free:
                kept.write_text(str(free.getsockname()[1]))
        self.port = int(kept.read_text())
        words = (Path(__file__), folder / "actions", self.port)
        self._words = [sys.executable, *map(str, words)]
        self._start()

    def restart(self, choose: random.Random) -> str:
        """Kill the server and start another one; return for how long there was none."""
        away_s = choose.uniform(0.0, LONGEST_AWAY_S)
        self.close()
        time.sleep(away_s)
        self._start()
        return f"away for {away_s:.1f} s"

    def close(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._words, start_new_session=True)
        until = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection((HOST, self.port)):
                return
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server does not start: {' '.join(self._words)}")
            time.sleep(0.05)


async def play(connection: ServerConnection, log: Path) -> None:
    """Answer the messages of one session."""
    game = CountedGuess(str(log))
    with suppress(ConnectionClosed):
        async for line in connection:
            message = json.loads(line)
            if message["type"] == "close":
                return
            data = message["data"]
            if message["type"] == "reset":
                question = {"role": "user", "content": data["question"]}
                name, number = data["episode_id"], str(data["number"])
                game.reset(Task(id=name, messages=[question], ground_truth=number, episode=name))
                found = Observation(messages=[question])
            else:
                found = await asyncio.to_thread(game.step, Action(text=data["text"]))
            text = "".join(one["content"] for one in found.messages)
            result = {"reward": found.reward, "done": found.done}
            reply = {"type": "observation", "data": {"observation": {"text": text}, **result}}
            await connection.send(json.dumps(reply))


async def main(log: Path, port: int) -> None:
    """Serve until the process ends."""
    async with serve(lambda connection: play(connection, log), HOST, port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
