"""A step's results have a metric for every name, and every omission has a warning."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megadapo.config import RunConfig
from megadapo.observe.metrics.names import METRIC_NAMES, is_repeated
from megadapo.observe.metrics.records import MetricsLog, read_metrics
from megadapo.observe.metrics.reflection import metric_name
from megadapo.rewards.verifier import VerifierCounts
from megadapo.rollout.sampling.statistics import GroupStats, SampledBatch
from megadapo.rollout.types import EngineActivity
from megadapo.run.step.metrics import step_metrics, step_warnings, verifier_summary
from megadapo.trainer.types import UpdateResult
from tests.support.rollout.groups import make_group
from tests.support.rollout.saved_groups import saved_group
from tests.support.runs.runs_alone import config_of
from tests.support.runs.step_results import UPDATE


def group_stats(*lengths: int, num_correct: int, seconds: float = 1.0, **values) -> GroupStats:
    return GroupStats(
        **{
            "prompt_index": 0,
            "prompt_id": "",
            "num_correct": num_correct,
            "num_responses": len(lengths),
            "reward_sum": 2.0 * num_correct - len(lengths),
            "reward_range": (0.0, 0.0),
            "lengths": lengths,
            "mean_logprobs": (),
            "repetitions": (),
            "num_truncated": 0,
            "is_mixed": 0 < num_correct < len(lengths),
            "is_one_text": False,
            "seconds": seconds,
            "num_generated": sum(lengths),
        }
        | values
    )


SAMPLED = SampledBatch(
    stats=[
        group_stats(5, 60, num_correct=2, seconds=0.5),
        group_stats(90, num_correct=0, seconds=1.5),
        group_stats(100, num_correct=0, seconds=2.0),
    ],
    counts={**SampledBatch().counts, "tokens/stopped": 70, "time/reward_s": 0.1},
    engines=[
        EngineActivity(
            num_tokens=300,
            seconds=3.0,
            busy_seconds=1.5,
            mean_running=0.5,
            max_waiting=7,
            num_preemptions=2,
            max_kv_use=0.5,
            private_bytes=1024 << 20,
        ),
        EngineActivity(
            num_tokens=200,
            seconds=3.0,
            busy_seconds=2.5,
            mean_running=0.75,
            num_preemptions=1,
            max_kv_use=0.25,
            private_bytes=1536 << 20,
        ),
    ],
)
SIZES = {
    "rollout": {"max_response_tokens": 100},
    "sampling": {"prompts_per_step": 8, "responses_per_prompt": 2},
    "algorithm": {"overlong_buffer": 40, "overlong_factor": 0.5, "responses_per_mini_batch": 4},
}
CONFIG = config_of(changes=SIZES)
OWN = [metric_name(phrase) for phrase in CONFIG.observe.reflection_phrases]
ADDED_BY_THE_RUN = {
    *("time/step_s", "time/rollout_s", "time/train_s", "time/sync_s", "tokens_per_s"),
    *("time/evaluate_s", "time/checkpoint_s", "eval/accuracy", "eval/policy_version"),
    *("eval/score", "eval/pass_at_k", "eval/cons_at_k", "eval/response_length"),
    *("eval/loss", "eval/pair_accuracy", "pairs/accuracy", "pairs/margin"),
    "memory/driver_mib",
}


def metrics(config: RunConfig = CONFIG, **changes: object) -> dict:
    """Return the metrics of a changed step."""
    return step_metrics(3, replace(SAMPLED, **changes), UPDATE, config=config)


def test_every_metric_name_is_given():
    assert set(metrics()) == {*METRIC_NAMES, *OWN} - ADDED_BY_THE_RUN


def test_reward_parts_have_metrics(tmp_path):
    stats = [group_stats(3, 5, num_correct=1, parts=(("mine/format", 0.0), ("mine/format", 1.0)))]
    found = metrics(stats=stats)
    with MetricsLog(tmp_path) as log:
        log.record(found)
    (record,) = read_metrics(tmp_path)
    assert list(record) == [*METRIC_NAMES, "reward/mine/format", *OWN]
    assert record["reward/mine/format"] == 0.5


def test_degenerate_responses_are_counted_over_all_sampled_ones():
    group = make_group(2)
    odd, *others = group.responses
    loop = replace(
        odd,
        token_ids=np.full(40, 7, dtype=np.int32),
        logprobs=np.full(40, -9.0, dtype=np.float32),
        policy_versions=np.zeros(40, dtype=np.int32),
    )
    plain = [
        replace(one, logprobs=np.full(len(one.logprobs), -0.1, dtype=np.float32)) for one in others
    ]
    stats = GroupStats.from_group(replace(group, responses=(loop, *plain)), is_mixed=True)
    found = metrics(stats=[stats])
    assert found["degenerate/gibberish"] == found["degenerate/repetitive"] == 1 / (1 + len(plain))
    known = metrics(stats=[replace(stats, mean_logprobs=(math.nan, *stats.mean_logprobs[1:]))])
    assert known["degenerate/gibberish"] == 0.0


def test_tool_metrics_need_a_tool():
    """0 calls are a number, and what was not generated but read has none."""
    mark = {"environment": "mark", "options": {"stop": ";"}}
    tools = {"rollout.environments": [mark], "sampling.branching.initial_rollouts": 1}
    on = config_of(changes={**SIZES, **tools})
    names = ("calls_per_response", "token_share", "branches_per_group", "entropy_rise")

    def found(config, *stats, is_replay=False):
        record = metrics(config, stats=list(stats), is_replay=is_replay)
        return [record[f"tools/{name}"] for name in names]

    counts = {"num_calls": 3, "num_branches": 2, "entropy_rises": (-0.1, math.nan)}
    group = group_stats(3, 5, num_correct=1, **counts)
    assert found(on, group) == [1.5, 0.0, 2.0, -0.1]
    assert found(on) == [None, None, None, None]
    assert found(on, group, is_replay=True) == [None, None, None, None]
    assert found(CONFIG, group) == [None, None, None, None]


def test_step_and_trainer_metrics_are_in_the_record():
    found = metrics()
    assert {name: found[name] for name in UPDATE.metrics} == UPDATE.metrics
    assert (found["step"], found["policy_version"]) == (3, 3)


def test_overlong_penalty_covers_all_responses():
    """Lengths 90 and 100 are 30 and 40 of 40 tokens inside the buffer, at half weight."""
    stats = [replace(SAMPLED.stats[0], reward_sum=3.0), *SAMPLED.stats[1:]]
    found = metrics(stats=stats)
    assert found["reward/overlong_penalty_mean"] == pytest.approx(-0.5 * (0.75 + 1.0) / 4)
    assert found["reward/shaped_mean"] == pytest.approx(0.25 - 0.5 * (0.75 + 1.0) / 4)


def test_spread_over_engines_and_ranks():
    found = metrics()
    assert (found["rollout/engine_tokens_min"], found["rollout/engine_tokens_max"]) == (200, 300)
    assert (found["time/engine_min_s"], found["time/engine_max_s"]) == (1.5, 2.5)
    assert (found["train/rank_tokens_min"], found["train/rank_tokens_max"]) == (190, 210)
    times = (found["time/rank_logprobs_min_s"], found["time/rank_logprobs_max_s"])
    assert times == (0.5, 0.75)
    assert found["train/slowest_rank"] == 1
    assert (found["memory/engine_min_mib"], found["memory/engine_max_mib"]) == (1024, 1536)
    assert (found["memory/rank_min_mib"], found["memory/rank_max_mib"]) == (7, 9)


def test_group_times_and_engine_load():
    found = metrics()
    lengths = [found[f"response_length/{name}"] for name in ("mean", "p50", "p95", "max")]
    assert lengths == [63.75, 75.0, pytest.approx(98.5), 100.0]
    times = [found[f"time/group_{name}_s"] for name in ("p50", "p95", "max")]
    assert times == [1.5, pytest.approx(1.95), 2.0]
    assert found["rollout/engine_busy_share"] == pytest.approx(4.0 / 6.0)
    assert found["rollout/slot_use"] == pytest.approx((0.5 * 1.5 + 0.75 * 2.5) / 6.0)
    assert (found["rollout/preemptions"], found["rollout/kv_use_max"]) == (3, 0.5)
    assert found["rollout/tokens_per_s_max"] == 100.0
    assert found["tokens/stopped"] == 70


def test_groups_without_signal_are_shares_of_all_sampled():
    """Steps that sample again after a shortfall have larger counts."""
    mixed = [group_stats(3, 5, num_correct=1)] * 5
    found = metrics(stats=[*SAMPLED.stats, *mixed])
    assert found["groups/all_correct_share"] == 0.125
    assert found["groups/all_wrong_share"] == 0.25


def test_wrong_groups_of_one_text_are_counted():
    """Equal responses to problems that are solved would look like a collapse."""
    stats = [group_stats(3, 3, num_correct=num, is_one_text=True) for num in (0, 1, 2)]
    assert metrics(stats=[*SAMPLED.stats, *stats])["groups/one_text_wrong"] == 1


def test_rejected_groups_with_unequal_rewards_are_counted():
    """Neither small bonuses, nor mixed groups outside of the range, nor equal rewards count."""

    def unequal(*groups, **values):
        stats = [group_stats(3, 3, num_correct=num, reward_range=ends) for num, ends in groups]
        stats = [replace(group, **values) for group in stats]
        return metrics(stats=stats)["groups/rejected_unequal"]

    judged = [(2, (3.0, 9.0)), (0, (0.0, 2.5)), (2, (10.0, 10.0)), (1, (2.0, 9.0))]
    assert unequal(*judged) == 2
    assert unequal(*judged, is_mixed=False) == 2
    assert unequal((0, (-1.0, -0.9)), (2, (1.0, 1.1))) == 0
    assert unequal((0, (1.0, 1.0))) == unequal((0, (1.0, 9.0)), num_correct=None) == unequal() == 0
    assert unequal(*judged, is_mixed=True) == 0


def test_step_without_responses_has_null_means():
    found = metrics(stats=[])
    responses = ("accuracy/mean", "reward/mean", "response_length/p95", "time/group_max_s")
    for name in (*responses, "groups/all_correct_share", "groups/all_wrong_share"):
        assert found[name] is None


def test_failures_of_environments_are_counted_and_not_repeated():
    """Catches a comparison of two runs that names a lost process as a difference."""
    name = "environment/Sum/failures/timeout"
    assert metrics(counts={**SAMPLED.counts, name: 3.0})[name] == 3.0
    assert not is_repeated(name) and is_repeated("environment/Sum/failed")


def test_replayed_step_has_null_generation():
    found = metrics(is_replay=True, engines=())
    names = ("tokens/generated", "time/reward_s", "time/engine_max_s", "rollout/engine_tokens_min")
    assert [found[name] for name in names] == [None] * 4
    assert found["accuracy/mean"] == 0.5


def notes(num_groups: int = 8, update: UpdateResult = UPDATE, **values: object) -> str:
    groups = (saved_group().group,) * num_groups
    sampled = replace(SAMPLED, groups=groups, **values)
    return "\n".join(step_warnings(3, sampled, update, CONFIG))


def test_healthy_step_has_no_warnings():
    assert notes() == ""


def test_each_omission_is_a_warning_with_its_count():
    assert "only 5 of 8 groups" in notes(5)
    assert "5 of 8 groups of the batch are saved" in notes(5, is_replay=True)
    dropped = [saved_group().group] * 5
    assert "5 groups dropped: they are older" in notes(dropped=dropped)
    assert "7 response tokens" in notes(update=replace(UPDATE, num_dropped_tokens=7))
    skipped = replace(UPDATE, metrics=UPDATE.metrics | {"policy/skipped_updates": 2})
    assert "2 updates skipped" in notes(update=skipped)


@pytest.mark.parametrize("is_replay", [False, True])
def test_too_few_groups_warn_about_smaller_updates(is_replay):
    assert "with 3 updates of 1 or 2 groups instead of 2" in notes(5, is_replay=is_replay)
    assert "with 2 updates of 2 groups" in notes(4, is_replay=is_replay)


def test_disagreements_are_counted_by_side():
    counts = VerifierCounts(
        num_scored=100,
        num_only_rule=3,
        num_only_symbolic=4,
        num_checked=50,
        num_timeouts=1,
        num_skipped=2,
    )
    note = verifier_summary(counts)
    assert "3 correct by the rule alone" in note and "4 correct symbolically alone" in note
    assert "3 lost to limits" in note
