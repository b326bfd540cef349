"""Updates of a step, and the settings of the trainer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.entropy_control import EntropyControlConfig
from megadapo.algorithm.kl_control import KlControlConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.cluster.calls import Watch
from megadapo.data.group import Group
from megadapo.errors import ProcessDiedError
from megadapo.run.processes import GpuSharing
from megadapo.run.step.training import StepTrainer, make_batch
from megadapo.trainer.types import UpdateRequest, UpdateResult
from tests.support.rollout.samplers import MAX_TOKENS, make_sampler
from tests.support.rollout.scripted_engines import ScriptedEngines
from tests.support.runs.runs_alone import config_of
from tests.support.runs.step_results import UPDATE
from tests.support.trainer.batches import random_batch


def test_critic_warmup_keeps_kl_coefficient():
    """Observing a divergence of 0 while the policy does not change would lower it."""
    results = [
        replace(
            UPDATE, metrics=UPDATE.metrics | {"policy/lr": lr, "kl/mean": 0.0, "kl/from_old": 1.0}
        )
        for lr in (0.0, 0.0, 1e-6, 1e-6)
    ]
    coefs, old_coefs = [], []

    def update(request: UpdateRequest) -> UpdateResult:
        coefs.append(request.kl_reward_coef)
        old_coefs.append(request.old_kl_coef)
        return results.pop(0)

    algorithm = AlgorithmConfig(
        objective=PolicyObjective(kl_coef=0.02, kl_in="reward", kl_value="k1", old_kl_coef=0.4),
        kl_control=KlControlConfig(target=0.1, horizon=100, old_target=0.1),
        normalize_by_std=False,
    )
    ranks: Any = SimpleNamespace(update=update, check_others=lambda: None)
    trainer = StepTrainer(ranks, GpuSharing(ranks), algorithm)
    batch = random_batch([5] * 10)
    for step in (1, 2, 3, 4):
        trainer.update(batch, step)
    assert coefs == [0.02] * 3 + [pytest.approx(0.02 * (1 - 0.2 * 10 / 100))]
    assert old_coefs == [0.4] * 3 + [0.8]
    state = trainer.state_dict()
    assert state["old_kl_control"] == {"coef": 1.6} and state["kl_control"]["coef"] < coefs[-1]


def test_entropy_bonus_follows_the_entropy_of_the_step_before():
    """The coefficient that a step reports is its own, not the next one's."""
    results = [
        replace(UPDATE, metrics=UPDATE.metrics | {"policy/lr": lr, "policy/entropy": entropy})
        for lr, entropy in ((0.0, 0.1), (1e-6, 0.2), (1e-6, 0.5), (1e-6, 0.5))
    ]
    requested, recorded = [], []

    def update(request: UpdateRequest) -> UpdateResult:
        requested.append(request.entropy_coef)
        return results.pop(0)

    algorithm = AlgorithmConfig(entropy_control=EntropyControlConfig(target=0.3, delta=0.25))
    ranks: Any = SimpleNamespace(update=update, check_others=lambda: None)
    trainer = StepTrainer(ranks, GpuSharing(ranks), algorithm)
    for step in (1, 2, 3, 4):
        metrics = trainer.update(random_batch([5]), step).metrics
        recorded.append(metrics["entropy/coef"])
        assert metrics["entropy/target"] == 0.3
    assert requested == recorded == [0.0, 0.0, 0.25, 0.0]
    assert trainer.state_dict()["entropy_control"] == {"coef": 0.0, "entropy": 0.5}


@pytest.mark.parametrize("checks", [True, False])
def test_ranks_are_told_whether_to_check_the_first_ratio(checks):
    seen = []
    ranks: Any = SimpleNamespace(
        update=lambda request: seen.append(request.checks_first_ratio) or UPDATE,
        check_others=lambda: None,
    )
    trainer = StepTrainer(ranks, GpuSharing(ranks), AlgorithmConfig())
    trainer.update(random_batch([5]), 1, checks_first_ratio=checks)
    assert seen == [checks]


def test_update_is_not_begun_without_what_the_ranks_work_with():
    """In the middle of an update the weights belong to no step, and nothing can be saved."""
    watch = Watch()
    watch.add(lambda: end("gcs_server has ended"), during_updates=False)
    watch.check(during_update=True)
    ranks: Any = SimpleNamespace(check_others=watch.check)
    trainer = StepTrainer(ranks, GpuSharing(ranks), AlgorithmConfig())
    with pytest.raises(ProcessDiedError, match="gcs_server"):
        trainer.update(random_batch([5]), 1)
    assert trainer.step == 0


def end(reason: str) -> None:
    raise ProcessDiedError(reason)


SIZES = {
    "rollout": {"max_response_tokens": MAX_TOKENS},
    "sampling": {"prompts_per_step": 8, "responses_per_prompt": 3},
    "algorithm": {"overlong_buffer": 0, "responses_per_mini_batch": 12},
}


def partly_stale(group: Group) -> Group:
    """The group with an earlier version at the first half of its first response, and its last."""
    versions = [response.policy_versions.copy() for response in group.responses]
    versions[0][: len(versions[0]) // 2] -= 1
    versions[2] -= 1
    pairs = zip(group.responses, versions, strict=True)
    return replace(group, responses=tuple(replace(r, policy_versions=v) for r, v in pairs))


@pytest.mark.parametrize("advantage", ["grpo", "reinforce++"])
def test_stale_tokens_without_a_loss_do_not_shrink_the_update(advantage):
    """Counted in the divisor they would halve a step in which half of the tokens are stale."""
    engines = ScriptedEngines("last first", slots=200)
    sampled, version = make_sampler(engines).next_batch(), engines.policy_version
    sampled = replace(sampled, groups=tuple(partly_stale(group) for group in sampled.groups))
    algorithm = SIZES["algorithm"] | {"advantage": advantage}
    keys = SIZES | {
        "algorithm": algorithm | {"importance": {"stale_logprobs": "none"}},
        "sampling": SIZES["sampling"] | {"mode": "partial", "max_staleness": 1},
    }
    batch, values = make_batch(sampled, config_of(changes=keys), policy_version=version)
    fresh = batch.policy_versions == version
    assert 0 < fresh.sum() < np.isfinite(batch.logprobs_rollout).sum()
    for members in batch.mini_batches:
        places = np.concatenate(
            [np.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in members]
        )
        assert batch.loss_weights[places][fresh[places]].sum() == pytest.approx(1.0, rel=1e-6)
    if advantage == "reinforce++":
        counts = [
            (r.policy_versions == version).sum()
            for group in sampled.groups
            for r in group.responses
        ]
        assert np.average(np.asarray(values), weights=counts) == pytest.approx(0.0, abs=1e-12)


def test_responses_lost_in_every_group_make_no_larger_updates():
    """The loss weights are over the same mini-batches, and sum to 1 in each."""
    sampled = make_sampler(ScriptedEngines("last first", slots=200)).next_batch()
    lossy = tuple(
        replace(one, responses=one.responses[:2], scores=one.scores[:2]) for one in sampled.groups
    )
    keys = SIZES | {"algorithm": SIZES["algorithm"] | {"responses_per_mini_batch": 6}}
    batch, _ = make_batch(replace(sampled, groups=lossy), config_of(changes=keys), policy_version=0)
    assert [len(members) for members in batch.mini_batches] == [4] * 4
    for members in batch.mini_batches:
        first, last = batch.cu_seqlens[members[0]], batch.cu_seqlens[members[-1] + 1]
        assert batch.loss_weights[first:last].sum() == pytest.approx(1.0, rel=1e-6)
