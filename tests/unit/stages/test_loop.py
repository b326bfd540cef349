"""The rows of each step of a stage, and its number of steps."""

from collections import Counter

from megadapo.config import load_config
from megadapo.stages.loop import RowOrder, with_num_steps


def config_of(**supervised):
    overrides = [f"supervised.{key}={value}" for key, value in supervised.items()]
    return load_config("configs/quickstart.toml", [*overrides, "run.num_steps=9"])


def rows_of(config, num_rows):
    order = RowOrder(config, num_rows)
    return [order.of_step(step) for step in range(1, config.run.num_steps + 1)]


def test_epochs_set_the_steps_and_use_each_row_once_in_each():
    """A last update that takes rows of a further epoch would weigh some rows more than others."""
    config = with_num_steps(config_of(epochs=3, rows_per_update=4), 10)
    steps = rows_of(config, 10)
    assert [len(rows) for rows in steps] == [4] * 7 + [2]
    assert Counter(row for rows in steps for row in rows) == dict.fromkeys(range(10), 3)
    taken = [row for rows in steps for row in rows]
    assert len({tuple(taken[first : first + 10]) for first in (0, 10, 20)}) == 3


def test_without_epochs_the_recipe_sets_the_steps():
    config = with_num_steps(config_of(rows_per_update=4), 10)
    assert config.run.num_steps == 9
    assert [len(rows) for rows in rows_of(config, 10)] == [4] * 9


def test_order_depends_on_the_seed_alone():
    config = config_of(rows_per_update=4)
    assert rows_of(config, 10) == rows_of(config, 10)
    other = load_config("configs/quickstart.toml", ["supervised.rows_per_update=4", "run.seed=7"])
    assert rows_of(config, 10)[:3] != rows_of(other, 10)[:3]
    plain = load_config("configs/quickstart.toml", ["data.shuffle=false"])
    assert RowOrder(plain, 200).of_step(2) == list(range(64, 128))
