"""Every metric has a meaning, and the page of metrics is current."""

from megadapo.cli import main
from megadapo.observe.metrics.names import METRICS, metrics_page
from tests.support import REPOSITORY

PROMISED = """
step policy_version time/step_s time/rollout_s time/train_s time/sync_s time/reward_s tokens_per_s
reward/mean accuracy/mean response_length/mean response_length/p95
response_length/truncated_fraction groups/sampled groups/kept groups/all_correct groups/all_wrong
groups/from_reserve groups/to_reserve tokens/generated tokens/trained policy/loss policy/entropy
policy/ratio_mean policy/ratio_first_max_error policy/clip_low_fraction policy/clip_high_fraction
policy/clip_high_probability
policy/token_probability_mean policy/grad_norm policy/lr policy/skipped_updates
parity/logprob_abs_mean parity/logprob_abs_max eval/accuracy
"""
"""Names that dashboards of users read."""


def test_promised_names_stay():
    assert set(PROMISED.split()) <= METRICS.keys()


def test_every_metric_has_a_sentence():
    assert all(meaning.endswith(".") for meaning in METRICS.values())


def test_page_is_current(capsys):
    """megadapo config --metrics > docs/metrics.md"""
    assert (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_page()
    assert main(["config", "--metrics"]) == 0
    assert capsys.readouterr().out == metrics_page()
