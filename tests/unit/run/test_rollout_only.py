"""Results of `megadapo rollout` replace earlier ones when they are complete."""

from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest

from megadapo.errors import DataError, InfraError
from megadapo.run import rollout_only
from megadapo.run.rollout_only import COMPLETE, UNFINISHED, rollout_folder, start_rollouts
from megadapo.run.state.lease import Lease
from tests.support.runs.runs_alone import config_of

EARLIER = {"config.json": "{}", "correct.jsonl": "old", "pairs.jsonl": "old", "notes": "mine"}


class Phases:
    phase = staticmethod(nullcontext)


def texts(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def folder(tmp_path):
    folder = rollout_folder(config_of(tmp_path / "run"))
    (folder / "rollouts").mkdir(parents=True)
    for name, text in {**EARLIER, "rollouts/step-1.jsonl.zst": "old"}.items():
        (folder / name).write_text(text)
    return folder


@contextmanager
def sampling(folder: Path, monkeypatch):
    """Enter start_rollouts with stand-ins for scorer and engines."""
    inputs = type("Inputs", (), {"sampler": lambda *_: None, "episodes": "episodes"})()
    monkeypatch.setattr(rollout_only.SamplingInputs, "start", lambda *_: inputs)
    monkeypatch.setattr(rollout_only, "start_engines_alone", lambda *_, **__: (None, None))
    config = config_of(folder.with_name(folder.name.removesuffix("-rollout")))
    with start_rollouts(config, Phases(), print):
        (folder / UNFINISHED / "correct.jsonl").write_text("new")
        yield


@pytest.mark.slow
def test_start_that_fails_keeps_earlier_results(folder, tmp_path):
    """A bad gold answer left an empty folder."""
    before = texts(folder)
    with pytest.raises(DataError), start_rollouts(config_of(tmp_path / "run"), Phases(), print):
        pass
    assert before.items() <= texts(folder).items()
    with (
        closing(Lease.take(folder)),
        pytest.raises(InfraError, match="is driven by process"),
        start_rollouts(config_of(tmp_path / "run"), Phases(), print),
    ):
        pass


def test_results_replace_earlier_ones_as_a_whole(folder, monkeypatch):
    before = texts(folder)
    with pytest.raises(ValueError, match="killed"), sampling(folder, monkeypatch):
        assert before.items() <= texts(folder).items()
        raise ValueError("killed")
    assert before.items() <= texts(folder).items()
    with sampling(folder, monkeypatch):
        pass
    config = texts(folder).pop("config.json")
    assert texts(folder) == {"notes": "mine", "correct.jsonl": "new", "config.json": config} != "{}"


@pytest.mark.parametrize("num_renames", range(7))
def test_killed_replacement_continues_with_the_next_command(folder, monkeypatch, num_renames):
    """A mixture of two commands would look like the results of one."""
    rename, done = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        if len(done) == num_renames:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        with sampling(folder, monkeypatch):
            pass
    names = {path.name for path in folder.iterdir() if path.is_file()} - EARLIER.keys()
    assert not names
    is_complete = (folder / COMPLETE).exists()
    with pytest.raises(ValueError, match="killed"), sampling(folder, monkeypatch):
        found = texts(folder)
        assert found["correct.jsonl"] == ("new" if is_complete else "old")
        assert ("pairs.jsonl" in found) == (not is_complete)
        raise ValueError("killed")
