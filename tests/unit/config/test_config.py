"""Would catch: a recipe that is read wrongly, or a combination of sections that cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from megadapo.config import RunConfig, from_dict, load_config, to_dict, to_toml
from megadapo.config.problems import section_of
from megadapo.errors import ConfigError
from megadapo.section import Section

RECIPE = """
[run]
folder = "runs/x"
num_steps = 3
[model]
path = "models/base"
[data]
train = "arithmetic:train:64"
[trainer.optimizer]
warmup_steps = 2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_importing_the_configuration_imports_nothing_heavy() -> None:
    """--dry-run must answer at once, and on a machine without the heavy packages."""
    heavy = ("torch", "ray", "vllm", "megatron", "transformers", "triton", "matplotlib")
    code = f"import sys, megadapo.config; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_overrides_are_toml_values_or_bare_text(recipe: Path) -> None:
    config = load_config(
        recipe,
        [
            "--run.seed=7",
            "--run.resume=never",
            "run.folder=runs/a = b",
            "--algorithm.objective.dual_clip=10",
            "--evaluation.max_problems=none",
            '--data.held_out="arithmetic:held_out:8"',
            "--trainer.optimizer.lr=2e-6",
            "--trainer.sequence_parallel=true",
            "--trainer.tensor_parallel=2",
        ],
    )
    assert config.run.seed == 7
    assert config.run.resume == "never"
    assert config.run.folder == Path("runs/a = b")
    assert config.algorithm.objective.dual_clip == 10.0
    assert config.evaluation.max_problems is None
    assert config.data.held_out == "arithmetic:held_out:8"
    assert config.trainer.optimizer.lr == 2e-6
    assert config.trainer.sequence_parallel is True


def test_later_override_wins(recipe: Path) -> None:
    assert load_config(recipe, ["--run.seed=1", "--run.seed=2"]).run.seed == 2


@pytest.mark.parametrize("text", ["--run.seed", "--seed=3", "--=3", "--run.=3", "--.seed=3", ""])
def test_malformed_override_is_refused(recipe: Path, text: str) -> None:
    assert "write --section.key=value" in refused(recipe, text)


def test_override_cannot_smuggle_in_a_second_key(recipe: Path) -> None:
    """A value with a line break must not become two assignments."""
    config = load_config(recipe, ['--run.resume="a"\nseed = 9'])
    assert config.run.resume == '"a"\nseed = 9'
    assert config.run.seed == 0


def test_override_through_a_value_is_refused(recipe: Path) -> None:
    assert "run.seed is a value" in refused(recipe, "--run.seed=3", "--run.seed.x=1")


def test_mistyped_override_names_file_and_key(recipe: Path) -> None:
    message = refused(recipe, "--trainer.optimiser.lr=1e-6")
    assert str(recipe) in message
    assert "trainer.optimiser: unknown key; did you mean trainer.optimizer?" in message


def test_all_wrong_sections_are_reported_together(recipe: Path) -> None:
    message = refused(recipe, "--run.num_steps=0", "--rollout.top_p=2.0", "--reserve.x=1")
    assert message.splitlines()[0].endswith("3 problems")
    assert "run.num_steps" in message and "rollout.top_p" in message and "reserve" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[run\n", "not valid TOML"),
        (b"run.seed = 1\nrun.seed = 2\n", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"extends = 3\n", "extends: expected the name"),
        (b'extends = "nowhere.toml"\n', "cannot be read"),
        (b'extends = "recipe.toml"\n', "leads back to this file"),
        (b"a = " + b"[" * 20000, "not valid TOML"),
    ],
)
def test_unreadable_recipe_is_one_message(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    message = refused(path)
    assert said in message and ".toml" in message


def test_missing_recipe_is_one_message(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.toml")


def test_byte_order_mark_is_harmless(tmp_path: Path) -> None:
    """Editors on Windows write one; it must not become part of the first key."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8-sig")
    assert load_config(path).run.num_steps == 3


def test_extends_lays_one_recipe_over_another(recipe: Path) -> None:
    over = recipe.parent / "deeper" / "over.toml"
    over.parent.mkdir()
    over.write_text('extends = "../recipe.toml"\n[run]\nseed = 5\n[trainer.optimizer]\nlr = 3e-6\n')
    config = load_config(over, ["--trainer.optimizer.warmup_steps=3"])
    assert (config.run.folder, config.run.seed) == (Path("runs/x"), 5)
    assert (config.trainer.optimizer.lr, config.trainer.optimizer.warmup_steps) == (3e-6, 3)


def test_extends_in_a_ring_is_refused(recipe: Path) -> None:
    (recipe.parent / "a.toml").write_text('extends = "b.toml"\n')
    (recipe.parent / "b.toml").write_text('extends = "a.toml"\n')
    assert "leads back to this file" in refused(recipe.parent / "a.toml")


def test_resolved_configuration_round_trips_through_json_and_toml(recipe: Path) -> None:
    config = load_config(
        recipe,
        [
            "--algorithm.objective.dual_clip=3",
            "--oracles.logprob_abs_max=1e-4",
            '--reward.functions=["rule", {function = "m:f", options = {"a b" = [1]}}]',
        ],
    )
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    again = recipe.parent / "again.toml"
    again.write_text(to_toml(config))
    assert load_config(again) == config


def test_run_folder_stands_for_its_resolved_configuration(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, ["--run.seed=11"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    assert load_config(folder) == config
    assert load_config(folder, ["--run.num_steps=9"]).run.num_steps == 9


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"run": 3}', "[" * 100000])
def test_damaged_resolved_configuration_is_one_message(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert refused(tmp_path)


def test_folder_without_configuration_names_the_file(tmp_path: Path) -> None:
    assert str(tmp_path / "config.json") in refused(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            ["algorithm.responses_per_mini_batch=24"],
            ["algorithm.responses_per_mini_batch", "multiple"],
        ),
        (
            ["algorithm.responses_per_mini_batch=48"],
            ["algorithm.responses_per_mini_batch", "does not divide"],
        ),
        (
            ["algorithm.responses_per_mini_batch=16384"],
            ["= 16384 does not divide", "512 x 16 = 8192"],
        ),
        (
            [
                "algorithm.objective.gate=bapo",
                "algorithm.bapo.scope=lagged",
                "algorithm.responses_per_mini_batch=8192",
            ],
            ["algorithm.bapo.scope", "algorithm.responses_per_mini_batch = 8192"],
        ),
        (
            ["algorithm.responses_per_mini_batch=16", "trainer.data_parallel=32"],
            ["trainer.data_parallel = 32", "without a response"],
        ),
        (
            ["trainer.context_parallel=16384"],
            ["trainer.context_parallel = 16384", "32768 chunks", "max_response_tokens = 2"],
        ),
        (
            ["rollout.max_response_tokens=4096"],
            ["algorithm.overlong_buffer", "max_response_tokens"],
        ),
        (["evaluation.every=5"], ["evaluation.every", "data.held_out"]),
        (
            ["evaluation.every=10", "evaluation.placement=engine"],
            ['evaluation.placement = "engine"', "cluster.placement"],
        ),
        (
            ["evaluation.every=5", "evaluation.placement=engine", "cluster.placement=separate"],
            ["evaluation.every = 5", "checkpoint.every = 10"],
        ),
        (
            ["algorithm.overlong_filtering=true"],
            ["algorithm.overlong_filtering", "algorithm.overlong_buffer"],
        ),
        (["trainer.sequence_parallel=true"], ["trainer.sequence_parallel", "tensor_parallel"]),
        (
            ["weights.transport=cuda_ipc", "cluster.placement=separate"],
            ["weights.transport", "cluster.placement"],
        ),
        (["weights.transport=nccl"], ["weights.transport", "cluster.placement"]),
        (
            ["weights.transport=cuda_ipc", "cluster.device=cpu"],
            ["weights.transport", "cluster.device"],
        ),
        (
            [
                "algorithm.advantage=maxrl",
                "algorithm.overlong_buffer=0",
                'reward.functions=["length"]',
            ],
            ["algorithm.advantage", "reward.functions"],
        ),
        (["algorithm.advantage=grpo-process"], ["algorithm.advantage", "reward.functions"]),
        (
            [
                "algorithm.advantage=grpo-process",
                'reward.functions=["arithmetic_steps"]',
                "sampling.min_accuracy=0.1",
            ],
            ["algorithm.advantage", "sampling.min_accuracy"],
        ),
        (["critic.warmup=1"], ["critic: ", 'algorithm.advantage = "gae"']),
        (
            ["algorithm.advantage=gae", "critic.warmup=3", "critic.optimizer.warmup_steps=0"],
            ["critic.warmup = 3", "run.num_steps"],
        ),
        (
            ["algorithm.advantage=gae", "critic.optimizer.warmup_steps=4"],
            ["critic.optimizer.warmup_steps = 4", "run.num_steps"],
        ),
        (
            ["algorithm.advantage=gae", "critic.optimizer.decay_steps=4"],
            ["critic.optimizer.decay_steps", "schedule"],
        ),
        (
            ["algorithm.objective.kl_coef=0.1", "algorithm.reference.kind=refreshed"],
            ["algorithm.reference.refresh_every", "run.num_steps"],
        ),
        (
            [
                "algorithm.advantage=rloo",
                "algorithm.objective={kl_coef = 0.1, kl_in = 'reward', kl_value = 'k1'}",
                "algorithm.kl_control={target = 0.1, horizon = 40, clamp = 1.0}",
            ],
            ["algorithm.kl_control.horizon = 40", "algorithm.kl_control.clamp", "sampling"],
        ),
        (
            ["algorithm.importance.stale_logprobs=rollout", "algorithm.importance.high=3.0"],
            ["algorithm.importance.high", "algorithm.importance.stale_logprobs"],
        ),
        (
            ["algorithm.importance.stale_logprobs='none'", "sampling.max_staleness=1"],
            ["algorithm.importance.stale_logprobs", "sampling.mode", "sampling.max_staleness"],
        ),
        (
            ["sampling.branching.initial_rollouts=4"],
            ["sampling.branching.initial_rollouts", "rollout.tools.tool"],
        ),
        (
            ["algorithm.shared_prefix=hard"],
            ["algorithm.shared_prefix", "sampling.branching.initial_rollouts"],
        ),
        (["run.seed=-1"], ["run.seed"]),
        (["run.num_steps=0"], ["run.num_steps"]),
        (["run.resume="], ["run.resume"]),
        (["run.folder="], ["run.folder"]),
        (["trainer.optimizer.warmup_steps=4"], ["trainer.optimizer.warmup_steps", "run.num_steps"]),
        (["weights.deadline_s=1801"], ["weights.deadline_s = 1801", "at most 1800"]),
        (["trainer.timeout_s=60"], ["weights.deadline_s", "trainer.timeout_s"]),
        (["rollout.top_p=0.9"], ["rollout.top_p", "evaluation.top_p"]),
        (["rollout.top_k=50"], ["rollout.top_k", "whole softmax"]),
    ],
)
def test_impossible_combination_names_its_keys(
    recipe: Path, overrides: list[str], keys: list[str]
) -> None:
    message = refused(recipe, *overrides)
    assert all(key in message for key in keys), message


def test_an_engine_for_held_out_problems_is_one_more_and_only_where_there_are_evaluations(
    recipe: Path,
) -> None:
    own = ["evaluation.placement=engine", "cluster.placement=separate", "rollout.num_engines=3"]
    held_out = ["evaluation.every=10", "data.held_out=arithmetic:held_out:8"]
    assert load_config(recipe, [*own, *held_out]).num_engines == 4
    assert load_config(recipe, own).num_engines == 3
    assert load_config(recipe, [*held_out, "rollout.num_engines=3"]).num_engines == 3


def test_every_key_of_every_section_is_described() -> None:
    """A key that is never explained is a key nobody dares to touch."""
    for dotted, field in fields_below(RunConfig):
        if section_of(field) is None:
            assert field.description and field.description.endswith((".", ")")), dotted


def test_every_section_knows_where_it_lies() -> None:
    """A section made in code names its keys by its title."""
    for dotted, field in fields_below(RunConfig):
        if (section := section_of(field)) is not None:
            assert section.model_config.get("title") == dotted


def fields_below(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if (inner := section_of(field)) is not None:
            yield from fields_below(inner, f"{prefix}{name}.")


def test_five_wrong_keys_and_values_give_five_messages(recipe: Path) -> None:
    """A file is corrected in one go, also where only a combination of sections is wrong."""
    message = refused(
        recipe,
        "--run.sed=1",
        "--trainer.data_parallel=2.0",
        "--dapo.objective.clip_low=0.1",
        "--weights.deadline_s=0.5",
        "--algorithm.responses_per_mini_batch=24",
        "--sampling.prompts_per_step=64",
    )
    assert message.splitlines() == [
        f"{recipe} with its overrides: 5 problems",
        "  run.sed: unknown key; did you mean run.seed?",
        "  trainer.data_parallel: expected int, found float 2.0",
        "  weights.deadline_s = 0.5 must be at least 1",
        "  dapo: unknown section; did you mean algorithm?",
        "  algorithm.responses_per_mini_batch = 24 cuts a group in two: it must be a multiple of "
        "sampling.responses_per_prompt = 16",
    ]


@pytest.mark.parametrize("text", ["7", "1e3", "a b", "2020-01-01", "{a = 1}"])
def test_override_for_a_text_field_keeps_its_text(recipe: Path, text: str) -> None:
    """A folder called 7 must not be refused because 7 is also a number."""
    config = load_config(recipe, [f"--run.folder={text}", f"--run.resume={text}"])
    assert (config.run.folder, config.run.resume) == (Path(text), text)


def test_override_with_wrong_type_is_reported_as_its_value_not_its_text(recipe: Path) -> None:
    assert "run.seed: expected int, found float 1.5" in refused(recipe, "--run.seed=1.5")


def test_override_of_a_table_takes_its_place(recipe: Path) -> None:
    config = load_config(recipe, ["--trainer.optimizer={lr = 1e-3, warmup_steps = 1}"])
    assert (config.trainer.optimizer.lr, config.trainer.optimizer.warmup_steps) == (1e-3, 1)


def test_missing_keys_are_named_even_where_their_section_is_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict({"data": {"train": "x"}, "trainer": {"optimizer": {"warmup_steps": 0}}})
    assert str(caught.value).splitlines() == [
        "run.folder: required, but missing",
        "run.num_steps: required, but missing",
        "model.path: required, but missing",
    ]


def test_no_limit_may_be_below_a_second(recipe: Path) -> None:
    """Half a second passes in any process that is only busy, and the run would end."""
    limits = [
        dotted
        for dotted, field in fields_below(RunConfig)
        if dotted.endswith(("timeout_s", "deadline_s"))
        and not dotted.startswith("reward.functions")
    ]
    assert len(limits) >= 7
    message = refused(recipe, *(f"--{dotted}=0.5" for dotted in limits))
    assert all(f"{dotted} = 0.5 must be at least 1" in message for dotted in limits)


def test_an_unknown_section_is_not_followed_by_what_only_its_absence_breaks(recipe: Path) -> None:
    """Its values would have been those of the section that now has its defaults."""
    message = refused(recipe, "--rollout.max_response_tokens=48", "--algoritm.overlong_buffer=16")
    assert message.endswith("algoritm: unknown section; did you mean algorithm?")
    assert len(message.splitlines()) == 1


def test_a_configuration_written_before_there_were_newer_keys_is_read(tmp_path: Path) -> None:
    """A run's folder outlives the version that wrote it: keys it lacks have their defaults."""
    table = {
        "run": {"folder": "runs/x", "num_steps": 30, "seed": 1, "resume": "auto"},
        "model": {"path": "m", "init": "pretrained", "dtype": "float32"},
        "data": {"train": "arithmetic:train:64", "held_out": None, "max_prompt_tokens": 16},
        "sampling": {"oversampling": 1.2, "reserve_limit": 5, "prompts_per_step": 32},
        "dapo": {"overlong_buffer": 16, "objective": {"dual_clip": None, "kl_kind": "k3"}},
        "cluster": {"placement": "colocated", "device": "auto", "address": None},
    }
    (tmp_path / "config.json").write_text(json.dumps(table))
    config = load_config(tmp_path)
    assert (config.run.folder, config.data.held_out) == (Path("runs/x"), None)
    assert (config.checkpoint.keep, config.algorithm.overlong_buffer) == (2, 16)
    assert (config.sampling.prompts_per_step, config.sampling.reserve_size) == (32, 0)
