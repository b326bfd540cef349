"""The schedule of another run, and the keys of the run that repeats it."""

import pytest

from megadapo.config import load_config
from megadapo.errors import ConfigError
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE
from megadapo.run.replay import check_schedule, open_schedule
from tests.support import REPOSITORY

FITTING = (
    *('sampling.mode="partial"', "sampling.max_staleness=2", "sampling.prompts_per_step=2"),
    *("sampling.responses_per_prompt=2", "run.num_steps=3", "trainer.optimizer.warmup_steps=1"),
    *("algorithm.responses_per_mini_batch=4", "evaluation.every=0"),
)


def config(*overrides):
    return load_config(str(REPOSITORY / "configs" / "quickstart.toml"), [*FITTING, *overrides])


def test_folder_is_a_run_to_repeat(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no schedule\.log.* simulate is gone"):
        check_schedule(config(), tmp_path)


def test_run_with_a_simulated_schedule_does_not_continue_with_its_own_ages(tmp_path):
    (tmp_path / "simulated.json").touch()
    with pytest.raises(ConfigError, match=r"choose another run\.folder"):
        open_schedule(config(), tmp_path, None)


def test_schedule_of_another_configuration_is_refused_before_anything_starts(tmp_path):
    """The trainer and all engines started first, and --dry-run said that all was well."""
    run, again = config("sampling.prompts_per_step=4"), config()
    schedule = open_schedule(run, tmp_path, None)
    schedule.pause(0, "00" * 32, 0, {})
    schedule.close()
    assert check_schedule(run, tmp_path).startswith(f"repeating the schedule of {tmp_path}")
    with pytest.raises(ConfigError, match=r"other data, rewards.* in its config\.json"):
        check_schedule(again, tmp_path)
    path = tmp_path / SCHEDULE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="record 1 is not whole"):
        check_schedule(run, tmp_path)
