"""Runs that a notebook and a script train, with functions and environments of their own."""

import signal
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from megadapo.api import RunFolder
from megadapo.errors import ConfigError
from tests.support import REPOSITORY
from tests.support.runs.whole_runs import (
    descendants,
    marked,
    megadapo,
    metrics,
    start_command,
    wait_for_step,
)

pytestmark = pytest.mark.timeout(900)


def test_notebook_trains_shows_and_exports(tmp_path):
    """A kernel has an event loop in its main thread, and its cells are in no file."""
    notebook = nbformat.read(REPOSITORY / "examples/notebook/first_run.ipynb", as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "commit it without outputs"
        cell.source = cell.source.replace("NUM_STEPS = 10", "NUM_STEPS = 2")
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=500, resources=resources).execute()
    run = RunFolder(tmp_path / "runs" / "first-run")
    assert [record["step"] for record in run.metrics()] == [1, 2]
    (source,) = (run.folder / "inputs").glob("ends_right-*.py")
    assert 'endswith(f"Answer: {ground_truth}")' in source.read_text()
    for response in run.responses():
        right = response["text"].strip().endswith(f"Answer: {response['ground_truth']}")
        assert response["correct"] is right and response["reward"] == (1.0 if right else -1.0)
    assert (tmp_path / "runs" / "first-run-export" / "model.safetensors").exists()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "step=2/2 accuracy=" in printed and "\x1b" not in printed, "cells get lines of text"


PROGRAM = """
import signal, sys
from dataclasses import replace
import megadapo
from examples.environment import guess
from megadapo.errors import MegadapoError, RunInterruptedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1)

class Patient(guess.Guess):
    bonus = {bonus}

    def step(self, action):
        observation = super().step(action)
        return replace(observation, reward=observation.reward + self.bonus * observation.done)

def brief(response):
    return -0.001 * len(response)

def train():
    return megadapo.train(
        "configs/agent.toml",
        environment={{"environment": Patient, "data_sources": ["guess"], "max_turns": 4}},
        reward=[{{"function": "environment", "right_above": 0.0}}, brief],
        overrides={{
            "run.folder": sys.argv[1],
            "run.num_steps": 3,
            "rollout.num_engines": 1,
            "sampling.prompts_per_step": 8,
            "evaluation.every": 0,
            "checkpoint.every": 2,
            "observe.saved_groups": "all",
        }},
    )

handlers = [signal.getsignal(number) for number in SIGNALS]
try:
    train()
except RunInterruptedError as error:
    print("interrupted:", error, flush=True)
    run = train()
    print("finished:", len(run.metrics()))
except MegadapoError as error:
    print("refused:", error)
assert handlers == [signal.getsignal(number) for number in SIGNALS]
"""


def test_interrupted_script_continues_in_its_next_call(tmp_path):
    """Its environment is in no module, and its second call starts all processes once more."""
    program, folder = tmp_path / "program.py", tmp_path / "run"
    program.write_text(PROGRAM.format(bonus=0.5))
    command = [sys.executable, str(program), str(folder)]
    process = start_command(command, marked(folder))
    wait_for_step(process, folder, 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0 and "interrupted: stopped by SIGINT" in output, output
    assert "resuming after step" in output and "finished: 3" in output
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3]
    assert not descendants(folder)
    won = [one for one in RunFolder(folder).responses() if one["correct"]]
    assert won and {one["reward_parts"]["environment/Patient/return"] for one in won} == {1.5}
    program.write_text(PROGRAM.format(bonus=0.25))
    output, _ = start_command(command, marked(folder)).communicate(timeout=300)
    assert "refused: the run in" in output and "--accept-changes=rollout.environments" in output
    refused = megadapo("train", folder, "--run.num_steps=5", code=ConfigError.exit_code)
    assert "megadapo.train(..., reward=...)" in refused.stderr
    assert "megadapo.train(..., environment=...)" in refused.stderr
    assert "Patient" in megadapo("show", folder, "1").stdout
