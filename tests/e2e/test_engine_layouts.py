"""Several engines, and one engine over several ranks, on one machine."""

import pytest

from megadapo.rollout.requests import response_seeds
from tests.support.engine_checks import (
    Reference,
    ask,
    bits,
    group_request,
    make_requests,
    running_engines,
    worst_error,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_two_engines_share_a_machine_and_agree(tiny_model, tmp_path):
    """Pinned to the same core they would be half as fast; here both must at least answer alike."""
    with running_engines(tiny_model, tmp_path, num_engines=2) as engines:
        seeds = response_seeds(8, "both")
        twins = [group_request(key, (9, 8, 7, 6), seeds) for key in (0, 1)]
        answers = bits(ask(engines, twins))
        assert answers[0] == answers[1]
        groups = make_requests(9, 2)
        answers = ask(engines, groups)
        assert worst_error(Reference(tiny_model), groups, answers) < 1e-5
        assert bits(ask(engines, groups[::-1])) == bits(answers)
    assert {path.name for path in tmp_path.iterdir()} == {"engine-0.log", "engine-1.log"}


def test_an_engine_over_two_ranks_computes_the_same_model(tiny_model, tmp_path):
    with running_engines(tiny_model, tmp_path, tensor_parallel=2) as engines:
        groups = make_requests(9, 2)
        answers = ask(engines, groups)
        assert worst_error(Reference(tiny_model), groups, answers) < 1e-5
        assert bits(ask(engines, groups)) == bits(answers)
