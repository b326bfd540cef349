"""Items of reasoning-gym as prompts: the same in every process, and none in two splits."""

import json
import re
from itertools import islice, pairwise

import psutil
import pytest

from megadapo.cli import main
from megadapo.codec import decode, encode
from megadapo.data import reasoning_gym
from megadapo.data.prompts import Prompt, load_prompts
from megadapo.data.reasoning_gym import MAX_ITEMS, MAX_SEED, Item
from megadapo.errors import DataError
from megadapo.rewards.config import RewardConfig
from tests.support import REPOSITORY
from tests.support.processes.running import run_python
from tests.support.rollout import gym_stand_in

CHECK_GOLD = RewardConfig(functions=("reasoning_gym",)).check_gold


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    gym_stand_in.install(folder)
    monkeypatch.syspath_prepend(folder)


def prompts(source: str) -> list[Prompt]:
    return load_prompts(source, check_gold=CHECK_GOLD, with_extra_info=True)


def items(source: str) -> list[Item]:
    return [Item.of(prompt.extra_info) for prompt in prompts(source)]


def test_prompt_says_how_its_item_is_made_again(stand_in):
    """Catches items that are stored instead, whose tuples JSON turns into lists."""
    found = prompts("reasoning-gym:chain_sum:train:3:2")
    assert len(found) == 3
    for number, prompt in enumerate(found):
        again = decode(Prompt, json.loads(json.dumps(encode(prompt))))
        assert again == prompt and again.extra_info == prompt.extra_info
        item = Item("chain_sum", {}, 2 * MAX_ITEMS, 3, number)
        assert Item.of(again.extra_info) == item
        assert str(sum(map(int, prompt.messages[-1][1].split()[:-1:2]))) == prompt.ground_truth
    with pytest.raises(DataError, match="has no 'size'"):
        Item.of({"name": "chain_sum", "config": {}, "seed": 0, "index": 0})


def test_splits_and_seeds_share_no_item(stand_in):
    """Catches neighbouring seeds, which share all items but one."""
    sources = [f"reasoning-gym:chain_sum:{split}:4" for split in ("train", "held_out")]
    sources += [f"{source}:{seed}" for source in sources for seed in (1, MAX_SEED)]
    # an item of the package depends on this sum
    seeds = [item.seed + item.index for source in sources for item in items(source)]
    assert len(set(seeds)) == len(seeds) == 24
    first = sorted(items(source)[0].seed for source in sources)
    assert all(after - before >= MAX_ITEMS for before, after in pairwise(first))
    assert first[-1] + MAX_ITEMS <= 1 << 32


def test_items_do_not_depend_on_the_hash_seed_or_their_order(stand_in):
    """Catches a restarted run that gets other prompts, and a scorer that makes another item."""
    sources = [f"reasoning-gym:unstable:train:{num}" for num in (4, 2)]
    first, second = (
        run_python(gym_stand_in.PRINT_ITEMS, *sources, PYTHONHASHSEED=seed).stdout.splitlines()
        for seed in ("1", "2")
    )
    assert first == second and len(first) == 6
    assert first[:2] == first[4:]


def test_file_has_several_tasks_in_proportion_to_their_weights(stand_in, tmp_path):
    file = tmp_path / "tasks.toml"
    file.write_text(
        "[chain_sum]\nweight = 3\n[small]\ndataset = 'chain_sum'\nconfig = {max_term = 9}\n"
    )
    found = items(f"reasoning-gym:{file}:train:400")
    small = [item for item in found if item.config == {"max_term": 9}]
    assert all(item.name == "chain_sum" for item in found)
    # repeated sums of small terms are one prompt
    assert 40 < len(small) < 100 and 270 < len(found) - len(small) < 330
    assert {item.index for item in found if not item.config} == set(range(len(found) - len(small)))


def test_items_without_a_text_of_the_answer_are_prompts(stand_in):
    assert [prompt.ground_truth for prompt in prompts("reasoning-gym:no_text:train:2")] == [""] * 2


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("chain_sun:train:8", "has no dataset 'chain_sun'; did you mean chain_sum?"),
        ("composite:train:8", "composite cannot be used: name a TOML file"),
        ("chain_sum:test:8", "there is no split 'test'; use train or held_out"),
        ("chain_sum:train:0", "a split has 1 to 1048576 items, not 0"),
        ("chain_sum:train:8:2048", "the largest seed is 2047"),
        ("chain_sum:train", "write reasoning-gym:WHAT:SPLIT:NUM"),
        ("none.toml:train:8", "none.toml cannot be read as TOML"),
        ("unmakable:train:8", "makes no further item: RuntimeError: this item cannot be made"),
        ("killed:train:8", "makes no further item: exit code -9"),
    ],
)
def test_wrong_source_is_refused(stand_in, source, said):
    with pytest.raises(DataError) as error:
        list(reasoning_gym.rows(f"reasoning-gym:{source}"))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sums]", "has no dataset 'sums'; there are chain_sum, "),
        ("[chain_sum]\nconfg = {}", "chain_sum has no key 'confg'; did you mean config?"),
        ("[chain_sum]\nconfig = {max_terms = 2}", "no key 'max_terms'; did you mean max_term?"),
        ("[chain_sum]\nconfig = {seed = 2}", "has no key 'seed'; there are max_term"),
        ("[chain_sum]\nconfig = {max_term = 0}", "refuses {'max_term': 0}: max_term must be above"),
        ("[chain_sum]\nconfig = {max_term = 2020-02-02}", "config cannot be kept in a prompt"),
        ("[chain_sum]\nweight = 0", "chain_sum.weight = 0 must be a number above 0"),
        ("chain_sum = 2", "chain_sum is no table; write [chain_sum] for a task"),
        ("", "has no tasks"),
        ("[", "cannot be read as TOML"),
    ],
)
def test_wrong_file_is_refused(stand_in, tmp_path, text, said):
    file = tmp_path / "tasks.toml"
    file.write_text(text)
    with pytest.raises(DataError) as error:
        list(reasoning_gym.rows(f"reasoning-gym:{file}:train:8"))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "answers", "refused"),
    [
        ("n_queens", ["Q _\n_ Q", "[['Q', '_']]"], ["entry", "[].Q", "Q()"]),
        ("countdown", ["(7 - 2)*3/4", "-7 + 2"], ["7.2", "7**2", "7//2", "max(7, 2)", "7" * 31]),
        ("puzzle24", ["6*4*1/1"], ["6*4**1", "factorial(4)"]),
        (
            "intermediate_integration",
            [
                *("x**3/3 + C", "0.5*X**2 + C", "2*(4*x + 2)**(3/2)/3", "x**-1", "x**(-1 / 2)"),
                *("E**(2*x)*sin(x)**2", "x*asin(3*x) + sqrt(1 - 9*x**2)/3 + C", "2**0.5*exp(x)"),
            ],
            [
                *("Integral(x, x)", "integrate(x, x)", "x.args", "9**9**9", "9**(9**9)", "9**999"),
                *("E**9**9**9", "x**2**3", "lambda: x", "y", "exp(x);x", "sinx(x)"),
            ],
        ),
        (
            "polynomial_multiplication",
            ["-4*x**2 + 3*x*y - 1"],
            ["expand((x + 1)*x)", "N (x)", "1.5"],
        ),
        ("complex_arithmetic", ["4.0 - 7.0i", "(3+2j)"], ["nan", "nanj", "inf", "1e9"]),
        ("number_sorting", ["['-92.5', '3']", "[1, 2]"], ["[NaN, NaN]", '["nan"]']),
        ("polynomial_equations", ["-0.3, 1.0", "2", '""'], ["none", ",", "x = 2", "nan", "1, "]),
    ],
)
def test_scorers_that_evaluate_get_plain_answers_only(name, answers, refused):
    for answer in (*answers, *refused):
        assert (re.fullmatch(reasoning_gym.ALLOWED[name], answer) is None) == (answer in refused)


def test_patterns_of_answers_take_no_exponential_time():
    for pattern in reasoning_gym.ALLOWED.values():
        for part in ("(", "E**2", "1, ", "x**(2", "1" * 31, "sin(", " "):
            assert re.fullmatch(pattern, part * 2000 + "!") is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["--data.train=reasoning-gym:chain_sun:train:8"], "data.train: reasoning-gym:chain_sun"),
        (['--reward.functions=["reasoning_gym"]'], 'data_sources = ["reasoning-gym"]'),
    ],
)
def test_dry_run_names_what_is_wrong(stand_in, tmp_path, capsys, keys, said):
    recipe = str(REPOSITORY / "configs" / "quickstart.toml")
    assert main(["train", recipe, "--dry-run", f"--run.folder={tmp_path / 'run'}", *keys]) == 3
    message = capsys.readouterr().err
    assert said in message and "Traceback" not in message


def test_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('none here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="none here.*pip install -e '.\\[reasoning-gym\\]'"):
        list(reasoning_gym.rows("reasoning-gym:chain_sum:train:8"))


def test_process_that_makes_the_items_ends_with_the_reader(stand_in):
    """Catches a dry run that leaves a process behind for each source."""
    reader = reasoning_gym.rows("reasoning-gym:chain_sum:train:100000")
    assert len(list(islice(reader, 2))) == 2
    assert len(psutil.Process().children()) == 1
    reader.close()
    assert not psutil.Process().children()
