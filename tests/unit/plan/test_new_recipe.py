"""Recipes that `megadapo new` writes: the rules, without samples and with made ones."""

import itertools
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from megadapo.cli import main
from megadapo.cluster.machine import inspect_machine
from megadapo.config import RunConfig, load_config
from megadapo.data.group import Group, Response, Score
from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError, DataError
from megadapo.models.description import describe_model
from megadapo.models.folder import find_hf_config
from megadapo.observe.run_records import leaves
from megadapo.plan.cards import CARDS
from megadapo.plan.fit import problems, warnings
from megadapo.plan.forecast import core_warnings
from megadapo.plan.new.draft import Draft
from megadapo.plan.new.recipe import write_recipe
from megadapo.plan.new.sizes import LR, MIN_LR, Facts, choose_sizes
from megadapo.plan.phases import models_of
from tests.support import REPOSITORY
from tests.support.rows import write_jsonl

BASE = str(REPOSITORY / "configs" / "quickstart-base")
MAX_KEYS = 20
SUMS = [{"question": f"{a}+{b}=?", "answer": a + b} for a in range(20) for b in range(10)]
RIGHT, WRONG = (1.0, 20), (0.0, 8)
"""Score and length of a response."""


def sampled(*kinds: list[tuple[float, int]], text: str = "Answer: 7", gold: str = "7"):
    """Return a function that samples groups of responses with these scores and lengths."""
    groups = []
    for index, kind in enumerate(kinds):
        responses = tuple(
            Response(
                text=text if score > 0.0 else text.replace("7", "8"),
                token_ids=np.ones(length, dtype=np.int32),
                logprobs=np.zeros(length, dtype=np.float32),
                finish_reason="stop",
                policy_versions=np.zeros(length, dtype=np.int32),
            )
            for score, length in kind
        )
        scores = tuple(Score(score, score > 0.0, "") for score, _ in kind)
        prompt = Prompt(str(index), (("user", "3+4=?"),), gold, "sums")
        group = Group(
            prompt_index=index,
            prompt=prompt,
            prompt_ids=(1,) * 9,
            responses=responses,
            scores=scores,
            seconds=0.2,
        )
        groups.append(group)
    return lambda config: groups


MIXED = sampled(*[[RIGHT] * 2 + [WRONG] * 6] * 16)


@pytest.fixture
def new(tmp_path, monkeypatch):
    """Return the recipe of rows for this machine's cores, with made samples, and its text."""
    monkeypatch.chdir(tmp_path)
    numbers = itertools.count()

    def write(*overrides: str, rows=SUMS, sample=MIXED) -> tuple[RunConfig, str]:
        draft = Draft(overrides)
        for key, value in {"model.path": BASE, "run.folder": "run"}.items():
            draft.set(key, value)
        source = write_jsonl(tmp_path / "rows.jsonl", *rows)
        output = tmp_path / f"recipe{next(numbers)}.toml"
        lines = write_recipe(draft, source, None, output, gpus=None, sample=sample)
        text = output.read_text()
        assert all(line in text.replace("\n# ", " ") for line in lines)
        return load_config(output), text

    return write


@pytest.mark.parametrize(
    ("model", "card", "num_gpus"),
    [
        ("Qwen/Qwen2.5-0.5B", "RTX-4090", 1),
        ("Qwen/Qwen2.5-7B", "H100-80G", 1),
        ("Qwen/Qwen2.5-7B", "H100-80G", 8),
        ("Qwen/Qwen2.5-32B", "H100-80G", 128),
    ],
)
def test_recipe_for_gpus_fits_on_them(tmp_path, monkeypatch, capsys, model, card, num_gpus):
    monkeypatch.chdir(tmp_path)
    data = "arithmetic:train:4096"
    assert main(["new", model, data, "--gpu", card, "--gpus", str(num_gpus)]) == 0
    assert "minutes a step" in capsys.readouterr().out
    assert main(["train", "recipe.toml", "--dry-run"]) == 0
    config = load_config("recipe.toml")
    models = models_of(config)
    found = (problems(config, models, CARDS[card]), warnings(config, models, CARDS[card]))
    assert found == ([], []) and config.trainer.num_ranks == num_gpus
    assert config.rollout.num_engines * config.rollout.tensor_parallel == num_gpus
    assert len([*leaves(tomllib.loads(Path("recipe.toml").read_text()))]) <= MAX_KEYS
    # no second recipe replaces one that may have been edited
    assert main(["new", model, data, "--gpu", card]) == ConfigError.exit_code


def test_recipe_for_cores_is_accepted(new, capsys):
    config, text = new("reward.functions=['format']", "data.columns.prompt=question")
    assert main(["train", "recipe0.toml", "--dry-run"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert len([*leaves(tomllib.loads(text))]) <= MAX_KEYS
    assert config.model.dtype == "float32" and config.rollout.num_engines == 2
    assert (config.rollout.max_response_tokens, config.algorithm.overlong_buffer) == (32, 6)
    assert config.data.max_prompt_tokens == 16
    assert config.run.num_steps == 30 and config.evaluation.every == 10
    batch = (config.sampling.prompts_per_step, config.sampling.responses_per_prompt)
    assert (*batch, config.algorithm.responses_per_mini_batch) == (32, 8, 64)
    assert "16 of 16 groups mixed" in text and "mean score 0.25" in text


def test_lengths_are_those_of_responses_that_earn_something(new):
    """Wrong responses that never end would make every step slow."""
    rambling = [RIGHT, (0.0, 200), (0.0, 200), (0.0, 200)]
    config, _ = new(sample=sampled(*[rambling] * 16))
    assert config.rollout.max_response_tokens == 32
    context, _ = new(sample=sampled(*[[(1.0, 230), WRONG]] * 16))
    assert context.rollout.max_response_tokens == 256 - 16


def test_groups_are_larger_if_few_are_mixed(new):
    few = [[RIGHT, WRONG]] * 4 + [[WRONG, WRONG]] * 12
    assert new(sample=sampled(*few))[0].sampling.responses_per_prompt == 16


@pytest.mark.parametrize("kind", [RIGHT, WRONG])
def test_groups_that_teach_nothing_are_a_warning(new, kind):
    _, text = new(sample=sampled(*[[kind] * 8] * 16))
    assert "WARNING: the responses of each group have the same score" in text


@pytest.mark.parametrize(
    ("text", "gold", "rule"),
    [
        ("so\nAnswer: 7", "7", "answer"),
        (r"\boxed{7}", "7", "boxed"),
        ("it is 7", "7", "last_number"),
        ("it is 7", "seven", "exact_text"),
    ],
)
def test_rule_is_the_first_that_finds_answers(new, text, gold, rule):
    rows = [{"question": f"{n}?", "answer": gold} for n in range(20)]
    sample = sampled(*[[RIGHT, WRONG]] * 16, text=text, gold=gold)
    config, recipe = new(rows=rows, sample=sample)
    assert config.reward.rule == rule
    mean = 0.0 if gold == "seven" else 0.5
    assert f"mean score {mean:.2f}" in recipe
    assert new("reward.rule=exact_text", rows=rows, sample=sample)[0].reward.rule == "exact_text"


def test_gold_answers_that_the_rule_cannot_score_are_refused(new):
    long = "x" * 301
    rows = [{"question": f"{n}?", "answer": long} for n in range(20)]
    sample = sampled(*[[RIGHT, WRONG]] * 16, text=r"\boxed{7}", gold=long)
    with pytest.raises(DataError, match=r"line 1: .* at most 300"):
        new(rows=rows, sample=sample)


def test_keys_of_the_user_are_kept(new):
    config, text = new("rollout.max_response_tokens=100", "sampling.prompts_per_step=24")
    assert config.rollout.max_response_tokens == 100 and config.algorithm.overlong_buffer == 20
    assert config.sampling.prompts_per_step == 24 and "# given\nprompts_per_step" in text
    with pytest.raises(ConfigError, match="prompts_per_step"):
        new("sampling.prompts_per_step=0")
    new("algorithm.objective.kl_coef=0.1", "algorithm.reference.refresh_every=9")
    rows = [*SUMS, {"question": "1" * 2000, "answer": 1}]
    config, _ = new("data.overlong_prompts=drop", "data.max_prompt_tokens=32", rows=rows)
    assert config.data.max_prompt_tokens == 32


def test_evaluation_has_at_most_the_responses_of_two_steps(new):
    """With a model that is slow on cores, four answers a problem took longer than training."""
    rows = [{"question": f"{n}?", "answer": n} for n in range(2000)]
    batch = ("sampling.prompts_per_step=8", "sampling.responses_per_prompt=8")
    assert new(*batch, rows=rows)[0].evaluation.samples_per_problem == 2
    assert new(batch[1], rows=rows)[0].evaluation.samples_per_problem == 4


def test_columns_are_found_by_words_in_their_names(new):
    rows = [{"id": n, "The_Question": f"{n}?", "final-answer": n} for n in range(20)]
    columns = new(rows=rows)[0].data.columns
    assert (columns.prompt, columns.ground_truth) == ("The_Question", "final-answer")
    rows = [row | {"answer_b": 1} for row in rows]
    with pytest.raises(ConfigError) as raised:
        new(rows=rows)
    for said in ("id, The_Question, final-answer, answer_b", "final-answer or answer_b may be"):
        assert said in str(raised.value)
    assert "--data.columns.ground_truth=COLUMN" in str(raised.value)
    config, _ = new("data.columns.ground_truth=answer_b", rows=rows)
    assert config.data.columns.ground_truth == "answer_b"
    with pytest.raises(ConfigError, match="question;answer may be the ground_truth"):
        new(rows=[{"question;answer": "1+1;2"}])
    with pytest.raises(ConfigError, match=r"none of them may be the prompt.*--data.columns.prompt"):
        new(rows=[{"text": "1?", "answer": 1}])


@pytest.mark.parametrize(("num", "held_out"), [(4, 1), (40, 10), (200, 20), (2000, 64)])
def test_held_out_prompts_are_not_trained_on(new, tmp_path, num, held_out):
    rows = [{"question": f"{n}?", "answer": n, "note": "\u00e9\ud83d"} for n in range(num)]
    config, _ = new(rows=[*rows, *rows])
    files = [Path(name).read_text() for name in (config.data.train, config.data.held_out)]
    parts = [[json.loads(line) for line in text.splitlines()] for text in files]
    assert [len(part) for part in parts] == [2 * (num - held_out), 2 * held_out]
    assert sorted(parts[0] + parts[1], key=lambda row: row["answer"]) == [
        row for row in rows for _ in range(2)
    ]
    assert not {row["answer"] for row in parts[0]} & {row["answer"] for row in parts[1]}


def test_too_few_rows_are_refused(new):
    with pytest.raises(DataError, match="3 prompts are too few"):
        new(rows=SUMS[:3])


def test_rows_of_the_user_are_not_replaced(new, tmp_path):
    mine = tmp_path / "recipe0-train.jsonl"
    mine.write_text("mine\n")
    with pytest.raises(ConfigError, match="recipe0-train.jsonl exists and has other rows"):
        new()
    assert mine.read_text() == "mine\n"


def test_environment_gives_the_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    games = str(REPOSITORY / "examples" / "environment" / "train.jsonl")
    words = ["new", "Qwen/Qwen2.5-0.5B", games, "--gpu", "RTX-4090", "--held-out", games]
    assert main([*words, "--environment", "examples.environment.guess:Guess"]) == 0
    config = load_config("recipe.toml")
    assert [one.label for one in config.rollout.environments] == ["Guess"]
    assert [one.function for one in config.reward.functions] == ["environment"]
    assert config.algorithm.overlong_buffer == 0
    # the held-out prompts are those of training
    assert config.data.overlap == "drop" and config.data.held_out == games


def test_prompts_that_leave_no_room_are_refused(new):
    with pytest.raises(ConfigError, match="the model reads 256"):
        new(rows=[{"question": "1+" * 200, "answer": n} for n in range(9)] + SUMS)


def test_model_that_does_not_fit_on_cores_is_refused():
    model = describe_model(find_hf_config("Qwen/Qwen2.5-7B"))
    sizes = {"prompt_tokens": 9, "num_held_out": 64, "num_gpus": 1, "memory_gib": 64}
    facts = Facts(model=model, card=None, **sizes)
    draft = Draft(["run.folder=run", "model.path=Qwen2.5-7B", "data.train=rows"])
    with pytest.raises(ConfigError, match=r"takes 142 GiB .* this machine has 64: .*--gpu"):
        choose_sizes(draft, facts)


HAND_MADE = [
    *("configs/quickstart.toml", "configs/styles.toml", "configs/chain.toml"),
    *("configs/smollm2-135m.toml", "examples/one_gpu/recipe.toml"),
    *("configs/qwen2.5-7b.toml", "configs/qwen2.5-32b.toml", "configs/qwen3-30b-a3b.toml"),
]


@pytest.mark.parametrize("recipe", HAND_MADE)
def test_learning_rate_is_near_the_hand_made_one(recipe):
    config = load_config(REPOSITORY / recipe)
    sampling, model = config.sampling, describe_model(find_hf_config(config.model.path))
    batch = sampling.prompts_per_step * sampling.responses_per_prompt
    updates = config.run.num_steps * batch / config.algorithm.responses_per_mini_batch
    rule = max(MIN_LR, LR / model.shape.hidden_size / updates**0.5)
    assert 0.5 <= rule / config.trainer.optimizer.lr <= 2.0


def test_defaults_on_cores_are_a_warning_with_hours(tmp_path, monkeypatch, capsys):
    """The defaults are those of the paper's cluster."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "minimal.toml"
    recipe.write_text(
        '[run]\nfolder = "run"\nnum_steps = 100\n[model]\npath = "Qwen/Qwen2.5-0.5B"\n'
        '[data]\ntrain = "arithmetic:train:64"\n'
    )
    assert main(["train", "minimal.toml", "--dry-run"]) == 0
    told = capsys.readouterr().err
    cores = inspect_machine().num_cores
    for said in (f"hours on {cores} cores", "sampling.prompts_per_step = 512", "megadapo new"):
        assert said in told
    assert 'model.dtype = "bfloat16" on a CPU' in told
    assert core_warnings(load_config(recipe, ["cluster.device=cuda"])) == []
    for name in ("quickstart", "chain", "smollm2-135m"):
        assert core_warnings(load_config(REPOSITORY / "configs" / f"{name}.toml")) == []
