"""Requests for groups: their prompts and seeds, and the journal's copies of finished ones."""

from __future__ import annotations

from megadapo.data.group import Group, Response
from megadapo.data.prompts import Prompt
from megadapo.rollout.episodes.actor import EpisodeHostActor
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.journal.journal import Journal, group_digest
from megadapo.rollout.types import OpenGroup, SamplingSettings, response_seeds


class GroupRequests:
    """Makes the requests for groups, which seed, prompt index and tokens so far determine."""

    def __init__(
        self,
        settings: SamplingSettings,
        episodes: EpisodeRequests,
        num_responses: int,
        journal: Journal | None,
        host: EpisodeHostActor | None = None,
    ) -> None:
        self._settings, self._episodes, self._host = settings, episodes, host
        self._num_responses, self._journal = num_responses, journal
        self._digests: dict[int, bytes] = {}
        """Digest of each request since the last weights, by prompt index, if there is a journal."""

    def make(
        self,
        prompt_index: int,
        prompt: Prompt,
        responses: tuple[Response, ...],
        stop_at_tokens: tuple[int, ...],
    ) -> OpenGroup | Group | None:
        """Return the request, or its finished group from the journal.

        None: the responses stop where they are. `responses` and `stop_at_tokens` are as in
        `OpenGroup`.
        """
        num_tokens = tuple(len(response.token_ids) for response in responses)
        if stop_at_tokens and stop_at_tokens == (num_tokens or (0,) * self._num_responses):
            return None
        group = OpenGroup(
            key=prompt_index,
            prompt_ids=self._episodes.prompt_ids(prompt),
            seeds=response_seeds(
                self._num_responses, self._episodes.seed, "train", prompt_index, prompt.id
            ),
            episode=self._episodes.request(prompt),
            responses=responses,
            settings=self._settings,
            priority=prompt_index,
            stop_at_tokens=stop_at_tokens,
        )
        if self._journal is None:
            return group
        self._digests[prompt_index] = group_digest(prompt, group)
        return self._journal.find_group(self._digests[prompt_index]) or group

    def keep(self, group: Group) -> None:
        """Write a finished group to the journal."""
        # a restarted run scores a group with failures again
        if self._journal is not None and not group.failures:
            self._journal.append_group(self._digests[group.prompt_index], group)

    def sync(self) -> None:
        """Force the journal to disk."""
        if self._journal is not None:
            self._journal.sync()

    def begin(self, policy_version: int, weights: str) -> None:
        """Begin the journal of new weights, whose fingerprint is `weights`."""
        # no group is in flight, and those that continue are requested again
        self._digests.clear()
        if self._journal is not None:
            self._journal.begin(policy_version, weights)
        if self._host is not None:
            self._host.begin(policy_version, weights)
