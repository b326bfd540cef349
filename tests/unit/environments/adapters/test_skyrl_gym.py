"""An environment of skyrl-gym is played: with the package, and with a stand-in where it is not."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megadapo.environments.adapters.skyrl_gym import SkyRLGym
from tests.unit.environments.adapters.playing import playing, task

PROMPT = [{"role": "user", "content": "Begin."}]


class Countdown:
    """An environment with the methods of skyrl_gym's BaseTextEnv, of another package."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        self.left, self.extras, self.closed = env_config.turns, extras, False

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        hint = [{"role": "user", "content": f"{self.left} left"}] if self.left > 2 else []
        return (prompt if self.left < 9 else PROMPT[:0]) + hint, {}

    def step(self, action: str) -> dict[str, Any]:
        self.left -= 1
        new = [] if self.left <= 0 else [{"role": "user", "content": f"{self.left} left"}]
        return {
            "observations": new,
            "reward": 1 if action == self.extras["reward_spec"]["ground_truth"] else 0,
            "done": self.left <= 0 and action != "silent",
            "metadata": {"length": len(action), "text": action},
            "postprocessed_action": action.removesuffix(" cut"),
        }

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": 2}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def countdown(monkeypatch: pytest.MonkeyPatch) -> list[Countdown]:
    """Modules with the functions that the adapter uses; returns the environments made."""
    made: list[Countdown] = []

    def make(id: str, **arguments: Any) -> Countdown:
        assert id == "countdown"
        made.append(Countdown(**arguments))
        return made[-1]

    gym, conf = ModuleType("skyrl_gym"), ModuleType("omegaconf")
    gym.make = make  # type: ignore[attr-defined]
    conf.OmegaConf = SimpleNamespace(create=lambda d: SimpleNamespace(**d))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "skyrl_gym", gym)
    monkeypatch.setitem(sys.modules, "omegaconf", conf)
    return made


def test_turns_become_observations(countdown: list[Countdown]) -> None:
    environment = SkyRLGym(id="countdown", env_config={"turns": 2})
    with playing(environment) as player:
        assert player.reset(task("go", level=3)) is None
        first = player.turn("stay")
        assert list(first.messages) == [{"role": "user", "content": "1 left"}]
        assert (first.reward, first.done, first.metrics) == (0.0, False, {"length": 4.0})
        last = player.turn("go")
        assert (last.reward, last.done, last.messages) == (1.0, True, [])
        assert last.metrics == {"length": 2.0, "steps": 2.0}
    (made,) = countdown
    assert made.closed and made.extras["level"] == 3
    assert made.extras["extra_info"] == {"level": 3}
    assert made.extras["reward_model"] == {"method": "rule", "ground_truth": "go"}


def test_new_first_messages_are_observed_and_changed_prompts_refused(
    countdown: list[Countdown],
) -> None:
    with playing(SkyRLGym(id="countdown", env_config={"turns": 3})) as player:
        assert list(player.reset(task()).messages) == [{"role": "user", "content": "3 left"}]
    changed = pytest.raises(RuntimeError, match="changes the prompt")
    with playing(SkyRLGym(id="countdown", env_config={"turns": 9})) as player, changed:
        player.reset(task())


def test_with_stop_texts_observations_continue_the_turn(countdown: list[Countdown]) -> None:
    environment = SkyRLGym(id="countdown", env_config={"turns": 2}, stop=["</search>"])
    with playing(environment, task()) as player:
        assert environment.stop == ("</search>",)
        found = player.turn("<search>x</search>")
        assert (found.text, found.messages, found.done) == ("1 left", (), False)


def test_silence_ends_the_episode(countdown: list[Countdown]) -> None:
    """The model would have to answer a turn that does not exist."""
    with playing(SkyRLGym(id="countdown", env_config={"turns": 1}), task()) as player:
        assert player.turn("silent").done


def test_sampled_text_cannot_be_changed(countdown: list[Countdown]) -> None:
    changed = pytest.raises(RuntimeError, match="option stop")
    with playing(SkyRLGym(id="countdown", env_config={"turns": 2}), task()) as player, changed:
        player.turn("text cut")


def test_a_column_of_the_data_is_the_gold_answer_if_it_is_there(countdown: list[Countdown]) -> None:
    """Some environments read a dict as gold answer, and ours is a text."""
    gold = {"ground_truth": {"target": ["x"]}}
    with playing(SkyRLGym(id="countdown", env_config={"turns": 2})) as player:
        player.reset(task("y", reward_spec=gold))
    assert countdown[0].extras["reward_spec"] == gold


def test_without_the_package_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(RuntimeError, match="install skyrl-gym, or set rollout.environments.python"):
        SkyRLGym(id="aime")


def test_gsm8k_of_the_package_rewards_each_turn() -> None:
    pytest.importorskip("skyrl_gym")
    with playing(SkyRLGym(id="gsm8k_multi_turn"), task("42", max_turns=3)) as player:
        first, second, third = (player.turn(text) for text in ("hm", "#### 41", "#### 42"))
        assert "#### ANSWER" in first.messages[0]["content"]
        assert [one.done for one in (first, second, third)] == [False, False, True]
        assert [one.reward for one in (first, second, third)] == [0.0, pytest.approx(0.2 / 3), 1.0]
        assert third.metrics == {"steps": 3.0}
