"""Environments that behave badly on request, and one that counts its actions in a file."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from megadapo.environments.environment import Action, Environment, EnvironmentFailure, Observation


def say(text, **fields):
    return Observation(messages=[{"role": "user", "content": text}], **fields)


class Obedient(Environment):
    """Does what the action's text says, in a thread."""

    def __init__(self, **options):
        self.options = options
        self.num_steps = 0

    def reset(self, task):
        self.seed = task.seed

    def step(self, action):
        self.num_steps += 1
        verb, _, rest = action.text.partition(" ")
        return getattr(self, f"do_{verb}")(rest)

    def do_say(self, text):
        return say(f"{text} {self.num_steps} of {self.seed}")

    def do_sleep(self, seconds):
        time.sleep(float(seconds))
        return say("slept")

    def do_spin(self, _):
        return say(str(9**9**9))  # one instruction, during which no other thread runs

    def do_exit(self, code):
        os._exit(int(code))

    def do_sys_exit(self, _):
        sys.exit(3)

    def do_stop_iteration(self, _):
        raise StopIteration

    def do_raise(self, text):
        raise ValueError(text)

    def do_hide(self, kind):
        """Raise an exception that has no text."""
        base = {"failure": EnvironmentFailure, "exception": ValueError}[kind]

        def fail(_):
            raise SystemExit

        raise type("Hidden", (base,), {"__str__": fail})

    def do_parse(self, text):
        return say(json.loads(text))

    def do_fail(self, text):
        raise EnvironmentFailure(text)

    def do_fill(self, _):
        return say("x" * (1 << 40))

    def do_huge(self, _):
        return say("x" * (9 << 20))

    def do_print(self, text):
        print(text)
        os.write(1, b'{"number": 1, "value": "forged"}\n')
        return say("printed")

    def do_read(self, _):
        return say(f"read {sys.stdin.read()!r}")

    def do_fork(self, _):
        os.fork()
        return say("forked")

    def do_start(self, path):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(path).write_text(str(child.pid))
        return say("started")

    def do_socket(self, _):
        import socket

        socket.socket()
        return say("opened")

    def do_variable(self, name):
        return say(os.environ.get(name, "hidden"))

    def do_reply(self, text):
        """Write into the pipe of replies, as a library with a wrong file descriptor would."""
        lines = {
            "deep": "[" * 100_000,
            "empty": "\n".join(f'{{"number": {number}}}' for number in range(50)),
            "large": "x" * (20 << 20),
        }
        for number in _pipes():
            try:
                # the pipe of requests cannot be written
                os.write(number, f"{lines.get(text, text)}\n".encode())
            except OSError:
                continue
        return say("written")

    def do_close(self, which):
        """Close the pipes of requests and replies, or the first of them alone."""
        for number in _pipes()[: 1 if which == "requests" else None]:
            os.close(number)
        return say("closed")


def _pipes():
    """Return the file descriptors of pipes, except for the standard ones."""
    return [
        number
        for number in map(int, os.listdir("/proc/self/fd"))
        if number > 2
        and os.path.exists(f"/proc/self/fd/{number}")
        and os.readlink(f"/proc/self/fd/{number}").startswith("pipe:")
    ]


class Noting(Obedient):
    """Notes in a file that it has waited for another file, and that it is closed."""

    def do_wait(self, path):
        while not Path(path).exists():
            time.sleep(0.01)
        self._note("waited")
        return say("waited")

    def close(self):
        self._note("closed")

    def _note(self, text):
        with open(self.options["path"], "a") as file:
            file.write(f"{text}\n")


class ObedientCoroutine(Obedient):
    """Sleeps without a thread, or in one that its coroutine has started."""

    async def step(self, action):
        if action.text.startswith("sleep "):
            await asyncio.sleep(float(action.text.split()[1]))
            return say("slept")
        if action.text.startswith("thread "):
            await asyncio.to_thread(time.sleep, float(action.text.split()[1]))
            return say("slept in a thread")
        return super().step(action)


class Counting(Environment):
    """Appends every action to a file, as an effect that cannot be undone.

    An action is a number, and its answer depends on all actions before it.
    """

    def __init__(self, path: str, seconds: float = 0.0, **_: object) -> None:
        self._path, self._seconds = Path(path), seconds

    def reset(self, task):
        self._episode, self._total = task.id, task.seed
        return say(f"begin at {self._total}")

    def step(self, action: Action) -> Observation:
        with self._path.open("a") as file:
            file.write(f"{self._episode} {action.text}\n")
        time.sleep(self._seconds)
        self._total = (31 * self._total + int(action.text.split()[1])) % 1_000_003
        return say(f"now {self._total}", reward=float(self._total), done=self._is_last(action))

    def _is_last(self, action: Action) -> bool:
        return action.text.startswith("last ")

    def state(self):
        return {"episode": self._episode, "total": self._total}

    def restore(self, task, state):
        self._episode, self._total = state["episode"], state["total"]


class Changing(Counting):
    """Answers an action in another way when it is repeated by another process."""

    def step(self, action):
        return say(f"{super().step(action).messages[0]['content']} from {os.getpid()}")


class Away(Environment):
    """Its server is away for the first resets; each adds a line to a file."""

    def __init__(self, path: str, num_resets: int) -> None:
        self._path, self._num_resets = Path(path), num_resets

    def reset(self, task):
        with self._path.open("a") as file:
            file.write("reset\n")
        if self._path.read_text().count("reset") <= self._num_resets:
            raise EnvironmentFailure("no server")

    def step(self, action: Action) -> Observation:
        return say("yes")


class SlowText(Environment):
    """A tool that is called by text, in a method that is no coroutine."""

    stop = ("go",)

    def step(self, action: Action) -> Observation:
        time.sleep(0.3)
        return Observation(text="done")
