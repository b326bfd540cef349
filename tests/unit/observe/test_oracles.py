"""The oracles stop a run on the step that breaks an invariant, and only then."""

import math

import pytest

from megadapo.errors import ConfigError, OracleError
from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.oracles import OracleConfig, check_oracles


def record(step: int = 1, **values: float | None) -> MetricRecord:
    healthy: MetricRecord = dict.fromkeys(METRIC_NAMES)
    healthy |= {
        "step": step,
        "staleness/token_share": 0.4,
        "tokens/trained": 1000,
        "policy/loss": 0.1,
        "policy/ratio_first_max_error": 0.0,
        "policy/skipped_updates": 0,
        "parity/logprob_abs_mean": 1e-6,
        "parity/logprob_abs_max": 1e-5,
    }
    return healthy | {name.replace("__", "/"): value for name, value in values.items()}


CONFIG = OracleConfig(logprob_abs_max=1e-4, logprob_abs_mean=1e-5)


def check(*records, is_deterministic=True):
    return check_oracles(list(records), CONFIG, is_deterministic=is_deterministic)


def test_a_healthy_step_passes():
    check(record())


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("policy/ratio_first_max_error", 1e-7),
        ("policy/ratio_first_max_error", math.nan),
        ("parity/logprob_abs_max", 1.1e-4),
        ("parity/logprob_abs_mean", 1.1e-5),
        ("parity/logprob_abs_max", None),
        ("parity/probe_abs_max", 1.1e-4),
        ("parity/probe_abs_mean", 1.1e-5),
        ("parity/probe_abs_mean", math.nan),
        ("policy/loss", math.inf),
    ],
)
def test_a_broken_bound_stops_the_run_and_is_named(metric, value):
    """NaN and an unmeasured value must not pass as "not above the bound"."""
    with pytest.raises(OracleError, match=metric if "loss" not in metric else "non-finite"):
        check(record(**{metric.replace("/", "__"): value}))


def test_step_that_measures_no_first_ratio_is_sound():
    """GPUs with one mini-batch a step measure it in step 1 and with each checkpoint."""
    unmeasured = record(2, policy__ratio_first_max_error=None)
    assert not check(record(1), unmeasured)
    broken = record(3, policy__ratio_first_max_error=1e-6)
    assert check(record(1), unmeasured, broken, is_deterministic=False)
    with pytest.raises(OracleError, match="ratio_first_max_error"):
        check(unmeasured, broken)


def test_a_ratio_beside_1_is_reported_once_where_bits_need_not_repeat():
    """The order of a sum must neither end a run on GPUs nor be hidden; NaN is no rounding."""
    broken = {"policy__ratio_first_max_error": 1e-6}
    (note,) = check(record(1), record(2, **broken), is_deterministic=False)
    assert "step 2" in note and "trainer.deterministic" in note
    assert not check(record(1, **broken), record(2, **broken), is_deterministic=False)
    with pytest.raises(OracleError, match="ratio_first_max_error"):
        check(record(policy__ratio_first_max_error=math.nan), is_deterministic=False)
    with pytest.raises(OracleError, match="logprob_abs_max"):
        check(record(parity__logprob_abs_max=1.0), is_deterministic=False)


def test_two_skipped_steps_are_survived_and_three_in_a_row_are_not():
    skipped = {"policy__skipped_updates": 1, "policy__loss": math.nan}
    check(record(1), record(2, **skipped), record(3, **skipped))
    check(record(1, **skipped), record(2, **skipped), record(3), record(4, **skipped))
    with pytest.raises(OracleError, match="step 3: updates were skipped in 3 steps in a row"):
        check(record(1, **skipped), record(2, **skipped), record(3, **skipped))


def test_a_batch_of_stale_tokens_alone_is_checked_by_its_probe():
    """No fresh token can show that the engines have wrong weights."""
    unmeasured = {"parity__logprob_abs_max": None, "parity__logprob_abs_mean": None}
    check(record(staleness__token_share=1.0, **unmeasured))
    with pytest.raises(OracleError, match="probe_abs_max"):
        check(record(staleness__token_share=1.0, **unmeasured, parity__probe_abs_max=1.1e-4))
    with pytest.raises(OracleError, match="ratio_first_max_error"):
        broken = {"policy__ratio_first_max_error": 1e-6}
        check(record(staleness__token_share=1.0, **unmeasured, **broken))


def test_one_ill_conditioned_token_among_few_does_not_stop_a_run():
    """Three fresh tokens had a mean above the bound in a run that was right."""
    few = {"staleness__token_share": 0.9964, "tokens__trained": 821}
    check(record(parity__logprob_abs_mean=2.8e-5, **few))
    with pytest.raises(OracleError, match="logprob_abs_mean"):
        # three tokens that are all wrong
        check(record(parity__logprob_abs_mean=4e-4, **few))
    for metric, value in (("mean", math.nan), ("max", 1.1e-4)):
        with pytest.raises(OracleError, match=f"logprob_abs_{metric}"):
            check(record(**{f"parity__logprob_abs_{metric}": value}, **few))
    with pytest.raises(OracleError, match="logprob_abs_mean"):
        check(record(parity__logprob_abs_mean=2.8e-5, staleness__token_share=0.9))


def test_bounds_that_can_never_hold_are_refused():
    with pytest.raises(ConfigError, match="oracles.logprob_abs_max"):
        OracleConfig(logprob_abs_max=-1.0)
    with pytest.raises(ConfigError, match="oracles.ratio_first_max_error"):
        OracleConfig(ratio_first_max_error=math.nan)
