"""Recipes start, and have the numbers that the papers give."""

from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest

from megadapo.cli import main
from megadapo.config import load_config
from megadapo.models.description import describe_model
from megadapo.rollout.engine.spec import validate_engine_layout
from megadapo.trainer.model.model_layout import validate_model_layout
from tests.support.models.large import QWEN_7B, QWEN_30B_A3B, QWEN_32B

REPOSITORY = Path(__file__).parents[3]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.toml"))
ALGORITHMS = sorted((REPOSITORY / "configs" / "algorithms").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS + ALGORITHMS, ids=lambda path: path.stem)
def test_every_recipe_passes_a_dry_run(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Also: what a dry run prints is a recipe that means the same."""
    monkeypatch.chdir(REPOSITORY)
    overrides = []
    if "reasoning-gym:" in path.read_text() and find_spec("reasoning_gym") is None:
        # its items need the extra
        overrides = ["data.train=arithmetic:train:8", "data.held_out=arithmetic:held_out:8"]
    words = [f"--{override}" for override in overrides]
    assert main(["train", str(path), "--dry-run", *words]) == 0, capsys.readouterr().err
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    assert load_config(printed) == load_config(path, overrides)


def test_32b_recipe_has_each_of_the_papers_numbers() -> None:
    """DAPO (arXiv 2503.14476), sections 3 and 4.1."""
    config = load_config(REPOSITORY / "configs" / "qwen2.5-32b.toml")
    assert config.model.path == "Qwen/Qwen2.5-32B"
    assert "DAPO-Math-17k" in config.data.train
    assert config.data.held_out is not None and "AIME" in config.data.held_out
    assert config.sampling.prompts_per_step == 512
    assert config.sampling.responses_per_prompt == 16
    assert config.algorithm.responses_per_mini_batch == 512
    updates = 512 * 16 // config.algorithm.responses_per_mini_batch
    assert updates == 16
    optimizer = config.trainer.optimizer
    assert (optimizer.lr, optimizer.decay_steps, optimizer.warmup_steps) == (1e-6, 0, 20)
    objective = config.algorithm.objective
    assert (objective.clip_low, objective.clip_high) == (0.2, 0.28)
    assert (objective.dual_clip, objective.kl_coef, objective.entropy_coef) == (None, 0.0, 0.0)
    assert config.algorithm.loss_aggregation == "group-token-mean"
    assert config.algorithm.normalize_by_std
    assert config.rollout.max_response_tokens == 20480 == 16384 + config.algorithm.overlong_buffer
    assert config.algorithm.overlong_buffer == 4096
    assert config.algorithm.overlong_factor == 1.0
    assert not config.algorithm.overlong_filtering
    assert config.rollout.temperature == 1.0
    evaluation = config.evaluation
    assert evaluation.samples_per_problem == 32
    assert (evaluation.temperature, evaluation.top_p) == (1.0, 0.7)
    trainer = config.trainer
    assert trainer.num_ranks == 128
    assert config.rollout.num_engines * config.rollout.tensor_parallel == 128
    validate_model_layout(describe_model(QWEN_32B), trainer)


def test_verl_recipe_differs_from_the_paper_only_where_the_script_does() -> None:
    paper = load_config(REPOSITORY / "configs" / "qwen2.5-32b.toml")
    verl = load_config(REPOSITORY / "configs" / "qwen2.5-32b-verl.toml")
    assert verl.trainer.optimizer.warmup_steps == 10
    assert verl.algorithm.objective.dual_clip == 10.0
    assert verl.algorithm.loss_aggregation == "token-mean"
    assert (verl.sampling.mode, verl.sampling.round_size) == ("rounds", 1536)
    assert (paper.sampling.mode, paper.sampling.max_staleness) == ("sync", 0)
    assert verl.sampling.max_asked_per_step == 10 * 1536
    assert verl.sampling.on_shortfall == "stop"
    for same in ("model", "data", "rollout", "evaluation", "weights", "cluster"):
        assert getattr(verl, same) == getattr(paper, same), same
    assert verl.run.folder != paper.run.folder


def test_the_recipe_with_context_parallelism_trains_as_the_papers_does() -> None:
    paper = load_config(REPOSITORY / "configs" / "qwen2.5-32b.toml")
    shared = load_config(REPOSITORY / "configs" / "qwen2.5-32b-cp.toml")
    assert shared.trainer.context_parallel == 2
    assert shared.trainer.num_ranks == paper.trainer.num_ranks == 128
    assert shared.trainer.tokens_per_micro_batch == paper.trainer.tokens_per_micro_batch
    validate_model_layout(describe_model(QWEN_32B), shared.trainer)
    for name in type(paper).model_fields.keys() - {"run", "trainer"}:
        assert getattr(shared, name) == getattr(paper, name), name


def test_the_asynchronous_recipe_has_the_papers_updates_in_smaller_steps() -> None:
    paper = load_config(REPOSITORY / "configs" / "qwen2.5-32b.toml")
    small = load_config(REPOSITORY / "configs" / "qwen2.5-32b-async.toml")
    assert small.trainer.num_ranks + small.num_engines * small.rollout.tensor_parallel == 128
    assert small.cluster.placement == "separate" and small.sampling.mode == "async"
    steps = paper.sampling.prompts_per_step // small.sampling.prompts_per_step
    for path in ("run.num_steps", "trainer.optimizer.warmup_steps", "evaluation.every"):
        assert attrgetter(path)(small) == steps * attrgetter(path)(paper), path
    assert small.algorithm == paper.algorithm and small.data == paper.data
    # the oldest token is at most a few more updates old than in the paper's last mini-batch
    updates = 64 * 16 // small.algorithm.responses_per_mini_batch
    assert updates == 2 and updates * (small.sampling.max_staleness + 1) - 1 <= 21
    validate_model_layout(describe_model(QWEN_32B), small.trainer)


def test_7b_recipe_fits_one_node_of_eight_gpus() -> None:
    config = load_config(REPOSITORY / "configs" / "qwen2.5-7b.toml")
    trainer = config.trainer
    assert trainer.num_ranks == 8 == config.rollout.num_engines * config.rollout.tensor_parallel
    assert config.cluster.address is None
    validate_model_layout(describe_model(QWEN_7B), trainer)


def test_30b_recipe_keeps_each_expert_inside_a_node_and_fits_the_model() -> None:
    config = load_config(REPOSITORY / "configs" / "qwen3-30b-a3b.toml")
    model, trainer = describe_model(QWEN_30B_A3B), config.trainer
    assert trainer.num_ranks == 32
    assert config.rollout.num_engines * config.rollout.tensor_parallel == 32
    assert 8 % (trainer.expert_parallel * trainer.expert_tensor_parallel) == 0
    validate_model_layout(model, trainer)
    validate_engine_layout(model.shape, config.rollout)
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens <= 32768


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_notices_an_engine_with_other_weights_than_the_trainer(path: Path) -> None:
    """On the CPU a bound near rounding does it alone."""
    config = load_config(path)
    assert config.oracles.logprob_abs_max is not None
    if config.model.dtype == "bfloat16":
        assert config.oracles.logprob_abs_mean is not None
        assert isinstance(config.weights.verify, int)


def test_algorithms_are_that_many_and_change_nothing_but_the_algorithm() -> None:
    """Two that train the same way compare nothing; only ARPO has another tool, to branch at."""
    base = load_config(REPOSITORY / "configs" / "quickstart.toml")
    configs = {path.stem: load_config(path) for path in ALGORITHMS}
    arpo = configs["arpo"]
    [tool] = arpo.rollout.environments
    assert tool.environment == "calculator" and arpo.sampling.branching.is_on
    alone = arpo.rollout.model_copy(update={"environments": ()})
    configs["arpo"] = arpo.model_copy(update={"rollout": alone})
    assert configs["dapo"].algorithm == base.algorithm
    for name, config in configs.items():
        assert config.run.folder == Path("runs") / name
        same = {"model", "data", "rollout", "evaluation", "trainer"}
        # scores of steps are another reward, and a teacher alone gives none
        has_own = name in ("grpo-process", "ppo-ptx-penalty", "distillation")
        same |= set() if has_own else {"reward"}
        for section in same:
            assert getattr(config, section) == getattr(base, section), (name, section)
    assert len({config.algorithm.model_dump_json() for config in configs.values()}) == len(configs)
    assert configs["dr-grpo"].algorithm.loss_length == base.rollout.max_response_tokens


def test_only_the_recipes_whose_papers_say_so_sample_dynamically_and_punish_length() -> None:
    """DAPO and CISPO (MiniMax-M1, section 3.1) do, VL samples so; ARPO's appendix C.2 has
    neither."""
    configs = {path.stem: load_config(path) for path in ALGORITHMS}
    for name, config in configs.items():
        is_dapos = name in ("dapo", "cispo")
        selects = is_dapos or name == "vl"
        assert config.sampling.selection == ("signal" if selects else "all"), name
        assert (config.algorithm.overlong_buffer > 0) == is_dapos, name
