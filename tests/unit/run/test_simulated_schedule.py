"""Schedules to repeat, simulated or of another run, and the keys of the run that they drive."""

import pytest

from megadapo.config import load_config
from megadapo.errors import ConfigError
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE
from megadapo.rollout.simulated import SIMULATED_FILE, SimulatedSchedule
from megadapo.run.repeat import check_schedule, open_schedule, open_simulated
from tests.support import REPOSITORY

FITTING = (
    *('sampling.mode="partial"', "sampling.max_staleness=2", "sampling.prompts_per_step=2"),
    *("sampling.responses_per_prompt=2", "run.num_steps=3", "trainer.optimizer.warmup_steps=1"),
    *("algorithm.responses_per_mini_batch=4", "evaluation.every=0"),
)


@pytest.fixture
def path(tmp_path):
    schedule = SimulatedSchedule(
        title="512 GPUs",
        max_staleness=2,
        responses_per_prompt=2,
        batches=((((), (500,)),) * 2,) * 5,
    )
    schedule.write(tmp_path / "schedule.json")
    return tmp_path / "schedule.json"


def config(*overrides):
    return load_config(str(REPOSITORY / "configs" / "quickstart.toml"), [*FITTING, *overrides])


def test_note_names_the_simulated_cluster(path):
    assert check_schedule(config(), path) == "tokens have the ages of a simulation of 512 GPUs"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (['sampling.mode="sync"', "sampling.max_staleness=0"], 'sampling.mode = "sync": must be'),
        (["sampling.max_staleness=3"], "sampling.max_staleness = 3: must be 2"),
        (["sampling.prompts_per_step=4"], "sampling.prompts_per_step = 4: must be at most 2"),
        (
            ["sampling.responses_per_prompt=4", "algorithm.responses_per_mini_batch=8"],
            "sampling.responses_per_prompt = 4: must be at most 2",
        ),
        (["run.num_steps=4"], "run.num_steps = 4: must be at most 3"),
        (['rollout.environments=[{environment="calculator"}]'], "rollout.environments"),
    ],
)
def test_error_names_the_key(path, overrides, problem):
    for check in (check_schedule, lambda config, path: open_simulated(config, None, path)):
        with pytest.raises(ConfigError) as caught:
            check(config(*overrides), path)
        assert "--schedule: the schedule is of 512 GPUs" in str(caught.value)
        assert problem in str(caught.value)


def test_resumed_run_keeps_its_schedule(path, tmp_path):
    """Fails if a run that resumes without the option follows the speed of its engines."""
    folder = tmp_path / "run"
    folder.mkdir()
    assert open_simulated(config(), folder, None) is None
    given = open_simulated(config(), folder, path)
    assert open_simulated(config(), folder, None) == open_simulated(config(), folder, path) == given
    # another run takes it by the folder
    assert open_simulated(config(), None, folder) == given
    assert check_schedule(config(), folder) == check_schedule(config(), path)
    other = tmp_path / "other.json"
    other.write_text(path.read_text().replace("512", "128"))
    for wrong in (other, tmp_path):
        with pytest.raises(ConfigError, match="the run began with another one"):
            open_simulated(config(), folder, wrong)
    assert (folder / SIMULATED_FILE).read_bytes() == path.read_bytes()


def test_folder_is_a_run_to_repeat(tmp_path):
    assert open_simulated(config(), None, tmp_path) is None
    with pytest.raises(ConfigError, match=r"there is no schedule\.log"):
        check_schedule(config(), tmp_path)


def test_schedule_of_another_configuration_is_refused_before_anything_starts(tmp_path):
    """The trainer and all engines started first, and --dry-run said that all was well."""
    run, again = config("sampling.prompts_per_step=4"), config()
    schedule = open_schedule(run, tmp_path, None)
    schedule.cut(0, "00" * 32, 0, {})
    schedule.close()
    assert check_schedule(run, tmp_path).startswith(f"repeating the schedule of {tmp_path}")
    with pytest.raises(ConfigError, match=r"other data, rewards.* in its config\.json"):
        check_schedule(again, tmp_path)
    path = tmp_path / SCHEDULE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="record 1 is not whole"):
        check_schedule(run, tmp_path)
