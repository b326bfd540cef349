"""The number of engines with which a run starts."""

import pytest

from megadapo.rollout.pool.request import REQUEST_FILE, EngineRequest, write_request
from megadapo.run.processes import at_start
from tests.support.runs.runs_alone import config_of


@pytest.mark.parametrize(("wanted", "started"), [(None, 3), (1, 1), (3, 3), (8, 3)])
def test_start_needs_no_more_slots_than_the_recipe(tmp_path, wanted, started):
    """A run whose engines were removed with their nodes would wait for these nodes."""
    config = config_of(tmp_path, {"cluster.placement": "separate", "rollout.num_engines": 3})
    if wanted is not None:
        write_request(tmp_path, EngineRequest(num_engines=wanted))
    assert at_start(config, tmp_path).rollout.num_engines == started
    assert config.rollout.num_engines == 3


def test_damaged_or_useless_request_changes_nothing(tmp_path):
    config = config_of(tmp_path, {"rollout.num_engines": 3})
    write_request(tmp_path, EngineRequest(num_engines=1))
    assert at_start(config, tmp_path) == config
    (tmp_path / REQUEST_FILE).write_text("[")
    separate = config_of(tmp_path, {"cluster.placement": "separate", "rollout.num_engines": 3})
    assert at_start(separate, tmp_path) == separate
