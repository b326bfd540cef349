"""Recipes, overrides, combinations: their meaning, and the messages with which they are refused."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from megadapo.config import RunConfig, from_dict, load_config, to_dict, to_toml
from megadapo.config.problems import HINTS, section_of
from megadapo.errors import ConfigError
from megadapo.section import Section
from tests.support import REPOSITORY
from tests.support.processes.running import heavy_imports

IMPOSSIBLE = """
algorithm.responses_per_mini_batch=24 -> algorithm.responses_per_mini_batch; multiple
algorithm.responses_per_mini_batch=48 -> algorithm.responses_per_mini_batch; does not divide
algorithm.responses_per_mini_batch=16384 -> = 16384 does not divide; 512 x 16 = 8192
algorithm.responses_per_mini_batch=16; trainer.data_parallel=32
    -> trainer.data_parallel = 32; without a response
trainer.context_parallel=16384
    -> trainer.context_parallel = 16384; 32768 chunks; max_response_tokens = 2
rollout.max_response_tokens=4096 -> algorithm.overlong_buffer; max_response_tokens
evaluation.every=5 -> evaluation.every; data.held_out
evaluation.every=10; evaluation.placement=engine
    -> evaluation.placement = "engine"; cluster.placement
evaluation.every=5; evaluation.placement=engine; cluster.placement=separate
    -> evaluation.every = 5; checkpoint.every = 10
trainer.sequence_parallel=true -> trainer.sequence_parallel; tensor_parallel
trainer.optimizer.cpu_offload_fraction=0.5; cluster.device=cpu
    -> trainer.optimizer.cpu_offload_fraction = 0.5; cluster.device
trainer.optimizer.cpu_offload_fraction=1.0; cluster.device=cuda; model.dtype=float32
    -> trainer.optimizer.cpu_offload_fraction = 1; model.dtype
algorithm.advantage=maxrl; algorithm.overlong_buffer=0; reward.functions=["format"]
    -> algorithm.advantage; reward.functions
trainer.router_replay=true; rollout.vllm.enable_prefix_caching=false
    -> trainer.router_replay; rollout.vllm.enable_prefix_caching
trainer.router_replay=true; rollout.pipeline_parallel=2
    -> trainer.router_replay; rollout.pipeline_parallel
rollout.quantization=fp8 -> rollout.quantization; algorithm.importance.scope
rollout.quantization=fp8; model.dtype=float32 -> rollout.quantization; model.dtype
rollout.quantization=fp8; cluster.device=cpu -> rollout.quantization; cluster.device
algorithm.advantage=grpo-process -> algorithm.advantage; reward.functions
algorithm.advantage=grpo-process; reward.functions=["arithmetic_steps"];
    sampling.accuracy_range=[0.1, 1.0] -> algorithm.advantage; sampling.accuracy_range
critic.warmup=1 -> critic: ; algorithm.advantage = "gae"
algorithm.advantage=gae; critic.warmup=3; critic.optimizer.warmup_steps=0
    -> critic.warmup = 3; run.num_steps
algorithm.advantage=gae; trainer.optimizer.decay_steps=20; trainer.optimizer.warmup_steps=2
    -> trainer.optimizer.decay_steps = 20; critic.optimizer.warmup_steps = 20
algorithm.objective.kl_coef=0.1; algorithm.reference.refresh_every=3
    -> algorithm.reference.refresh_every; run.num_steps
algorithm.objective.kl_coef=0.1; algorithm.reference={path = "a", refresh_every = 1}
    -> algorithm.reference.refresh_every; algorithm.reference.path
algorithm.objective.kl_coef=0.1; algorithm.reference.path="" -> algorithm.reference.path; empty
algorithm.reference.path=a -> algorithm.reference; kl_coef = 0
algorithm.advantage=rloo; algorithm.objective={kl_coef = 0.1, kl_in = 'reward', kl_value = 'k1'};
    algorithm.kl_control={target = 0.1, horizon = 8}
    -> algorithm.kl_control.horizon = 8; 0.2; sampling
algorithm.objective={old_kl_coef = 1.0, gate = 'none'}; algorithm.responses_per_mini_batch=8192
    -> algorithm.objective.old_kl_coef; first update; algorithm.passes
algorithm.max_kl=0.1; algorithm.responses_per_mini_batch=8192 -> algorithm.max_kl; first update
algorithm.importance.stale_logprobs=rollout; algorithm.importance.high=3.0
    -> algorithm.importance.high; algorithm.importance.stale_logprobs
algorithm.importance.stale_logprobs='none'; sampling.max_staleness=1; sampling.mode=one_step_off;
    cluster.placement=separate -> algorithm.importance.stale_logprobs; sampling.mode; whole groups
sampling.max_staleness=2; sampling.mode=async -> sampling.mode; cluster.placement; separate
sampling.max_staleness=2; sampling.mode=async; cluster.placement=separate; evaluation.every=1
    -> evaluation.placement; engine; evaluation.every
sampling.branching.initial_rollouts=4 -> sampling.branching.initial_rollouts; rollout.environments
run.seed=-1 -> run.seed
run.num_steps=0 -> run.num_steps
run.resume= -> run.resume
run.folder= -> run.folder
weights.deadline_s=1801 -> weights.deadline_s = 1801; at most 1800
trainer.timeout_s=60 -> weights.deadline_s; trainer.timeout_s
rollout.top_p=0.9 -> rollout.top_p; evaluation.top_p
rollout.top_k=50 -> rollout.top_k; whole softmax
rollout.enforce_eager=true -> rollout.vllm.enforce_eager
"""
"""Overrides, and what the message must contain."""
QUICKSTART = REPOSITORY / "configs" / "quickstart.toml"


def refused(path: Path, *overrides: str) -> str:
    """Return the message with which a recipe is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_importing_the_configuration_imports_nothing_heavy() -> None:
    """--dry-run must answer at once, and on a machine without the heavy packages."""
    assert heavy_imports("import megadapo.config") == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[run\n", "not valid TOML"),
        (b"run.seed = 1\nrun.seed = 2\n", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"extends = 3\n", "extends: expected the name"),
        (b'extends = "nowhere.toml"\n', "cannot be read"),
        (b'extends = "recipe.toml"\n', "extends this file again"),
        (b"a = " + b"[" * 20000, "not valid TOML"),
        (b"a = " + b"9" * 6001, "not valid TOML"),
        (b'extends = "a\\u0000b"\n', "extends: expected the name"),
        (b"run.seed = 1" + b"0" * 3000, "run.seed: the number is too large"),
        (b'run.folder = "a\\u0000b"', "run.folder: 'a\\x00b' has a NUL"),
        (b"run.grace_s = 1e308", "run.grace_s: 1e+308 is more than 1e+09 seconds"),
        (b"a = " + b"[" * 60 + b"]" * 60, "a: more than 50 tables or lists"),
    ],
)
def test_unreadable_recipe_is_one_message(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    message = refused(path)
    assert said in message and ".toml" in message


def test_file_without_an_end_is_refused(tmp_path: Path) -> None:
    """Reading them took all memory, or never ended."""
    path = tmp_path / "recipe.toml"
    os.mkfifo(tmp_path / "pipe")
    for base, said in (("/dev/zero", "more than 16 MiB"), ("pipe", "it is a pipe")):
        path.write_text(f'extends = "{base}"')
        assert said in refused(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.toml")
    assert str(tmp_path / "config.json") in refused(tmp_path)


def test_byte_order_mark_is_harmless(recipe: Path) -> None:
    """Editors on Windows write one; it must not become part of the first key."""
    recipe.write_text(recipe.read_text(), encoding="utf-8-sig")
    assert load_config(recipe).run.num_steps == 3


def test_extends_lays_one_recipe_over_another(recipe: Path) -> None:
    over = recipe.parent / "deeper" / "over.toml"
    over.parent.mkdir()
    over.write_text('extends = "../recipe.toml"\n[run]\nseed = 5\n[trainer.optimizer]\nlr = 3e-6\n')
    config = load_config(over, ["--trainer.optimizer.warmup_steps=3"])
    assert (config.run.folder, config.run.seed) == (Path("runs/x"), 5)
    assert (config.trainer.optimizer.lr, config.trainer.optimizer.warmup_steps) == (3e-6, 3)


def test_input_paths_are_found_beside_the_file_that_names_them(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with recipe and rows could not be used from another folder, or moved."""
    folder = recipe.parent / "deeper"
    folder.mkdir()
    for name in ("rows.jsonl", "own.jsonl"):
        (folder / name).touch()
    names = 'a = "rows.jsonl"\nb = {source = "own.jsonl"}\nc = "arithmetic:train:9"'
    base = f'extends = "../recipe.toml"\n[data.train]\n{names}\n'
    (folder / "base.toml").write_text(base)
    over = recipe.parent / "over.toml"
    over.write_text('extends = "deeper/base.toml"\n[data.train]\nc = "none"\n')
    monkeypatch.chdir(recipe.parent)
    first, second = load_config(over).data.train.values()
    assert (first, second.source) == (str(folder / "rows.jsonl"), str(folder / "own.jsonl"))
    # a text that no file system takes
    assert load_config(over, ["data.held_out=" + "x" * 5000]).data.held_out == "x" * 5000
    (folder / "base.toml").write_text(base + f'd = "{"y" * 5000}"\n')
    assert load_config(over).data.train["d"] == "y" * 5000
    (folder / "base.toml").write_text(base)
    (recipe.parent / "rows.jsonl").touch()
    assert [*load_config(over, ["data.train.b=none"]).data.train.values()] == ["rows.jsonl"]
    columns = 'extends = "configs/quickstart.toml"\n[data.columns]\nexamples = "own.jsonl"\n'
    (folder / "base.toml").write_text(columns)
    found = load_config(folder / "base.toml").data
    assert found.columns.examples == str(folder / "own.jsonl")
    assert found.train == load_config("configs/quickstart.toml").data.train


def test_recipes_of_the_package_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed wheel had no recipe, and a recipe's model was found in a checkout alone."""
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/quickstart.toml")
    assert (Path(config.model.path) / "model.safetensors").is_file()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.toml").write_text("run.seed = 4\n")
    assert "model" in refused(Path("configs/quickstart.toml"))


def test_extends_in_a_ring_is_refused(recipe: Path) -> None:
    (recipe.parent / "a.toml").write_text('extends = "b.toml"\n')
    (recipe.parent / "b.toml").write_text('extends = "a.toml"\n')
    assert "extends this file again" in refused(recipe.parent / "a.toml")


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


def test_run_folder_may_be_below_home(recipe: Path, monkeypatch) -> None:
    """A shell does not expand it in a TOML file, so it would be a folder called ~."""
    monkeypatch.setenv("HOME", "/home/of-test")
    assert load_config(recipe, ["run.folder=~/runs/x"]).run.folder == Path("/home/of-test/runs/x")


def test_run_folder_stands_for_its_resolved_configuration(recipe: Path, tmp_path: Path) -> None:
    """A folder that was moved is the same run, and a run.resume of its start is over."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = load_config(recipe, ["--run.seed=11", f"--run.folder={folder}"])
    begun = config.run.model_copy(update={"folder": Path("elsewhere"), "resume": "never"})
    begun = config.model_copy(update={"run": begun})
    (folder / "config.json").write_text(json.dumps(to_dict(begun)))
    assert load_config(folder) == config
    assert load_config(folder, ["--run.num_steps=9"]).run.num_steps == 9


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            'data.train={math = {source = "a", wieght = 0.5}}',
            "data.train.math.wieght: unknown key; known here: source, weight",
        ),
        (
            'data.train={math = {source = "a", weight = "2"}}',
            "data.train.math.weight: Input should be a valid number",
        ),
        ("data.train={math = 3}", "data.train.math: expected str or a table, found int"),
        ("data.train=[]", "data.train: expected str or a table, found a list"),
        (
            'reward.functions=[{function = "m:f", wieght = 1}]',
            "reward.functions.0.wieght: unknown key; did you mean reward.functions.0.weight?",
        ),
    ],
)
def test_mistake_in_a_table_is_the_only_problem(recipe: Path, override: str, problem: str) -> None:
    """A table was taken as the name of a file, and a wrong entry made its list too short."""
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [override])
    assert str(caught.value) == f"{recipe} with its overrides: {problem}"


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"run": 3}', "[" * 100000])
def test_damaged_resolved_configuration_is_one_message(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert refused(tmp_path)


def test_every_key_is_described_and_every_section_has_its_title() -> None:
    """A section made in code names its keys by its title."""
    for dotted, field in fields_below(RunConfig):
        if (section := section_of(field)) is None:
            assert field.description and field.description.endswith((".", ")")), dotted
        else:
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
        "  algorithm.responses_per_mini_batch = 24 splits a group: it must be a multiple of "
        "sampling.responses_per_prompt = 16",
    ]


def test_deleted_key_says_what_takes_its_place(recipe: Path) -> None:
    """A known key with a near name may mean something else."""
    keys = [key for key in HINTS if "." in key]
    message = refused(recipe, *(f"--{key}=1" for key in keys))
    expected = {f"  {key}: unknown key; {HINTS[key]}" for key in keys}
    assert set(message.splitlines()[1:]) == expected


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
        and not dotted.startswith(("reward.functions", "rollout.environments"))
    ]
    assert len(limits) == 4
    message = refused(recipe, *(f"--{dotted}=0.5" for dotted in limits))
    assert all(f"{dotted} = 0.5 must be at least 1" in message for dotted in limits)


def test_an_unknown_section_is_not_followed_by_what_only_its_absence_breaks(recipe: Path) -> None:
    """Its values would have been those of the section that now has its defaults."""
    message = refused(recipe, "--rollout.max_response_tokens=48", "--algoritm.overlong_buffer=16")
    assert message.endswith("algoritm: unknown section; did you mean algorithm?")
    assert len(message.splitlines()) == 1


def test_overrides_are_toml_values_or_bare_text(recipe: Path) -> None:
    config = load_config(
        recipe,
        [
            "--run.seed=7",
            "--run.resume=never",
            "run.folder=runs/a = b",
            "--algorithm.objective.dual_clip=10",
            "--algorithm.max_kl=none",
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
    assert config.algorithm.max_kl is None
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


@pytest.mark.parametrize("text", ["7", "1e3", "a b", "2020-01-01", "{a = 1}"])
def test_override_for_a_text_field_keeps_its_text(recipe: Path, text: str) -> None:
    """A folder called 7 must not be refused because 7 is also a number."""
    config = load_config(recipe, [f"--run.folder={text}", f"--run.resume={text}"])
    assert (config.run.folder, config.run.resume) == (Path(text), text)


def test_override_of_a_table_takes_its_place(recipe: Path) -> None:
    config = load_config(recipe, ["--trainer.optimizer={lr = 1e-3, warmup_steps = 1}"])
    assert (config.trainer.optimizer.lr, config.trainer.optimizer.warmup_steps) == (1e-3, 1)


@pytest.mark.parametrize("case", IMPOSSIBLE.strip().replace("\n    ", " ").split("\n"))
def test_impossible_combination_names_its_keys(recipe: Path, case: str) -> None:
    overrides, keys = (part.split("; ") for part in case.split(" -> "))
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


def test_run_shorter_than_its_warmup_is_a_warning(recipe: Path) -> None:
    (warning,) = load_config(recipe, ["trainer.optimizer.warmup_steps=4"]).warnings()
    assert "trainer.optimizer.warmup_steps = 4" in warning and "run.num_steps = 3" in warning
    critic = ["algorithm.advantage=gae", "critic.optimizer.warmup_steps=5"]
    (warning,) = load_config(recipe, critic).warnings()
    assert "critic.optimizer.warmup_steps = 5" in warning
    assert load_config(recipe, ["trainer.optimizer.warmup_steps=3"]).warnings() == []


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
