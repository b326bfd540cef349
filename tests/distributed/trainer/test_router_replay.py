"""Router replay: tokens use their batch's experts, also recomputed, under every split."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megadapo.algorithm.objective import PolicyObjective
from megadapo.data.batch import PackedBatch
from megadapo.errors import DataError
from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config
from tests.support.trainer import critics
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.gradients import assert_same, measure
from tests.support.trainer.probes import Gradients, build, logprobs, update
from tests.support.trainer.ranks import Ranks, layout, with_marks

LAYOUTS = ("tp2-sp-cp2-ep4", "pp2-dp2-ep2-recompute")
FURTHER = ("small", "tp2-sp-vpp2-mlp-small", "recompute-small")
AUX_LOSS = 5.0
MODEL = "qwen3-moe"


@pytest.fixture(scope="module")
def told(models: Path) -> PackedBatch:
    """With choices that no router would make: of any experts, in any order."""
    model = describe_model(read_hf_config(models / MODEL))
    assert model.routing is not None
    every = np.arange(model.shape.num_experts, dtype=np.uint8)
    draw = np.random.default_rng(3)
    rows = [np.tile(every, (n - 1, model.shape.num_layers, 1)) for n in RAGGED]
    chosen = [draw.permuted(one, axis=-1)[..., : model.routing.experts_per_token] for one in rows]
    return replace(random_batch(RAGGED), experts=tuple(chosen))


@pytest.fixture(scope="module")
def reference(ranks: Ranks, told: PackedBatch) -> Gradients:
    """One rank, one micro-batch."""
    return measure(ranks, MODEL, told, aux_loss=AUX_LOSS, router_replay=True, **layout("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("name", with_marks(LAYOUTS, full=FURTHER))
def test_layout_keeps_loss_and_gradient(ranks, told, reference, name):
    found = measure(ranks, MODEL, told, aux_loss=AUX_LOSS, router_replay=True, **layout(name))
    assert_same(found, reference)
    assert found.experts["experts/max_load"] == reference.experts["experts/max_load"]


def test_experts_are_replayed_only_if_configured(ranks, told):
    free, plain = (measure(ranks, MODEL, batch) for batch in (told, random_batch(RAGGED)))
    assert all((free.by_name[name] == plain.by_name[name]).all() for name in plain.by_name)
    replayed = measure(ranks, MODEL, told, router_replay=True).by_name
    difference = sum(((replayed[name] - free.by_name[name]) ** 2).sum() for name in replayed)
    assert difference > 0.01 * free.grad_norm**2


def _own_choices(rendezvous, settings, batch: PackedBatch) -> list[np.ndarray]:
    """[tokens, layers, K] of each sequence, as the routers choose."""
    from megadapo.trainer.model.experts import BalancedRouter

    rank, chosen = build(rendezvous, settings), []
    for module in rank.chunks[0].modules():
        if isinstance(module, BalancedRouter):
            module.register_forward_hook(lambda module, inputs, output: chosen.append(output[1]))
    (mini_batch,) = rank.splitter.split_responses(batch)
    (micro_batch,) = mini_batch
    rank.logprobs_of(mini_batch)
    num_tokens, topk = len(batch.tokens), rank.config.moe_router_topk
    by_row = np.stack(
        [one.nonzero()[:, 1].reshape(-1, topk).numpy()[:num_tokens] for one in chosen], axis=1
    )
    parts = np.split(by_row, np.cumsum(micro_batch.lengths)[:-1])
    return [parts[list(micro_batch.members).index(i)] for i in range(batch.num_sequences)]


def test_replaying_own_choices_changes_no_bit(ranks):
    """And a last token without experts has no part in anything that is learned from."""
    batch = random_batch(RAGGED)
    (own,) = ranks.on(MODEL, _own_choices, batch, tokens_per_micro_batch=100_000)
    for kind, missing in ((np.uint8, 0), (np.uint16, 1)):
        chosen = tuple(one[: len(one) - missing].astype(kind) for one in own)
        found, free = [
            measure(ranks, MODEL, replace(batch, experts=chosen), router_replay=replays)
            for replays in (True, False)
        ]
        assert found.loss == free.loss
        assert all((found.by_name[name] == free.by_name[name]).all() for name in free.by_name)


def _first_update(rendezvous, settings, batch: PackedBatch):
    """Log-probs of the batch, and what the first update says of them."""
    rank = build(rendezvous, settings)
    before = rank.logprobs(batch)
    return before, update(rank, batch, policy_version=0, step=1)


def test_old_logprobs_and_updates_share_the_routing(ranks, told):
    """And a reference policy with the same weights is of another: it routes for itself."""
    replay = {"router_replay": True, "recompute": "full"}
    objective = PolicyObjective(kl_coef=0.1)
    ((replayed, update),) = ranks.on(MODEL, _first_update, told, objective=objective, **replay)
    (free,) = ranks.on(MODEL, logprobs, told)
    assert update.metrics["policy/ratio_first_max_error"] == 0.0
    assert np.nanmax(np.abs(replayed - free)) > 1e-4
    assert update.metrics["kl/max"] > 0.0


def test_critic_routes_for_itself(ranks, told):
    """Catches values and gradients with the policy's experts, at any number of layers."""
    free, replayed = (
        ranks.on(MODEL, critics.observe, told, critic={}, router_replay=replays)[0]
        for replays in (False, True)
    )
    for name in ("advantages", "loss", "norm"):
        assert replayed[name] == free[name], name


def test_experts_of_another_model_are_refused(models, told):
    from megadapo.trainer.model.experts import check_choices

    model = describe_model(read_hf_config(models / MODEL))
    check_choices(told, model)
    first, *others = told.experts
    longest = max(range(len(RAGGED)), key=lambda i: RAGGED[i])
    cases = {
        "some responses have no experts": (),
        "sequence 0 .* shape": (first[:, 1:], *others),
        "experts per token": (first[..., :1], *others),
        "sequence 0 of the batch goes to expert 200": (np.full_like(first, 200), *others),
        f"sequence {longest} .* must be .89 to 90 tokens": tuple(
            one[:-1] if i == longest else one for i, one in enumerate(told.experts)
        ),
    }
    for message, experts in cases.items():
        with pytest.raises(DataError, match=message):
            check_choices(replace(told, experts=experts), model)
