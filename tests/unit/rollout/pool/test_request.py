"""The request for a number of engines: a driver accepts no more than a request of such a file."""

import os

import pytest

from megadapo.errors import DataError
from megadapo.rollout.pool.request import (
    MAX_BYTES,
    REQUEST_FILE,
    EngineRequest,
    read_request,
    write_request,
)


def test_request_survives_the_disk(tmp_path):
    request = EngineRequest(
        num_engines=3, driver="a 1 b", leave=(4, 7), leave_nodes=("10.0.0.7",), within_s=30.0
    )
    assert read_request(tmp_path) is None
    write_request(tmp_path, request)
    assert read_request(tmp_path) == request
    assert os.listdir(tmp_path) == [REQUEST_FILE]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"num_engines": 0}',
        '{"num_engines": -1}',
        '{"num_engines": 100000}',
        '{"num_engines": "2"}',
        '{"num_engines": 1.5}',
        '{"num_engines": true}',
        '{"num_engines": NaN}',
        '{"num_engines": 2, "leave": [-1]}',
        '{"num_engines": 2, "leave": "all"}',
        '{"num_engines": 2, "leave_nodes": [1]}',
        '{"num_engines": 2, "within_s": -1}',
        '{"num_engines": 2, "within_s": 1e99}',
        '{"num_engines": 2, "command": "rm"}',
        "[" * 60_000,
        '{"num_engines": 2, "driver": "' + "x" * MAX_BYTES + '"}',
    ],
)
def test_hostile_request_is_one_error(tmp_path, text):
    """Anything else would end the run of any user who shares its folder."""
    (tmp_path / REQUEST_FILE).write_text(text)
    with pytest.raises(DataError, match="engines.json"):
        read_request(tmp_path)


def test_what_is_no_file_is_an_error(tmp_path):
    (tmp_path / REQUEST_FILE).mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        read_request(tmp_path)
    (tmp_path / REQUEST_FILE).rmdir()
    (tmp_path / REQUEST_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="engines.json"):
        read_request(tmp_path)


def test_names_are_for_one_driver():
    """Engine 3 of the next driver is another engine, which must not leave."""
    request = EngineRequest(num_engines=2, driver="a", leave=(3,), leave_nodes=("n",), within_s=5.0)
    assert request.for_driver("a") == request
    assert request.for_driver("b") == EngineRequest(num_engines=2, within_s=5.0)
