"""An OpenEnv server that plays tests.support.environments.games:Sum, and can be killed.

    python tools/faults/episode_server.py LOG PORT

Each action adds a line EPISODE/TURN to LOG, which is on disk before the answer is sent. Messages
are those of openenv-core 0.3. A session ends with its connection, and all of them with the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

SERVER = "server"
"""The target of a kill."""
HOST = "127.0.0.1"
STEP_S = 0.05
"""Seconds of an action, long enough to be killed in."""
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
    episode, question, truth, turn = "", "", "", 0
    with suppress(ConnectionClosed):
        async for line in connection:
            message = json.loads(line)
            if message["type"] == "close":
                return
            data = message["data"]
            if message["type"] == "reset":
                episode, turn = data["episode_id"], 0
                question, truth = data["question"], data["truth"]
                await connection.send(_observed(question))
                continue
            _append(log, f"{episode}/{turn}\n")
            turn += 1
            await asyncio.sleep(STEP_S)
            is_right = truth in data["text"]
            answer = _observed(f"no, again: {question}", reward=float(is_right), done=is_right)
            await connection.send(answer)


def _append(log: Path, line: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.fsync(file)
    os.close(file)


def _observed(text: str, **result: Any) -> str:
    data = {"observation": {"text": text}, "reward": None, "done": False, **result}
    return json.dumps({"type": "observation", "data": data})


async def main(log: Path, port: int) -> None:
    """Serve until the process ends."""
    async with serve(lambda connection: play(connection, log), HOST, port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
