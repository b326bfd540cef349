"""Rewrite problems so that their answers are integers, which a rule can score without doubt.

DAPO made its training data in this way (arXiv 2503.14476, section 3.5). A model behind an
OpenAI-compatible address rewrites each problem, and solves the rewritten one again k times: only
where enough solutions agree with the new answer it is kept. Any model that vLLM serves will do:

    vllm serve MODEL --host 127.0.0.1 --port 8000
    python tools/transform_dataset.py problems.parquet integers.jsonl \\
        --address http://127.0.0.1:8000/v1 --model MODEL --held-out aime-2024.parquet

What is refused goes to OUTPUT.refused.jsonl with its reason. Both files name each problem's origin,
so that the same command goes on where it was stopped. A key is read from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadapo.data.overlap import LINE, Problems, normalised, without_template
from megadapo.data.sources import Row, read_rows
from megadapo.errors import ConfigError, DataError, InfraError, MegadapoError
from megadapo.rewards.dapo_math import score
from megadapo.rewards.served import Client, NoAnswer

REWRITE = """\
Below is a mathematical problem with its answer. Rewrite the problem so that its answer is one
integer, and change nothing else. Ask for a combination of the answer's parts, such as m + n where
the answer is the fraction m/n in lowest terms, or a + b + c where it is a + b sqrt(c), and say in
the problem what these parts are. If that cannot be done, or if the problem asks for a proof or
needs a figure, reply with REFUSED and the reason.

Reply with exactly this:
<problem>the whole rewritten problem</problem>
<answer>the integer</answer>

Problem:
{problem}

Answer:
{answer}
"""
SOLVE = """\
Solve the problem step by step. The last line of your response must be "Answer: " followed by the
integer.

{problem}
"""
TEMPERATURE = 1.0
RETRIES = 6
"""Of one request, over about ten seconds, before an address that does not answer, or is too busy,
ends the program."""
MIN_IN_TEMPLATE = 8
"""Different problems that all begin or end with the same lines: those are a template."""

HELD_OUT = "among the held-out problems"

_PROBLEM = re.compile(r"<problem>(.*?)</problem>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,18}")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem as its source has it, without the template of that."""

    id: str
    text: str
    gold: str
    data_source: str
    place: str

    @classmethod
    def of(cls, row: Row, text: str) -> Problem:
        """`text`: what the row asks, without its template."""
        asked, gold = row.messages[-1][1], str(row.ground_truth)
        digest = hashlib.sha256(json.dumps([row.data_source, asked, gold]).encode()).hexdigest()
        return cls(
            id=digest[:16], text=text, gold=gold, data_source=row.data_source, place=row.place
        )


def read_problems(source: str) -> list[Problem]:
    """Read a source; lines that all of a data_source's problems share are no part of them."""
    of_source: dict[str, list[Row]] = {}
    for row in read_rows(source):
        of_source.setdefault(row.data_source, []).append(row)
    found = []
    for rows in of_source.values():
        texts = [row.messages[-1][1] for row in rows]
        bare = without_template(texts, LINE, min_texts=MIN_IN_TEMPLATE)
        found += [Problem.of(row, text.strip()) for row, text in zip(rows, bare, strict=True)]
    return found


@dataclass(frozen=True, kw_only=True)
class Transformed:
    """What became of a problem: a row of the new data, or a reason why there is none."""

    problem: Problem
    text: str = ""
    answer: str = ""
    method: str = ""
    num_agreed: int = 0
    refusal: str | None = None
    reply: str = ""
    """Of the model, where it was refused for that."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model behind an OpenAI-compatible address."""

    client: Client
    name: str
    max_tokens: int

    def ask(self, prompt: str) -> str:
        """Return one sampled reply.

        Raises:
            ConfigError: the address refuses the request.
            InfraError: it does not answer, or not with what such an address answers.
        """
        try:
            reply, _ = self.client.chat(
                prompt, model=self.name, temperature=TEMPERATURE, max_tokens=self.max_tokens
            )
        except NoAnswer as error:
            kind = ConfigError if error.is_refused else InfraError
            raise kind(str(error)) from None
        return reply


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Rewrites problems, and checks what was rewritten."""

    model: Model
    num_checks: int
    min_agreed: int

    def __call__(self, problem: Problem) -> Transformed:
        if (gold := _integer(problem.gold)) is not None:
            return Transformed(problem=problem, text=problem.text, answer=gold, method="unchanged")
        reply = self.model.ask(REWRITE.format(problem=problem.text, answer=problem.gold))
        texts, answers = _PROBLEM.findall(reply), _ANSWER.findall(reply)
        answer = _integer(answers[-1]) if answers else None
        if not texts or not texts[-1].strip() or answer is None:
            return Transformed(problem=problem, refusal="not rewritten", reply=reply)
        text = texts[-1].strip()
        if normalised(text) == normalised(problem.text):
            return Transformed(problem=problem, refusal="not changed", reply=reply)
        solutions = [self.model.ask(SOLVE.format(problem=text)) for _ in range(self.num_checks)]
        agreed = sum(score(solution, answer).correct for solution in solutions)
        if agreed < self.min_agreed:
            why = f"only {agreed} of {self.num_checks} solutions agree with {answer}"
            return Transformed(
                problem=problem, text=text, num_agreed=agreed, refusal=why, reply=reply
            )
        return Transformed(
            problem=problem, text=text, answer=answer, method="rewritten", num_agreed=agreed
        )


class HeldOut:
    """Problems that must not be trained on."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._problems = Problems(texts, without_template(texts))

    def has(self, text: str) -> bool:
        """Whether a problem is one of them, or one lies within the other."""
        return bool(self._problems.copies_of(text, text))


@dataclass
class Output:
    """The two files, and what is in them."""

    path: Path
    model: str
    num_checks: int
    done: set[str] = field(default_factory=set)
    """Problems that need not be asked again."""
    keys: set[str] = field(default_factory=set)
    """Normalised texts of the rows."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def refused_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.refused.jsonl")

    def open(self, held_out: HeldOut) -> None:
        """Take over what an earlier run wrote; a line that was cut off is dropped.

        Rows of problems that are held out by now become refusals.

        Raises:
            DataError: a file holds something else.
        """
        for path in (self.path, self.refused_path):
            for entry in list(_read_whole_lines(path)):
                try:
                    origin = entry["extra_info"]["transformed_from"]
                    self.done.add(origin["id"])
                    texts = origin["problem"], origin["rewritten"]
                except (LookupError, TypeError):
                    raise DataError(f"{path} holds rows of another program") from None
                self.keys.add(normalised(origin["rewritten"]))
                if path == self.path and any(map(held_out.has, texts)):
                    self._take_back(entry, origin)

    def _take_back(self, entry: dict[str, Any], origin: dict[str, Any]) -> None:
        """Make a refusal of a row."""
        # this one first: a row that is in both files after a kill is taken back again
        self._refuse(HELD_OUT, origin | {"rewritten": ""})
        kept = [other for other in _read_whole_lines(self.path) if other != entry]
        beside = self.path.with_name(f"{self.path.name}.partial")
        beside.write_text("".join(json.dumps(other) + "\n" for other in kept), encoding="utf-8")
        beside.replace(self.path)

    def _refuse(self, refusal: str, origin: dict[str, Any], **reply: str) -> None:
        entry = {"refusal": refusal, "extra_info": {"transformed_from": origin}, **reply}
        _append(self.refused_path, entry)
        self.counts[f"refused: {_kind(refusal)}"] += 1

    def write(self, found: Transformed) -> None:
        """Append a row or a refusal; it is on the disk when this returns."""
        problem, key = found.problem, normalised(found.text)
        refusal = found.refusal
        if refusal is None and key in self.keys:
            refusal = "a duplicate"
        origin = {
            "id": problem.id,
            "place": problem.place,
            "problem": problem.text,
            "answer": problem.gold,
            "method": found.method,
            "rewritten": "" if refusal else found.text,
            "model": self.model,
            "num_checks": self.num_checks,
            "num_agreed": found.num_agreed,
        }
        if refusal is not None:
            self._refuse(refusal, origin, **({"reply": found.reply[:2000]} if found.reply else {}))
            return
        self.keys.add(key)
        _append(self.path, _row(problem, found, origin))
        self.counts[found.method] += 1


def transform(
    problems: Iterable[Problem],
    transformer: Transformer,
    output: Output,
    held_out: HeldOut,
    *,
    concurrency: int,
) -> Counter[str]:
    """Transform what is not done yet, several problems at a time, and return what became of them.

    Raises:
        MegadapoError: the address cannot be used; what was finished is written.
    """
    open_futures: set[Future[Transformed]] = set()
    with ThreadPoolExecutor(concurrency) as executor:
        try:
            for problem in _new(problems, output, held_out):
                open_futures.add(executor.submit(transformer, problem))
                if len(open_futures) >= 2 * concurrency:
                    open_futures = _write_finished(open_futures, output, held_out)
            while open_futures:
                open_futures = _write_finished(open_futures, output, held_out)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
    return output.counts


def _new(problems: Iterable[Problem], output: Output, held_out: HeldOut) -> Iterator[Problem]:
    """Problems to be asked: each once, and none that is held out."""
    seen: set[str] = set()
    for problem in problems:
        key = normalised(problem.text)
        if key in seen:
            output.counts["left out: seen before"] += 1
        elif problem.id in output.done:
            output.counts["done before"] += 1
        elif held_out.has(problem.text):
            output.write(Transformed(problem=problem, refusal=HELD_OUT))
        else:
            yield problem
        seen.add(key)


def _write_finished(
    futures: set[Future[Transformed]], output: Output, held_out: HeldOut
) -> set[Future[Transformed]]:
    """Wait for one or more, write them, and return the others.

    Raises:
        MegadapoError: one of them failed; the others are written.
    """
    done, others = wait(futures, return_when=FIRST_COMPLETED)
    # those that failed last
    for future in sorted(done, key=lambda one: one.exception() is not None):
        found = future.result()
        if found.refusal is None and held_out.has(found.text):
            found = Transformed(problem=found.problem, refusal=HELD_OUT)
        output.write(found)
    return others


def _row(problem: Problem, found: Transformed, origin: dict[str, Any]) -> dict[str, Any]:
    """A row in the schema of DAPO-Math-17k."""
    return {
        "data_source": problem.data_source,
        "prompt": [{"role": "user", "content": SOLVE.format(problem=found.text)}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": found.answer},
        "extra_info": {"index": problem.id, "transformed_from": origin},
    }


def _integer(text: str) -> str | None:
    """An integer as it is always written; None where the text is none."""
    plain = text.strip().strip("$").replace(",", "").replace("\u2212", "-")
    return str(int(plain)) if _INTEGER.fullmatch(plain) else None


def _kind(refusal: str) -> str:
    return "solutions do not agree" if refusal.startswith("only") else refusal


def _read_whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from None


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Transform a data set; return the exit code."""
    try:
        return _run(_parser().parse_args(argv))
    except MegadapoError as error:
        print(f"transform_dataset: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="parquet or JSONL file, folder, or Hub dataset")
    parser.add_argument("output", type=Path, help="JSONL to write, or to go on with")
    parser.add_argument("--address", required=True, help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="its name at the address")
    parser.add_argument("--held-out", action="append", default=[], metavar="SOURCE")
    parser.add_argument("--checks", type=int, default=4, help="solutions of each (default 4)")
    parser.add_argument("--min-agreed", type=int, default=2, help="that must agree (default 2)")
    parser.add_argument("--concurrency", type=int, default=32, help="problems at a time")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a reply")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of a reply")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.min_agreed <= arguments.checks:
        raise ConfigError("--min-agreed must be from 1 to --checks")
    if arguments.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1")
    if not arguments.address.startswith(("http://", "https://")):
        raise ConfigError(f"--address {arguments.address}: expected http:// or https://")
    client = Client(
        f"{arguments.address.rstrip('/')}/chat/completions",
        retries=RETRIES,
        request_timeout_s=arguments.timeout_s,
        key_variable="OPENAI_API_KEY",
    )
    model = Model(client=client, name=arguments.model, max_tokens=arguments.max_tokens)
    output = Output(path=arguments.output, model=model.name, num_checks=arguments.checks)
    held_out = HeldOut(
        [problem.text for source in arguments.held_out for problem in read_problems(source)]
    )
    output.open(held_out)
    counts = transform(
        read_problems(arguments.source),
        Transformer(model=model, num_checks=arguments.checks, min_agreed=arguments.min_agreed),
        output,
        held_out,
        concurrency=arguments.concurrency,
    )
    for what, count in sorted(counts.items()):
        print(f"{count:>8,} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
