"""Sizes that `--allow-fewer` gives to a run whose cluster lacks nodes."""

import pytest

from megadapo import loop
from megadapo.config import RunConfig, load_config
from megadapo.errors import ConfigError, InfraError
from megadapo.run.fewer import fit_to_cluster, largest_that_fits

QUICKSTART = "configs/quickstart.toml"
LARGE = (
    *("--cluster.device=cuda", "--trainer.tensor_parallel=8", "--trainer.data_parallel=16"),
    *("--rollout.num_engines=32", "--rollout.tensor_parallel=4"),
)


def sizes(slots, *overrides, recipe=QUICKSTART):
    """Data-parallel ranks and engines."""
    fitting = largest_that_fits(load_config(recipe, overrides), slots)
    return fitting and (fitting.trainer.data_parallel, fitting.rollout.num_engines)


@pytest.mark.parametrize(
    "slots,expected",
    [
        ([8] * 16, (16, 32)),
        ([8] * 15, (15, 30)),
        ([8] * 20, (16, 32)),
        # seven GPUs hold no tensor-parallel group of eight, nor do two halves of it
        ([8] * 15 + [7], (15, 30)),
        ([4, 4, 8], (1, 2)),
        ([4, 4], None),
        ([], None),
    ],
)
def test_shared_gpus_lose_ranks_and_engines_together(slots, expected):
    assert sizes(slots, *LARGE) == expected


@pytest.mark.parametrize(
    "slots,expected",
    [([8] * 3, (2, 2)), ([8] * 2, (1, 2)), ([16, 7], (1, 2)), ([8, 4], None), ([8], None)],
)
def test_separate_gpus_keep_a_balance(slots, expected):
    """All engines without a trainer, or the reverse, would be no run at all."""
    separate = (
        *('--cluster.placement="separate"', "--cluster.device=cuda", "--trainer.data_parallel=2"),
        *("--trainer.tensor_parallel=8", "--rollout.num_engines=2", "--rollout.tensor_parallel=4"),
    )
    assert sizes(slots, *separate) == expected


def test_reserved_engine_keeps_its_place():
    engines = ('--cluster.placement="separate"', "--rollout.num_engines=3")
    evaluating = ("--evaluation.placement=engine", *engines)
    assert sizes([5], *evaluating) == (1, 3)
    assert sizes([4], *evaluating) == (1, 2)
    assert sizes([2], *evaluating) is None


def test_folder_keeps_the_recipe(tmp_path, monkeypatch):
    """`megadapo train RUN` took the sizes of a start without some nodes for those of the run."""
    config = load_config(QUICKSTART, [f"run.folder={tmp_path}", "trainer.data_parallel=2"])
    fewer = largest_that_fits(config, [1])
    assert fewer is not None and fewer.trainer.data_parallel == 1
    monkeypatch.setattr(loop, "fit_to_cluster", lambda config: (fewer, ["fewer"]))
    started = []

    def end(config: RunConfig, *others: object) -> None:
        started.append(config)
        raise InfraError("no node")

    monkeypatch.setattr(loop, "_train_from_checkpoint", end)
    with pytest.raises(InfraError, match="no node"):
        loop.train(config, allow_fewer=True)
    assert started == [fewer]
    assert load_config(str(tmp_path), []) == config


@pytest.mark.parametrize("slots,expected", [([9], 4), ([3], 3), ([1], 1), ([], None)])
def test_stage_without_engines_needs_no_room_for_them(slots, expected):
    engines = ("--cluster.placement=separate", "--trainer.data_parallel=4")
    config = load_config(QUICKSTART, (*engines, "--rollout.num_engines=4"))
    fitting = largest_that_fits(config, slots, has_engines=False)
    assert (fitting and fitting.trainer.data_parallel) == expected
    assert fitting is None or fitting.rollout == config.rollout


def test_experts_are_split_evenly():
    """Three ranks cannot share experts in groups of two."""
    experts = ("--trainer.data_parallel=4", "--trainer.expert_parallel=2")
    assert sizes([1] * 3, *experts, recipe="configs/experts.toml")[0] == 2


def test_all_else_stays():
    config = load_config(QUICKSTART, LARGE)
    assert largest_that_fits(config, [8] * 16) == config
    fitting = largest_that_fits(config, [8] * 3)
    assert fitting.trainer.model_copy(update={"data_parallel": 16}) == config.trainer
    assert fitting.rollout.model_copy(update={"num_engines": 32}) == config.rollout
    assert fitting.algorithm == config.algorithm


def test_one_machine_is_no_cluster():
    with pytest.raises(ConfigError, match="cluster.address"):
        fit_to_cluster(load_config(QUICKSTART))
