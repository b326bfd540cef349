"""The number of engines for `rollout.num_engines = "auto"` by machine."""

from pathlib import Path

import pytest

from megadapo.config import RunConfig, load_config, to_toml
from megadapo.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
QUICKSTART = REPOSITORY / "configs" / "quickstart.toml"


def quickstart(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, overrides)


@pytest.mark.parametrize("overrides,has_gpu,expected", [
    ([], False, 2),
    ([], True, 1),
    (["cluster.device=cpu"], True, 2),
    (["cluster.device=cuda"], False, 1),
    (["trainer.data_parallel=4"], True, 4),
    (["trainer.data_parallel=4", "rollout.tensor_parallel=2"], True, 2),
    (["rollout.tensor_parallel=2"], True, 1),
    (["rollout.num_engines=3"], True, 3),
])  # fmt: skip
def test_engines_are_counted_by_the_trainers_gpus(
    overrides: list[str], has_gpu: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megadapo.config.run_config.has_gpu", lambda: has_gpu)
    assert quickstart(*overrides).rollout.num_engines == expected


def test_a_resolved_configuration_keeps_the_number_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megadapo.config.run_config.has_gpu", lambda: False)
    printed = tmp_path / "printed.toml"
    printed.write_text(to_toml(quickstart()))
    monkeypatch.setattr("megadapo.config.run_config.has_gpu", lambda: True)
    assert load_config(printed).rollout.num_engines == 2


def test_another_wrong_key_is_named_without_the_engines() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.data_parallel") as caught:
        quickstart("trainer.data_parallel=-1")
    assert "num_engines" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"rollout\.num_engines"):
        quickstart("rollout.num_engines=some")
