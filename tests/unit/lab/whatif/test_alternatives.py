"""`--set` changes what it names and nothing else, and refuses what whatif cannot answer."""

import pytest

from megadapo.config import RunConfig, load_config
from megadapo.errors import ConfigError
from megadapo.lab.whatif.alternatives import OWN_NAME, alternatives, settable_keys
from tests.support import REPOSITORY


def quickstart(*overrides: str) -> RunConfig:
    return load_config(REPOSITORY / "configs" / "quickstart.toml", overrides)


def test_alternative_has_its_keys_and_the_runs_others():
    config = quickstart("algorithm.objective.clip_low=0.1")
    text = "algorithm.objective.clip_high=0.35, algorithm.loss_aggregation=seq-mean-token-mean"
    own, one, none = alternatives(config, [text, "algorithm.objective.dual_clip=none"])
    assert (own.name, own.config) == (OWN_NAME, config)
    assert one.name == "objective.clip_high=0.35, loss_aggregation=seq-mean-token-mean"
    objective = config.algorithm.objective.model_copy(update={"clip_high": 0.35})
    expected = {"objective": objective, "loss_aggregation": "seq-mean-token-mean"}
    assert one.config.algorithm == config.algorithm.model_copy(update=expected)
    assert one.config.model_copy(update={"algorithm": config.algorithm}) == config
    assert none.config == config


def test_other_gate_drops_the_keys_of_the_runs_gate():
    """They would be conflicts, which the user could only avoid by repeating defaults."""
    config = quickstart("algorithm.objective.clip_high=0.4", "algorithm.objective.dual_clip=3.0")
    texts = ["algorithm.objective.gate=soft", "algorithm.objective.gate=bapo"]
    _, soft, bapo = alternatives(config, texts)
    assert soft.config.algorithm.objective.changed() == ["gate"]
    assert bapo.config.algorithm.objective.changed() == ["gate", "dual_clip"]
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


def test_run_with_a_critic_takes_other_advantages_and_their_own_keys():
    """Otherwise its section [critic] would be a conflict, which --set cannot name."""
    path = REPOSITORY / "configs" / "algorithms" / "ppo.toml"
    config = load_config(path, ["critic.warmup=2"])
    texts = ["algorithm.gae_lambda=0.9", "algorithm.advantage=rloo"]
    own, decayed, rloo = alternatives(config, texts)
    assert own.config == config
    assert (decayed.config.algorithm.gae_lambda, decayed.config.critic.warmup) == (0.9, 2)
    assert (rloo.config.algorithm.advantage, rloo.config.critic.warmup) == ("rloo", 0)


def test_settable_keys_are_values_that_decide_the_loss():
    keys = settable_keys()
    assert {"algorithm.overlong_buffer", "algorithm.importance.high"} <= set(keys)
    assert not {"algorithm.objective", "algorithm.max_kl"} & set(keys)
    assert not any(key.startswith("algorithm.pretraining") for key in keys)
