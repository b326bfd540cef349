"""Objectives to compare, and the saved step that they are compared on."""

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from megadapo.algorithm.config import Aggregation
from megadapo.config import RunConfig, load_config
from megadapo.data.group import Group
from megadapo.errors import ConfigError
from megadapo.lab.whatif.alternatives import (
    OWN_NAME,
    all_aggregations,
    alternatives,
    settable_keys,
)
from megadapo.lab.whatif.compare import _variants
from megadapo.run.step.training import make_batch
from tests.support import REPOSITORY
from tests.support.rollout.groups import make_group


def quickstart(*overrides: str) -> RunConfig:
    return load_config(REPOSITORY / "configs" / "quickstart.toml", overrides)


def test_alternative_has_its_keys_and_the_runs_others():
    config = quickstart("algorithm.objective.clip_low=0.1")
    text = "algorithm.objective.clip_high=0.35, algorithm.loss_aggregation=seq-mean-token-mean"
    own, (name, one), (_, none) = alternatives(config, [text, "algorithm.objective.dual_clip=none"])
    assert own == (OWN_NAME, config)
    assert name == "objective.clip_high=0.35, loss_aggregation=seq-mean-token-mean"
    objective = config.algorithm.objective.model_copy(update={"clip_high": 0.35})
    expected = {"objective": objective, "loss_aggregation": "seq-mean-token-mean"}
    assert one.algorithm == config.algorithm.model_copy(update=expected)
    assert one.model_copy(update={"algorithm": config.algorithm}) == config
    assert none == config


@pytest.mark.parametrize("recipe", ["vl", "dr-grpo", "balanced", "ppo"])
def test_every_aggregation_is_an_alternative(recipe):
    """A divisor of the run's own, or an exponent, would be a conflict in the others."""
    config = load_config(REPOSITORY / "configs" / "algorithms" / f"{recipe}.toml")
    found = [one.algorithm for _, one in alternatives(config, all_aggregations(config))]
    names = {one.loss_aggregation for one in found}
    assert len(found) == len(names) == len(get_args(Aggregation)) - (recipe == "ppo")
    lengths = {one.loss_aggregation: one.loss_length for one in found}
    assert {name for name, length in lengths.items() if length} == {"vl", "seq-mean-token-sum-norm"}


def test_other_gate_drops_the_keys_of_the_runs_gate():
    """They would be conflicts, which the user could only avoid by repeating defaults."""
    config = quickstart("algorithm.objective.clip_high=0.4", "algorithm.objective.dual_clip=3.0")
    texts = ["algorithm.objective.gate=soft", "algorithm.objective.gate=bapo"]
    _, (_, soft), (_, bapo) = alternatives(config, texts)
    assert soft.algorithm.objective.changed() == ["gate"]
    assert bapo.algorithm.objective.changed() == ["gate", "dual_clip"]
    with pytest.raises(ConfigError, match=r"clip_high: not read with .*gate = \"soft\""):
        alternatives(config, [f"{texts[0]},algorithm.objective.clip_high=0.3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "algorithm.objective.clip_hgih=0.3",
            r"clip_hgih .* mean algorithm\.objective\.clip_high\?",
        ),
        ("clip_high=0.3", r"not a key of \[algorithm\]; did you mean algorithm\.objective\.clip_h"),
        ("trainer.optimizer.lr=1e-5", r"trainer\.optimizer\.lr is not a key of \[algorithm\]"),
        ("algorithm.passes=2", r"algorithm\.passes changes no loss of a saved batch"),
        ("algorithm.reference.path=a", r"reference\.path changes no loss of a saved batch"),
        ("algorithm.objective={}", r"algorithm\.objective is not a key with a value"),
        ("algorithm.objective.clip_high", r"write algorithm\.objective\.clip_high=VALUE"),
        ("algorithm.objective.clip_high=-1", r"clip_high = -1 must be at least 0"),
        ("algorithm.objective.gate=weight", r"needs algorithm\.objective\.weight_max"),
        ("algorithm.objective.gate=7", r"algorithm\.objective\.gate: expected"),
        ("algorithm.advantage=gae", r"the run has no critic"),
        ("algorithm.objective.kl_coef=0.1", r"kl_coef: the run has no reference policy"),
    ],
)
def test_refusal_names_the_option_and_the_key(text: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        alternatives(quickstart(), [text])
    assert str(caught.value).startswith(f"--set {text}: ")


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("ppo-ptx-penalty", "algorithm.objective.old_kl_coef=0"),
        ("ppo", "algorithm.objective.kl_coef=0"),
        ("bapo-logits", "algorithm.objective.gate=clip"),
        ("dr-grpo", "algorithm.advantage=rloo"),
    ],
)
def test_keys_that_only_the_runs_own_objective_reads_are_dropped(recipe, text):
    """They would be conflicts, which --set cannot avoid."""
    config = load_config(REPOSITORY / "configs" / "algorithms" / f"{recipe}.toml")
    assert len(alternatives(config, [text])) == 2


def test_run_with_a_critic_takes_other_advantages_and_their_own_keys():
    """Otherwise its section [critic] would be a conflict, which --set cannot name."""
    path = REPOSITORY / "configs" / "algorithms" / "ppo.toml"
    config = load_config(path, ["critic.warmup=2"])
    texts = ["algorithm.gae_lambda=0.9", "algorithm.advantage=rloo"]
    own, (_, decayed), (_, rloo) = alternatives(config, texts)
    assert own == (OWN_NAME, config)
    assert (decayed.algorithm.gae_lambda, decayed.critic.warmup) == (0.9, 2)
    assert (rloo.algorithm.advantage, rloo.critic.warmup) == ("rloo", 0)


def test_settable_keys_are_values_that_decide_the_loss():
    keys = settable_keys()
    assert {"algorithm.overlong_buffer", "algorithm.importance.high"} <= set(keys)
    assert not {"algorithm.objective", "algorithm.max_kl"} & set(keys)
    assert not any(key.startswith("algorithm.pretraining") for key in keys)


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
    config = quickstart(*KL_IN_REWARD, "algorithm.objective.old_kl_coef=1.0")
    texts = [
        "algorithm.overlong_factor=0.5",
        "algorithm.objective.kl_coef=0.3,algorithm.objective.old_kl_coef=0.5",
    ]
    chosen = alternatives(config, texts)
    sampled = SimpleNamespace(groups=[overlong_group()], saved=[])
    saved = SimpleNamespace(sampled=sampled, step=1, metrics={"kl/coef": 0.07, "kl/old_coef": 4.0})
    own, factor, coef = _variants(saved, chosen)
    for variant, (_, one) in zip((own, factor, coef), chosen, strict=True):
        expected, _ = make_batch(sampled, one, policy_version=0)
        np.testing.assert_array_equal(variant.batch.rewards, expected.rewards)
        np.testing.assert_array_equal(variant.batch.advantages, expected.advantages)
    assert factor.batch.rewards[1] > own.batch.rewards[1]
    # the recorded one has moved from the configured 0.1
    assert [one.kl_reward_coef for one in (own, factor, coef)] == [0.07, 0.07, 0.3]
    old_coefs = [one.algorithm.objective.old_kl_coef for one in (own, factor, coef)]
    assert old_coefs == [4.0, 4.0, 0.5]


def test_entropy_bonus_is_the_recorded_one():
    """An entropy target has moved the configured coefficient."""
    config = quickstart("algorithm.entropy_control.target=0.3")
    chosen = alternatives(config, ["algorithm.objective.entropy_coef=0.5"])
    sampled = SimpleNamespace(groups=[overlong_group()], saved=[])
    saved = SimpleNamespace(sampled=sampled, step=1, metrics={"entropy/coef": 0.0625})
    found = [one.algorithm.objective.entropy_coef for one in _variants(saved, chosen)]
    assert found == [0.0625, 0.5]
