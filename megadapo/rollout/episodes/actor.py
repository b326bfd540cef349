"""The host of the environments as an actor beside the driver; engines find it by its name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import gather
from megadapo.environments.config import EnvironmentConfig
from megadapo.errors import ProcessDiedError
from megadapo.rewards.workers.by_value import PICKLES
from megadapo.rollout.episodes.host import EpisodeHost
from megadapo.rollout.journal.record_log import JOURNAL_FOLDER

if TYPE_CHECKING:
    from ray.actor import ActorHandle

HOST_NAME = "environments"
"""Name of the actor in the run's namespace of Ray."""
MAX_CALLS = 100_000
"""Calls that the host may have open, one for each response that waits."""
CALL_TIMEOUT_S = 120.0


class EpisodeHostActor:
    """The driver's handle of the host.

    Raises:
        ConfigError: an environment cannot start.
        InfraError: the actor cannot start.
    """

    def __init__(
        self,
        configs: Sequence[EnvironmentConfig],
        *,
        folder: Path | None,
        log_folder: Path,
        timeout_s: float,
    ) -> None:
        """Start the actor and all environments.

        Args:
            folder: the run's folder, in which actions and observations survive a kill.
            log_folder: folder for what environments print.
            timeout_s: limit on the start.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        node = ray.get_runtime_context().get_node_id()
        host: Any = ray.remote(EpisodeHost)
        self._actor: ActorHandle[Any] = host.options(
            name=HOST_NAME,
            num_cpus=0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(
            list(configs),
            None if folder is None else folder.resolve() / JOURNAL_FOLDER,
            log_folder.resolve(),
            PICKLES,
        )
        self._call(self._actor.start.remote(), "start", timeout_s)
        self._end = self._actor.until_stopped.remote()

    def begin(self, policy_version: int, weights: str) -> None:
        """Tell the host the engines' weights from now on, whose fingerprint is `weights`."""
        self._call(self._actor.begin.remote(policy_version, weights), "change its journal")

    def check(self) -> None:
        """Raise ProcessDiedError if the host is dead.

        A restarted run continues its episodes from their journal.
        """
        import ray

        ended, _ = ray.wait([self._end], timeout=0)
        if ended:
            self._call(self._end, "play episodes")

    def drain_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings: list[str] = self._call(self._actor.drain_warnings.remote(), "report warnings")
        return warnings

    def close(self) -> None:
        """End the processes of all environments."""
        import ray

        # a dead host has no processes left
        with suppress(ProcessDiedError):
            self._call(self._actor.stop.remote(), "stop")
        ray.kill(self._actor)

    def _call(self, call: Any, doing: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        (result,) = gather(
            [call], names=["the host of the environments"], doing=doing, timeout_s=timeout_s
        )
        return result
