"""Groups saved for the next step: surplus groups, and unfinished groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megadapo.data.group import Group, Response
from megadapo.data.group_codec import (
    decode_group,
    decode_response,
    encode_group,
    encode_response,
)
from megadapo.errors import CheckpointError


class Reserve:
    """A bounded queue of surplus groups, ordered by prompt index."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._groups: deque[Group] = deque()
        self._encoded: dict[int, tuple[Group, dict[str, Any]]] = {}
        """JSON values of the groups by identity, as most groups stay for many steps."""

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, num_groups: int, *, oldest_version: int) -> tuple[list[Group], list[Group]]:
        """Take the first groups, and all groups that are too old.

        Args:
            num_groups: largest number of usable groups.
            oldest_version: smallest policy version that a token of a usable group may have.

        Returns:
            The usable groups, and the groups that are too old.
        """
        expired = [group for group in self._groups if group.oldest_version < oldest_version]
        usable = [group for group in self._groups if group.oldest_version >= oldest_version]
        self._groups = deque(usable[num_groups:])
        return usable[:num_groups], expired

    def put(self, groups: Sequence[Group]) -> int:
        """Keep as many of the groups as fit, and return their number."""
        kept = groups[: max(0, self._limit - len(self._groups))]
        self._groups = deque(sorted([*self._groups, *kept], key=lambda group: group.prompt_index))
        return len(kept)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return all groups as JSON values; each group is encoded once."""
        known, self._encoded = self._encoded, {}
        for group in self._groups:
            # the entry holds the group as well, so that its id is not reused
            entry = known.get(id(group)) or (group, encode_group(group))
            self._encoded[id(group)] = entry
        return [entry for _, entry in self._encoded.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Replace the contents; if the limit is smaller now, the first groups stay.

        Raises:
            CheckpointError: the state is damaged.
        """
        try:
            groups = [decode_group(entry) for entry in state]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved reserve of groups is damaged: {error!r}") from error
        self._groups = deque(groups[: self._limit])


def encode_unfinished(groups: Mapping[int, Sequence[Response]]) -> list[dict[str, Any]]:
    """Return stopped groups, by prompt index, as JSON values; their numbers stay exact."""
    return [
        {"prompt_index": index, "responses": [encode_response(one) for one in responses]}
        for index, responses in groups.items()
    ]


def decode_unfinished(entries: Sequence[Mapping[str, Any]]) -> dict[int, tuple[Response, ...]]:
    """Return the groups that `encode_unfinished` wrote.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: the entries are damaged.
    """
    return {
        int(entry["prompt_index"]): tuple(decode_response(one) for one in entry["responses"])
        for entry in entries
    }
