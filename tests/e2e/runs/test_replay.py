"""A replay is the training that it replays, and rollouts without a trainer are training's."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from megadapo.codec import encode
from megadapo.errors import CheckpointError, ConfigError
from megadapo.observe.rollouts import files
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path, saved_steps
from megadapo.observe.rollouts.saved_group import SavedGroup
from tests.support.runs.whole_runs import SMALL, megadapo, metrics, run, untimed

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NUM_STEPS = 3
NEEDS_ENGINES = {
    "tokens/generated",
    *("eval/accuracy", "eval/score", "eval/pass_at_k", "eval/cons_at_k", "eval/policy_version"),
    "eval/response_length",
}
WARMUP = "--trainer.optimizer.warmup_steps=2"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "source"
    run(folder, "--observe.saved_groups=all", WARMUP, num_steps=NUM_STEPS)
    return folder


def replay(source: Path, folder: Path, *overrides: str, **how: int) -> CompletedProcess[str]:
    saved = f"--replay={source / files.ROLLOUTS_FOLDER}"
    how = {"num_steps": NUM_STEPS, **how}
    return run(folder, saved, "--observe.saved_groups=all", WARMUP, *overrides, **how)


def groups(folder: Path, step: int) -> list[SavedGroup]:
    return list(read_rollouts(rollouts_path(folder, step)))


def test_stopped_replay_repeats_the_metrics(source, tmp_path):
    folder = tmp_path / "replay"
    for num_steps in (2, NUM_STEPS):
        result = replay(source, folder, num_steps=num_steps)
    assert "resuming after step 2" in result.stdout
    expected = [r | dict.fromkeys(NEEDS_ENGINES) for r in untimed(metrics(source))]
    assert untimed(metrics(folder)) == expected
    for record in metrics(folder):
        times = ("time/sync_s", "time/reward_s", "time/engine_max_s", "tokens_per_s")
        assert [record[name] for name in times] == [None] * 4
        one, two = groups(source, record["step"]), groups(folder, record["step"])
        assert [encode(group) for group in one] == [encode(group) for group in two]
    # a run with engines cannot go on from there: it would not know which prompts come next
    result = run(folder, WARMUP, num_steps=NUM_STEPS + 1, code=CheckpointError.exit_code)
    assert "resume it with --replay" in result.stderr


def test_pretraining_data_and_kl_coefficient_resume(source, tmp_path):
    options = [
        "--algorithm.pretraining={data = 'arithmetic:train:32', coef = 0.3, "
        "tokens_per_mini_batch = 300, max_text_tokens = 20}",
        "--algorithm.advantage=rloo",
        "--algorithm.objective={kl_coef = 0.1, kl_in = 'reward', kl_value = 'k1'}",
        "--algorithm.kl_control={target = 0.01, horizon = 1000}",
        # after a step of another objective the weights are not those that sampled
        *("--oracles.logprob_abs_max=none", "--oracles.logprob_abs_mean=none"),
    ]
    for name, stops in (("whole", [NUM_STEPS]), ("stopped", [2, NUM_STEPS])):
        for num_steps in stops:
            replay(source, tmp_path / name, *options, num_steps=num_steps)
    whole, stopped = (untimed(metrics(tmp_path / name)) for name in ("whole", "stopped"))
    assert whole == stopped
    assert len({record["kl/coef"] for record in whole}) == NUM_STEPS
    assert len({record["pretraining/loss"] for record in whole}) == NUM_STEPS


def test_rollout_command_samples_as_training(source, tmp_path):
    options = (f"--run.folder={tmp_path / 'x'}", "--observe.saved_groups=all", "--steps=2", *SMALL)
    done = megadapo("rollout", "configs/quickstart.toml", *options)
    folder = tmp_path / "x-rollout"
    assert f"megadapo show {folder}" in done.stdout
    assert "step=1 sampled=" in done.stdout and "step=2 sampled=" in done.stdout
    assert saved_steps(folder) == [1, 2] and not (tmp_path / "x").exists()
    assert not (folder / "metrics.jsonl").exists() and not (folder / "checkpoints").exists()
    for mine, trained in zip(groups(folder, 1), groups(source, 1), strict=True):
        assert (mine.prompt_index, mine.disposition, mine.prompt) == (
            *(trained.prompt_index, trained.disposition, trained.prompt),
        )
        for one, two in zip(mine.responses, trained.responses, strict=True):
            assert one.response.token_ids.tolist() == two.response.token_ids.tolist()
            assert (one.score.reward, one.advantage) == (two.score.reward, two.advantage)
            assert one.logprobs_old is None
    replay(folder, tmp_path / "replay", num_steps=2)
    first, second = metrics(tmp_path / "replay")
    assert first["policy/loss"] == metrics(source)[0]["policy/loss"]
    # no token of the second step is of the weights after the first
    assert second["parity/logprob_abs_max"] is None and second["policy/loss"] is not None


def test_replay_refuses_its_source_folder(source):
    result = replay(source, source, code=ConfigError.exit_code)
    assert "choose another run.folder" in result.stderr
    assert saved_steps(source) == [1, 2, 3]
