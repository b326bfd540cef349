"""`megadapo whatif` has the update's own numbers, and fp64's, at every split."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.data.batch import PackedBatch
from megadapo.lab.whatif.types import Measured, OldNumbers, Variant
from megadapo.trainer.types import Metrics
from tests.support.trainer.batches import RAGGED, signed_batch, stale_batch
from tests.support.trainer.definition import BAPO, loss_and_gradients
from tests.support.trainer.probes import build, update
from tests.support.trainer.ranks import DISCOUNT, layout, with_marks

OBJECTIVES = {
    "own": PolicyObjective(clip_low=0.05, clip_high=0.08),
    "same": PolicyObjective(clip_low=0.05, clip_high=0.08),
    "gspo": PolicyObjective(ratio="sequence", clip_low=0.01, clip_high=0.01),
    "bapo": PolicyObjective(gate="bapo"),
    "sapo": PolicyObjective(gate="soft"),
    "reinforce": PolicyObjective(ratio="none", gate="none", entropy_coef=0.1),
}
KL_IN_REWARD = PolicyObjective(kl_coef=0.3, kl_in="reward", kl_value="k1")


def measured_twice(
    rendezvous, settings, variants: Sequence[Variant], old: np.ndarray
) -> tuple[list[Measured], list[Measured], np.ndarray | None]:
    """Return the numbers with current and with given old log-probs, and the current log-probs."""
    from megadapo.lab.whatif.measure import measure

    rank = build(rendezvous, settings)
    first, current, _ = measure(rank, variants, 0, None)
    second, *_ = measure(rank, variants, 0, OldNumbers(logprobs=old))
    logprobs = None if current is None else current.logprobs
    return first, second, logprobs


def with_moved_reference(rendezvous, settings, variants: Sequence[Variant]) -> list[list[Measured]]:
    """Return numbers before the reference policy moves; after it, from old ones and from new."""
    from megadapo.lab.whatif.measure import measure

    rank = build(rendezvous, settings)
    first, old, _ = measure(rank, variants, 0, None)
    assert rank.reference is not None
    for weights in rank.reference._weights.values():
        weights.mul_(1.5)
    return [first, *(measure(rank, variants, 0, given)[0] for given in (old, None))]


def first_update(rendezvous, settings, batch: PackedBatch) -> Metrics:
    return update(build(rendezvous, settings), batch, step=1).metrics


def beside_second_update(
    rendezvous, settings, variants: Sequence[Variant], policy_version: int, number: int = 0
) -> tuple[Measured, Metrics]:
    """Return an objective's numbers after one update, and the metrics of the next one."""
    from megadapo.lab.whatif.measure import measure

    rank, batch = build(rendezvous, settings), variants[number].batch
    update(rank, batch, step=1, policy_version=policy_version)
    found, *_ = measure(rank, variants, policy_version, None)
    return found[number], update(rank, batch, step=2, policy_version=policy_version).metrics


@pytest.fixture(scope="module")
def logprobs(ranks) -> np.ndarray:
    variants = [variant(signed_batch(RAGGED), OBJECTIVES["own"])]
    unused = np.zeros(len(variants[0].batch.tokens), dtype=np.float32)
    ((_, _, found),) = ranks.on("qwen2-tied", measured_twice, variants, unused)
    return found


@pytest.fixture(scope="module")
def expected(models) -> dict[str, tuple[float, np.ndarray]]:
    """Loss and flat gradient of each objective in float64."""
    found = {}
    for name, objective in OBJECTIVES.items():
        loss, by_name = loss_and_gradients(models / "qwen2-tied", signed_batch(RAGGED), objective)
        found[name] = (loss, np.concatenate([by_name[key].ravel() for key in sorted(by_name)]))
    return found


def variant(batch, objective: PolicyObjective) -> Variant:
    algorithm = AlgorithmConfig().model_copy(update={"objective": objective, "bapo": BAPO})
    return Variant(algorithm=algorithm, batch=batch, num_mini_batches=1)


@pytest.mark.parametrize(
    "name", with_marks(["one"], slow=["tp2-sp", "dp2-cp2-small"], full=["pp2"])
)
def test_numbers_are_those_of_an_update_and_of_fp64(ranks, logprobs, expected, name):
    """The update's for the run's own objective to the bit; fp64's where ratios differ from 1.

    They would differ if one objective's gradient leaked into the next one's, if a split counted
    tokens or copies of parameters twice, or if the passes had other shapes than the update's.
    """
    batch = signed_batch(RAGGED)
    old = logprobs + (0.15 * np.sin(np.arange(len(logprobs)))).astype(np.float32)
    variants = [variant(batch, objective) for objective in OBJECTIVES.values()]
    how = {"objective": OBJECTIVES["own"], **layout(name)}
    answers = ranks.on("qwen2-tied", measured_twice, variants, old, **how)
    metrics, *_ = ranks.on("qwen2-tied", first_update, batch, **how)
    first, second, _ = answers[0]
    assert all(answer[:2] == (first, second) for answer in answers)

    assert (first[0].loss, first[0].grad_norm) == (
        metrics["policy/loss"],
        metrics["policy/grad_norm"],
    )
    assert first[0].num_tokens == metrics["tokens/trained"] == first[0].num_moved
    assert first[0].entropy == metrics["policy/entropy"]
    assert (first[0].clip_low, first[0].clip_high, first[0].effective_samples) == (0.0, 0.0, 1.0)
    assert all(one[0] == one[1] and one[0].cosine == 1.0 for one in (first, second))

    own = expected["own"][1]
    for found, (loss, gradient) in zip(second, expected.values(), strict=True):
        norms = np.linalg.norm(gradient), np.linalg.norm(own)
        assert found.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert found.grad_norm == pytest.approx(norms[0], rel=1e-4)
        assert found.cosine == pytest.approx(gradient @ own / (norms[0] * norms[1]), abs=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"objective": PolicyObjective(kl_coef=0.5, kl_value="k2")},
        {"advantage": "rloo", "objective": KL_IN_REWARD},
        {"objective": PolicyObjective(gate="bapo"), "bapo": BAPO},
        {"objective": PolicyObjective(gate="clip_cov", cov_share=1.0, cov_low=0.0)},
        {"importance": ImportanceConfig(high=1.1)},
        {"importance": ImportanceConfig(stale_logprobs="rollout")},
        {"importance": ImportanceConfig(stale_logprobs="none")},
    ],
    ids=["kl", "kl-in-reward", "bapo", "clip-cov", "recompute", "rollout", "none"],
)
def test_further_inputs_are_those_of_an_update(ranks, algorithm):
    """Reference log-probs, KL in the reward, searched bounds, and each rule for stale tokens."""
    batch = replace(stale_batch(RAGGED), group_sizes=np.array([4, 4, 4]))
    own = Variant(
        algorithm=AlgorithmConfig().model_copy(update=algorithm),
        batch=batch,
        num_mini_batches=1,
        kl_reward_coef=algorithm.get("objective", OBJECTIVES["own"]).kl_reward_coef,
    )
    other = variant(batch, OBJECTIVES["gspo"])
    arguments = ([own, other], int(batch.policy_versions.max()))
    ((found, metrics),) = ranks.on("qwen2-tied", beside_second_update, *arguments, **algorithm)
    assert (found.loss, found.grad_norm, found.num_tokens) == (
        *(metrics["policy/loss"], metrics["policy/grad_norm"], metrics["tokens/trained"]),
    )
    assert (found.clip_low, found.clip_high) == (
        *(metrics["policy/clip_low_fraction"], metrics["policy/clip_high_fraction"]),
    )


@pytest.mark.parametrize(
    ("name", "kl_coef"),
    [
        ("one", 0.3),
        ("pp2", 0.0),
        pytest.param("dp2-cp2-small", 0.3, marks=pytest.mark.slow),
        pytest.param("tp2-sp", 0.0, marks=pytest.mark.slow),
    ],
)
def test_critics_advantages_are_those_of_an_update(ranks, name, kl_coef):
    """To the bit, with the objective's own lambda and tokens, also as an alternative."""
    objective = KL_IN_REWARD if kl_coef else OBJECTIVES["own"]
    rules = {
        "advantage": "gae",
        "discount": DISCOUNT,
        "gae_lambda": 0.3,
        "objective": objective.model_copy(update={"kl_coef": kl_coef}),
    }
    algorithm = AlgorithmConfig().model_copy(update=rules)
    one = Variant(
        algorithm=algorithm, batch=signed_batch(RAGGED), num_mini_batches=1, kl_reward_coef=kl_coef
    )
    fewer = replace(one.batch, loss_weights=one.batch.loss_weights.copy())
    fewer.loss_weights[fewer.cu_seqlens[1] : fewer.cu_seqlens[3]] = 0.0
    own = replace(one, algorithm=algorithm.model_copy(update={"gae_lambda": 0.9}), batch=fewer)
    for variants in ([one, own], [own, one]):
        arguments = (variants, 0, variants.index(one))
        how = {"critic": {}, **rules, **layout(name)}
        answers = ranks.on("qwen2-tied", beside_second_update, *arguments, **how)
        for found, metrics in answers:
            assert metrics["critic/value_mean"] != 0.0
            assert (found.loss, found.grad_norm) == (
                metrics["policy/loss"],
                metrics["policy/grad_norm"],
            )


def test_reference_is_the_one_from_before_the_updates(ranks):
    """A reference that follows the policy has moved in the checkpoint after them."""
    objective = PolicyObjective(kl_coef=0.5, kl_value="k2")
    variants = [
        variant(signed_batch(RAGGED), objective),
        variant(signed_batch(RAGGED), OBJECTIVES["gspo"]),
    ]
    how = {"objective": objective}
    ((first, from_old, from_new),) = ranks.on("qwen2-tied", with_moved_reference, variants, **how)
    assert from_old == first and from_new[0].loss > first[0].loss


def test_clips_and_effective_samples_are_counted_by_tokens(ranks, logprobs):
    """Against counts over the tokens themselves; the second objective divides the batch in two."""
    batch = signed_batch(RAGGED)
    shift = 0.15 * np.sin(np.arange(len(logprobs)))
    old = logprobs + shift.astype(np.float32)
    objective = PolicyObjective(clip_low=0.05, clip_high=0.08)
    whole = variant(batch, objective)
    variants = [whole, replace(whole, num_mini_batches=2)]
    (_, (one, two), _), *_ = ranks.on("qwen2-tied", measured_twice, variants, old)
    trained = batch.loss_weights != 0
    ratios, advantages = np.exp(-shift[trained]), batch.advantages[trained]
    low = (advantages < 0) & (ratios < 0.95)
    high = (advantages > 0) & (ratios > 1.08)
    assert low.sum() > 0 and high.sum() > 0
    assert (one.clip_low, one.clip_high) == (low.mean(), high.mean())
    assert (one.num_tokens, one.num_moved) == (trained.sum(), (~low & ~high).sum())
    effective = ratios.sum() ** 2 / (ratios**2).sum() / trained.sum()
    assert one.effective_samples == pytest.approx(effective, rel=1e-6)
    assert (two.loss, two.grad_norm, two.cosine) == (one.loss / 2, one.grad_norm / 2, 1.0)
