"""The environment "skyrl_gym": an environment of the package skyrl-gym (made for 0.4.0)."""

from __future__ import annotations

import importlib
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from megadapo.environments.environment import Action, Environment, Observation, Task


class SkyRLGym(Environment):
    """A registered environment of skyrl-gym, whose observations are messages.

    An observation without messages ends the episode.

    Args:
        id: name in skyrl-gym's registry, such as "gsm8k_multi_turn".
        env_config: settings of the environment; it reads them as attributes.
        module: a module of yours that registers it when it is imported.
        stop: texts that end an action in the middle of a turn; what it observes is then text.

    Raises:
        RuntimeError: the package is not installed.
    """

    def __init__(
        self,
        *,
        id: str,
        env_config: Mapping[str, Any] | None = None,
        module: str | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        try:
            self._gym = importlib.import_module("skyrl_gym")
        except ImportError as error:
            raise RuntimeError(
                f"skyrl_gym cannot be imported ({error}): install skyrl-gym, or set "
                "rollout.environments.python to a Python that has it"
            ) from error
        if module is not None:
            importlib.import_module(module)
        self._id, self._env_config = id, dict(env_config or {})
        self.stop = tuple(stop)

    def reset(self, task: Task) -> Observation | None:
        gold = {"method": "rule", "ground_truth": task.ground_truth}
        # environments read the gold answer under one of two names; a column of the data comes first
        row = {"reward_spec": gold, "reward_model": gold, "extra_info": dict(task.extra_info)}
        config = importlib.import_module("omegaconf").OmegaConf.create(self._env_config)
        self._env = self._gym.make(self._id, env_config=config, extras={**row, **task.extra_info})
        prompt = [dict(message) for message in task.messages]
        messages, _ = self._env.init([dict(message) for message in prompt])
        # the engine has the prompt already
        if messages[: len(prompt)] != prompt:
            raise RuntimeError(f"{self._id} changes the prompt; put its changes into the data")
        new = messages[len(prompt) :]
        return Observation(messages=new) if new else None

    def step(self, action: Action) -> Observation:
        found = self._env.step(action.text)
        if found.get("postprocessed_action") not in (None, action.text):
            raise RuntimeError(
                f"{self._id} changes the model's text, whose tokens are sampled already; set the "
                "option stop to the texts that it cuts off at"
            )
        messages = found["observations"]
        metadata = {**(found.get("metadata") or {}), **(self._final() if found["done"] else {})}
        text = "".join(message["content"] for message in messages)
        return Observation(
            messages=() if self.stop else messages,
            text=text if self.stop and messages else None,
            reward=float(found["reward"]),
            done=bool(found["done"]) or not messages,
            metrics={
                name: float(value)
                for name, value in metadata.items()
                if isinstance(value, numbers.Real)
            },
        )

    def close(self) -> None:
        if hasattr(self, "_env"):
            self._env.close()

    def _final(self) -> Mapping[str, Any]:
        """Return the environment's own metrics of the episode."""
        metrics: Mapping[str, Any] = (
            self._env.get_metrics() if hasattr(self._env, "get_metrics") else {}
        )
        return metrics
