"""The checks of killed runs with an environment find what they are for."""

import random
from dataclasses import replace

import pytest

from megadapo.data.group import Failure
from megadapo.data.prompts import Prompt
from megadapo.environments.adapters.openenv import OpenEnv
from megadapo.environments.environment import EnvironmentFailure
from megadapo.observe.rollouts.files import rollouts_path, write_rollouts
from tests.support.rollout.saved_groups import saved_episode, saved_group
from tests.support.runs.episodes import repeated_actions, wrong_rewards
from tests.support.tools import load_tool
from tests.unit.environments.adapters.playing import playing, task

PROMPT = Prompt("id", (("user", "Find my number from 3 to 9."),), "7", "guess")
LOST = Failure("environment/Guess", "interrupted: turn 1 was begun before a restart")


def episode(*turns, advantage):
    played = saved_episode(*((text, "lower", reward) for text, reward in turns))
    return replace(played, advantage=advantage)


WON = episode(("4", 0.0), ("maybe 7", 1.0), advantage=1.5)
LOSSES = [episode(("57", 0.0), ("", 0.0), advantage=-0.5)] * 3
FAILED = replace(
    LOSSES[0], response=replace(LOSSES[0].response, finish_reason="failed", failure=LOST)
)


def found(folder, *responses, failures=()):
    group = replace(saved_group(*responses), prompt=PROMPT, failures=failures)
    write_rollouts(rollouts_path(folder, 1), [group])
    return wrong_rewards(folder)


def test_right_rewards_and_failures_that_were_left_out_are_no_problem(tmp_path):
    assert found(tmp_path, WON, *LOSSES) == (0, [])
    assert found(tmp_path, replace(WON, advantage=0.5), LOSSES[0], failures=[LOST] * 2) == (2, [])


@pytest.mark.parametrize(
    ("responses", "failures", "problem"),
    [
        ([WON, *LOSSES[:2], FAILED], 0, "a response that failed has a reward"),
        ([WON, LOSSES[0]], 2, "advantages of a sum of 1.0: the mean is not the responses' own"),
        ([WON, *LOSSES[:2]], 0, "3 of 4 responses"),
        ([replace(WON, score=replace(WON.score, reward=0.0)), *LOSSES], 0, "for a return of 1.0"),
        ([episode(("7", 0.0), advantage=1.5), *LOSSES], 0, "reward 0.0 for turn 0: '7'"),
        ([episode(("6", 1.0), advantage=1.5), *LOSSES], 0, "reward 1.0 for turn 0: '6'"),
    ],
)
def test_failure_that_is_trained_on_and_false_rewards_are_found(
    tmp_path, responses, failures, problem
):
    """Catches a check that would let a failure pass as a reward of 0."""
    _, problems = found(tmp_path, *responses, failures=[LOST] * failures)
    assert problems and problem in " ".join(problems)
    assert problems[0].startswith("step 1, prompt 7: ")


def test_server_counts_actions_and_a_kill_ends_its_sessions(tmp_path):
    """Catches actions that are lost from the log or sessions that outlive their server."""
    tool = load_tool("faults/episode_server")
    tool.LONGEST_AWAY_S = 0.1
    server = tool.EpisodeServer(tmp_path)
    url = f"ws://127.0.0.1:{server.port}"
    begun = task("7", episode="1-5", question="Find my number from 3 to 9.", number=7)
    try:
        for _ in range(2):
            with playing(OpenEnv(url=url, field="text", text="text"), begun) as player:
                assert player.turn("4").messages[0]["content"] == "higher"
                server.restart(random.Random(0))
                with pytest.raises(EnvironmentFailure, match="is lost"):
                    player.turn("7")
        assert (tmp_path / "actions").read_text() == "1-5/0\n" * 2
        assert repeated_actions(tmp_path) == ["1-5/0"]
    finally:
        server.close()
