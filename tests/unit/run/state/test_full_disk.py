"""A full or read-only disk is a named error, tears no file, and prevents no later resume."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from megadapo.config import RunConfig
from megadapo.errors import InfraError
from megadapo.observe.metrics.records import read_metrics
from megadapo.run.run import Run
from tests.support.processes.small_disk import fill, mount, on_a_small_disk
from tests.support.runs import runs_alone
from tests.support.runs.checkpoints import written_by
from tests.support.runs.runs_alone import open_and_close, record_step, saved_steps

pytestmark = pytest.mark.fault


def config_of(folder: Path, num_steps: int = 9) -> RunConfig:
    changes = {"evaluation.every": 0, "checkpoint.every": 1, "checkpoint.keep": 2}
    changes |= {"observe.saved_groups": 0, "observe.writers": []}
    return runs_alone.config_of(folder, changes, num_steps=num_steps)


def record(run: Run, number: int) -> None:
    with run.phase("rollout"):
        pass
    run.log.record({"step": number, "tokens/generated": 10})


def step(run: Run, number: int, *, num_bytes: int = 1000, wait: bool = True) -> None:
    record_step(run, number)
    run.save(written_by(lambda to: (to / "shard").write_bytes(bytes(num_bytes))), wait=wait)


def test_full_disk_tears_no_record(tmp_path):
    def check(disk: Path) -> None:
        folder = disk / "run"
        with (
            pytest.raises(InfraError, match=r"metrics\.jsonl cannot be written: No space left"),
            Run.open(config_of(folder)) as run,
        ):
            step(run, 1)
            filler = fill(disk, leave=4096)
            run.log.show("y" * 50_000)
            for number in range(2, 99):
                record(run, number)
        assert (folder / "metrics.jsonl").read_bytes().endswith(b"}\n")
        assert [entry["step"] for entry in read_metrics(folder)][:2] == [1, 2]
        filler.unlink()
        with Run.open(config_of(folder)) as run:
            assert run.step == 1
            step(run, 2)
        assert [entry["step"] for entry in read_metrics(folder)] == [1, 2]

    output = on_a_small_disk(tmp_path, check)
    assert "log.txt cannot be written: No space left on device" in output


def test_failed_record_can_be_repeated(tmp_path):
    """The final save repeats a failed record, and must not fail for missing times."""

    def check(disk: Path) -> None:
        with Run.open(config_of(disk / "run")) as run:
            filler = fill(disk)
            with pytest.raises(InfraError, match=r"metrics\.jsonl cannot be written"):
                record(run, 1)
            filler.unlink()
            entry = run.log.record({"step": 1, "tokens/generated": 10})
            assert entry["time/rollout_s"] > 0 and entry["tokens_per_s"] > 0

    on_a_small_disk(tmp_path, check)


def test_failed_save_frees_its_space(tmp_path):
    def check(disk: Path) -> None:
        folder = disk / "run"
        with Run.open(config_of(folder)) as run:
            step(run, 1)
            step(run, 2)
            step(run, 3, num_bytes=2_000_000, wait=False)
            run.checkpoints.settle()
            assert saved_steps(folder) == ["step-1", "step-2"]
            fill(disk, leave=100_000).unlink()
            record(run, 4)
            run.complete(4, {"cursor": "x" * 2_000_000})
            with pytest.raises(InfraError, match="step 4 .*No space left"):
                run.save(written_by(lambda to: (to / "shard").write_bytes(b"x")), wait=True)
            assert saved_steps(folder) == ["step-1", "step-2"]
            step(run, 5, num_bytes=900_000)
            assert saved_steps(folder) == ["step-2", "step-5"]

    output = on_a_small_disk(tmp_path, check)
    assert "No space left" in output and "tried again after the next step" in output


def test_full_disk_at_start_changes_nothing(tmp_path):
    def check(disk: Path) -> None:
        folder = disk / "run"
        with Run.open(config_of(folder)) as run:
            step(run, 1)
        before = (folder / "config.json").read_bytes()
        filler = fill(disk)
        with pytest.raises(InfraError, match=r"lease\.json cannot be written: No space left"):
            open_and_close(config_of(folder))
        filler.unlink()
        filler = fill(disk, leave=4096)
        with pytest.raises(InfraError, match=r"config\.json cannot be written: No space left"):
            open_and_close(config_of(folder, num_steps=8))
        assert (folder / "config.json").read_bytes() == before
        assert not list(folder.glob("lease*"))
        filler.unlink()
        with Run.open(config_of(folder, num_steps=8)) as run:
            assert run.step == 1

    on_a_small_disk(tmp_path, check)


def test_plot_of_a_finished_run_is_written_by_its_next_start(tmp_path):
    """With exit code 3 a supervisor gave up a run whose last step was saved."""

    def check(disk: Path) -> None:
        config = config_of(disk / "run", num_steps=1)
        with Run.open(config) as run:
            step(run, 1)
            filler = fill(disk)
            with pytest.raises(InfraError, match=r"plot\.png cannot be written: No space left"):
                run.finish()
            filler.unlink()
        with Run.open(config) as run:
            assert run.finished
            run.finish()
        assert (disk / "run" / "plot.png").stat().st_size > 0

    on_a_small_disk(tmp_path, check)


def test_read_only_folder_loses_nothing(tmp_path, monkeypatch):
    # a disk on which a file is open for writing cannot be made read-only
    monkeypatch.setattr("megadapo.run.run.stacks_on_quit", nullcontext)

    def check(disk: Path) -> None:
        folder = disk / "run"
        with (
            pytest.raises(InfraError, match=r"metrics\.jsonl cannot be written: Read-only"),
            Run.open(config_of(folder)) as run,
        ):
            step(run, 1)
            run.complete(2, {})
            mount(disk, read_only=True)
            with pytest.raises(InfraError, match="step 2 .*Read-only"):
                run.save(written_by(lambda to: (to / "shard").write_bytes(b"x")), wait=True)
            record(run, 2)
        with pytest.raises(InfraError, match="cannot be written.*: Read-only"):
            open_and_close(config_of(folder))
        mount(disk, read_only=False)
        # as if that driver's process had ended
        (folder / "lease.json").unlink()
        with Run.open(config_of(folder)) as run:
            assert run.step == 1
        assert saved_steps(folder) == ["step-1"]

    on_a_small_disk(tmp_path, check)
