"""vLLM's own server on loopback."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megadapo.cluster.processes import cpu_environment
from tests.support.processes.running import wait_until

CONTENTS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that only joins the contents."""
START_TIMEOUT_S = 300.0


@contextmanager
def served(model: Path, log: Path, *options: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | cpu_environment(1)
    environment |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "served"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "128"),
        *("--chat-template", CONTENTS, *options),
    ]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: server.poll() is not None or _is_up(url), timeout_s=START_TIMEOUT_S)
            assert server.poll() is None, log.read_text()[-3000:]
            yield url
        finally:
            # the group outlives a server that has failed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=60)


def _is_up(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True
