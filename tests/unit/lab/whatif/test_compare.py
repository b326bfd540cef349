"""Each alternative has its own numbers of the saved batch, and the run's own mini-batches."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from megadapo.config import load_config
from megadapo.data.group import Group
from megadapo.lab.whatif.alternatives import alternatives
from megadapo.lab.whatif.compare import _variants
from megadapo.run.step.training import make_batch
from tests.support import REPOSITORY
from tests.support.rollout.groups import make_group

KL_IN_REWARD = (
    "algorithm.advantage=rloo",
    "algorithm.objective.kl_coef=0.1",
    "algorithm.objective.kl_in=reward",
    "algorithm.objective.kl_value=k1",
    "algorithm.overlong_buffer=16",
    "rollout.max_response_tokens=32",
)


def overlong_group() -> Group:
    """Return a group whose second response is in the buffer of the overlong punishment."""
    group = make_group(0)
    responses = tuple(
        replace(
            one,
            token_ids=np.arange(length, dtype=np.int32),
            logprobs=np.zeros(length, np.float32),
            policy_versions=np.zeros(length, np.int32),
        )
        for one, length in zip(group.responses, (5, 30), strict=True)
    )
    return replace(group, responses=responses)


def test_rewards_and_kl_coefficient_are_the_alternatives_own():
    """Ranks compute advantages again, from the rewards less the KL divergence."""
    config = load_config(REPOSITORY / "configs" / "quickstart.toml", KL_IN_REWARD)
    texts = ["algorithm.overlong_factor=0.5", "algorithm.objective.kl_coef=0.3"]
    chosen = alternatives(config, texts)
    sampled = SimpleNamespace(groups=[overlong_group()], saved=[])
    saved = SimpleNamespace(sampled=sampled, step=1, metrics={"kl/coef": 0.07})
    own, factor, coef = _variants(saved, chosen)
    for variant, one in zip((own, factor, coef), chosen, strict=True):
        expected, _ = make_batch(sampled, one.config, policy_version=0)
        np.testing.assert_array_equal(variant.batch.rewards, expected.rewards)
        np.testing.assert_array_equal(variant.batch.advantages, expected.advantages)
    assert factor.batch.rewards[1] > own.batch.rewards[1]
    # the recorded one has moved from the configured 0.1
    assert [one.kl_reward_coef for one in (own, factor, coef)] == [0.07, 0.07, 0.3]
