"""New rows are checked, unique and not held out, keep their origin, and survive a stop."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megadapo.data.prompts import load_prompts
from megadapo.errors import ConfigError, DataError, InfraError
from megadapo.rewards import served
from megadapo.rewards.rules import validate_ground_truth
from tests.support.processes.fake_server import FakeServer, Reply
from tests.support.tools import load_tool

TOOL = load_tool("transform_dataset")
PROBLEMS = {
    "What is six times seven?": "42",
    "What is 1/2 + 1/3?": "5/6",
    "What is 1/2+1/3": "5/6",
    "Find the root of 2 x = 1.": "1/2",
    "Prove that 1 + 1 = 2.": "proof",
    "Find x with 3 x = 1, which is impossible.": "1/3",
    "Find the half of one.": "1/2",
    "The held-out problem about a fair die and its mean.": "7/2",
}


def reply(prompt: str) -> str:
    rewrites = "Rewrite the problem" in prompt
    if "1/2 + 1/3" in prompt:
        if rewrites:
            return (
                "<problem>Let m/n = 1/2 + 1/3 in lowest terms. Find m + n.</problem>"
                "<answer>$11$</answer>"
            )
        return "5 + 6\nAnswer: 11"
    if rewrites and ("half of one" in prompt or "root of 2 x" in prompt):
        return "<problem>Let x be half of one. Find 2 x.</problem><answer>1</answer>"
    if "impossible" in prompt and rewrites:
        return "<problem>Find m + n for the impossible.</problem><answer>4</answer>"
    if "2 x" in prompt:
        return "Answer: 1"
    return "REFUSED: no" if rewrites else "Answer: 5"


class Address(FakeServer):
    """A server of the protocol that counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.failures: list[int] = []
        """Status codes of the next replies; 200 after them."""

    def answer(self, path: str, body: dict) -> Reply:
        prompt = body["messages"][0]["content"]
        self.asked[prompt] += 1
        if self.failures:
            return self.failures.pop(), {"error": "later"}
        return 200, {"choices": [{"message": {"content": reply(prompt)}}]}


@pytest.fixture
def address() -> Iterator[Address]:
    with Address() as address:
        yield address


def source(path: Path, problems: dict[str, str]) -> Path:
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"ground_truth": gold, "style": "rule"},
        }
        for text, gold in problems.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "FIRST_PAUSE_S", 0.001)


def run(folder: Path, address: Address, *words: str) -> int:
    held_out = source(
        folder / "held-out.jsonl", {"The HELD-OUT problem about a fair die, and its mean": "7/2"}
    )
    problems = source(folder / "problems.jsonl", PROBLEMS)
    return TOOL.main(
        [
            str(problems),
            str(folder / "integers.jsonl"),
            "--address",
            f"{address.url}/v1",
            "--model",
            "m",
        ]
        + ["--held-out", str(held_out), "--concurrency", "2", *words]
    )


def by_problem(path: Path) -> dict[str, dict]:
    return {row["extra_info"]["transformed_from"]["problem"]: row for row in lines(path)}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_checked_and_refusals_give_the_reason(tmp_path, address, capsys):
    assert run(tmp_path, address) == 0
    rows = by_problem(tmp_path / "integers.jsonl")
    assert rows["What is six times seven?"]["reward_model"]["ground_truth"] == "42"
    fraction = rows["What is 1/2 + 1/3?"]
    assert fraction["reward_model"]["ground_truth"] == "11"
    assert "Find m + n." in fraction["prompt"][0]["content"]
    origin = fraction["extra_info"]["transformed_from"]
    assert (origin["answer"], origin["method"], origin["num_agreed"]) == ("5/6", "rewritten", 4)
    assert origin["model"] == "m" and "problems.jsonl, line 2" in origin["place"]

    lost = by_problem(tmp_path / "integers.jsonl.refused.jsonl")
    refused = {problem: line["refusal"] for problem, line in lost.items()}
    assert refused["Prove that 1 + 1 = 2."] == "not rewritten"
    assert refused["Find x with 3 x = 1, which is impossible."].startswith("only 0 of 4")
    held_out = "The held-out problem about a fair die and its mean."
    assert refused[held_out] == "among the held-out problems"
    assert not any(held_out in prompt for prompt in address.asked)
    # two problems became the same one
    both = {"Find the half of one.", "Find the root of 2 x = 1."}
    assert len(both & rows.keys()) == 1
    assert [refused[text] for text in both & refused.keys()] == ["a duplicate"]
    assert rows.keys() | refused.keys() == PROBLEMS.keys() - {"What is 1/2+1/3"}
    assert "1 left out: seen before" in capsys.readouterr().out
    path = tmp_path / "integers.jsonl"
    prompts = load_prompts(str(path), check_gold=lambda gold, *_: validate_ground_truth(gold))
    assert len(prompts) == len(path.read_text().splitlines()) == len(rows)


def test_second_run_requests_and_writes_nothing_again(tmp_path, address):
    assert run(tmp_path, address) == 0
    path = tmp_path / "integers.jsonl"
    whole, asked = path.read_text(), address.asked.total()
    assert run(tmp_path, address) == 0
    assert path.read_text() == whole and address.asked.total() == asked
    path.write_text(whole[:-20])
    assert run(tmp_path, address) == 0
    assert {json.dumps(row, sort_keys=True) for row in lines(path)} == {
        json.dumps(json.loads(line), sort_keys=True) for line in whole.splitlines()
    }


def test_only_busy_addresses_are_retried(tmp_path, address, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    address.failures = [429, 503]
    assert run(tmp_path, address) == 0
    assert {key for _, key, _ in address.seen} == {"Bearer secret"}
    (tmp_path / "integers.jsonl").unlink()
    address.failures = [401] * 50
    assert run(tmp_path, address) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "401" in said and "secret" not in said
    address.failures = [500] * 50
    assert run(tmp_path, address) == InfraError.exit_code


def test_rows_that_become_held_out_are_removed(tmp_path, address):
    assert run(tmp_path, address) == 0
    more = source(
        tmp_path / "more.jsonl",
        {"What is six times seven?": "42", "Let m/n = 1/2+1/3 in lowest terms; find m+n": "11"},
    )
    asked = address.asked.total()
    assert run(tmp_path, address, "--held-out", str(more)) == 0
    kept = by_problem(tmp_path / "integers.jsonl").keys()
    taken = {"What is six times seven?", "What is 1/2 + 1/3?"}
    assert kept and not kept & taken
    lost = by_problem(tmp_path / "integers.jsonl.refused.jsonl")
    refused = {problem for problem, line in lost.items() if "held-out problems" in line["refusal"]}
    assert taken <= refused and address.asked.total() == asked


def test_finished_problems_are_written_although_another_one_failed(tmp_path):
    """All end at the same time; otherwise the next run would request the others again."""
    together = threading.Barrier(5)

    def transformer(problem: object) -> object:
        together.wait(timeout=20)
        if problem.id == "0":
            raise InfraError("gone")
        return TOOL.Transformed(problem=problem, text=f"p {problem.id}", answer="1")

    problems = [
        TOOL.Problem(id=str(number), text=f"t {number}", gold="1", data_source="test", place="")
        for number in range(5)
    ]
    output = TOOL.Output(path=tmp_path / "integers.jsonl", held_out=[], model="m", num_checks=1)
    with pytest.raises(InfraError, match="gone"):
        TOOL.transform(problems, transformer, output, concurrency=5)
    assert len(lines(tmp_path / "integers.jsonl")) == 4


def test_template_of_a_source_is_removed(tmp_path, address):
    template = "Solve this:\n{}\n\nEnd with Answer: and the integer."
    texts = [f"What is {n} plus {n} apples?\nShow {n} of them." for n in range(8)]
    problems = source(tmp_path / "p.jsonl", {template.format(text): "1" for text in texts})
    held_out = source(tmp_path / "h.jsonl", {"Find: " + texts[3]: "6"})
    words = ["--address", f"{address.url}/v1", "--model", "m", "--held-out", str(held_out)]
    assert TOOL.main([str(problems), str(tmp_path / "integers.jsonl"), *words]) == 0
    asked = {row["prompt"][0]["content"] for row in lines(tmp_path / "integers.jsonl")}
    assert asked == {TOOL.SOLVE.format(problem=text) for text in texts if text != texts[3]}


def test_invalid_arguments_and_foreign_files_are_refused(tmp_path, address):
    assert run(tmp_path, address, "--min-agreed", "5") == ConfigError.exit_code
    (tmp_path / "integers.jsonl").write_text('{"prompt": 3}\n')
    assert run(tmp_path, address) == DataError.exit_code
    assert (tmp_path / "integers.jsonl").read_text() == '{"prompt": 3}\n'


@pytest.mark.parametrize(
    ("text", "integer"),
    [("42", "42"), (" -7 ", "-7"), ("$1,000$", "1000"), ("007", "7"), ("+3", "3")]
    + [("3.0", None), ("5/6", None), ("", None), ("x", None), ("9" * 30, None), ("1e3", None)],
)
def test_integers_have_one_spelling(text, integer):
    assert TOOL.as_integer(text) == integer
