"""Rewrite problems so that their answers are integers, which a rule can score reliably.

DAPO made its training data this way (arXiv 2503.14476, section 3.5). A model behind an
OpenAI-compatible address rewrites each problem, then solves the rewritten one k times. A rewritten
problem is kept if enough solutions agree with the new answer. Any model that vLLM serves will do:

    vllm serve MODEL --host 127.0.0.1 --port 8000
    python tools/transform_dataset.py problems.parquet integers.jsonl \\
        --address http://127.0.0.1:8000/v1 --model MODEL --held-out aime-2024.parquet

Refused problems and the reasons are in OUTPUT.refused.jsonl. Both files name each problem's origin,
so that the same command can continue after a stop. The key is read from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from megadapo.data.overlap import LINE, ProblemIndex, normalised, without_template
from megadapo.data.rows import Row
from megadapo.data.sources import read_rows
from megadapo.errors import ConfigError, DataError, InfraError, MegadapoError
from megadapo.observe.files import append_line, replace_text
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
"""Retries of a request, over about ten seconds, before the program ends with an error."""
MIN_IN_TEMPLATE = 8
"""Minimum of different problems with common first or last lines that count as a template."""
MAX_REPLY = 2000
"""Limit of a reply in the refusals, in characters."""
HELD_OUT = "among the held-out problems"

_PROBLEM = re.compile(r"<problem>(.*?)</problem>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,18}")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of the source, without its template."""

    id: str
    text: str
    gold: str
    data_source: str
    place: str

    @classmethod
    def of(cls, row: Row, text: str) -> Problem:
        """Return a row's problem; `text` is its question without the template."""
        question, gold = row.messages[-1][1], str(row.ground_truth)
        digest = hashlib.sha256(json.dumps([row.data_source, question, gold]).encode()).hexdigest()
        return cls(
            id=digest[:16], text=text, gold=gold, data_source=row.data_source, place=row.place
        )


def read_problems(source: str) -> list[Problem]:
    """Read a source; remove the lines that all problems of a data_source share."""
    by_source: dict[str, list[Row]] = {}
    for row in read_rows(source):
        by_source.setdefault(row.data_source, []).append(row)
    problems = []
    for rows in by_source.values():
        texts = [row.messages[-1][1] for row in rows]
        bare = without_template(texts, LINE, min_texts=MIN_IN_TEMPLATE)
        problems += [Problem.of(row, text.strip()) for row, text in zip(rows, bare, strict=True)]
    return problems


@dataclass(frozen=True, kw_only=True)
class Transformed:
    """The result for a problem: a new row, or the reason of a refusal."""

    problem: Problem
    text: str = ""
    answer: str = ""
    method: str = ""
    num_agreed: int = 0
    refusal: str | None = None
    reply: str = ""
    """Reply of the model, if that is the reason of the refusal."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A model that rewrites problems and solves the rewritten ones."""

    client: Client
    model: str
    max_tokens: int
    num_checks: int
    min_agreed: int

    def __call__(self, problem: Problem) -> Transformed:
        if (gold := as_integer(problem.gold)) is not None:
            return Transformed(problem=problem, text=problem.text, answer=gold, method="unchanged")
        reply = self._chat(REWRITE.format(problem=problem.text, answer=problem.gold))
        texts, answers = _PROBLEM.findall(reply), _ANSWER.findall(reply)
        answer = as_integer(answers[-1]) if answers else None
        if not texts or not texts[-1].strip() or answer is None:
            return Transformed(problem=problem, refusal="not rewritten", reply=reply)
        text = texts[-1].strip()
        if normalised(text) == normalised(problem.text):
            return Transformed(problem=problem, refusal="not changed", reply=reply)
        solutions = [self._chat(SOLVE.format(problem=text)) for _ in range(self.num_checks)]
        agreed = sum(bool(score(solution, answer).correct) for solution in solutions)
        if agreed < self.min_agreed:
            reason = f"only {agreed} of {self.num_checks} solutions agree with {answer}"
            return Transformed(
                problem=problem, text=text, num_agreed=agreed, refusal=reason, reply=reply
            )
        return Transformed(
            problem=problem, text=text, answer=answer, method="rewritten", num_agreed=agreed
        )

    def _chat(self, prompt: str) -> str:
        """Return one sampled reply.

        Raises:
            ConfigError: the address refuses the request.
            InfraError: the address does not answer, or not in the protocol's form.
        """
        try:
            reply, _ = self.client.chat(
                prompt, model=self.model, temperature=TEMPERATURE, max_tokens=self.max_tokens
            )
        except NoAnswer as error:
            kind = ConfigError if error.is_refused else InfraError
            raise kind(str(error)) from None
        return reply


@dataclass
class Output:
    """The file of rows and the file of refusals."""

    path: Path
    held_out: list[str]
    """Problems that must not be trained on."""
    model: str
    num_checks: int
    done: set[str] = field(default_factory=set)
    """Ids of finished problems."""
    keys: set[str] = field(default_factory=set)
    """Normalised texts of the rows."""
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.refused_path = self.path.with_name(f"{self.path.name}.refused.jsonl")
        self._held_out = ProblemIndex(self.held_out, without_template(self.held_out))

    def is_held_out(self, text: str) -> bool:
        """Return whether a problem is held out, or contains a held-out one, or is part of one."""
        return bool(self._held_out.copies_of(text, text))

    def open(self) -> None:
        """Read an earlier run's files; drop an incomplete last line.

        Rows of problems that are held out now become refusals.

        Raises:
            DataError: a file has other contents.
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
                if path == self.path and any(map(self.is_held_out, texts)):
                    # first the refusal: after a kill the row is in both files, and removed again
                    self._refuse(HELD_OUT, origin | {"rewritten": ""})
                    kept = [other for other in _read_whole_lines(path) if other != entry]
                    replace_text(path, "".join(json.dumps(other) + "\n" for other in kept))

    def _refuse(self, refusal: str, origin: dict[str, Any], reply: str = "") -> None:
        entry = {"refusal": refusal, "extra_info": {"transformed_from": origin}}
        if reply:
            entry["reply"] = reply[:MAX_REPLY]
        append_line(self.refused_path, json.dumps(entry) + "\n")
        kind = "solutions do not agree" if refusal.startswith("only") else refusal
        self.counts[f"refused: {kind}"] += 1

    def write(self, found: Transformed) -> None:
        """Append a row or a refusal, and flush it to disk."""
        problem, key = found.problem, normalised(found.text)
        refusal = found.refusal
        if refusal is None and self.is_held_out(found.text):
            refusal = HELD_OUT
        elif refusal is None and key in self.keys:
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
            self._refuse(refusal, origin, found.reply)
            return
        self.keys.add(key)
        row = {  # in the schema of DAPO-Math-17k
            "data_source": problem.data_source,
            "prompt": [{"role": "user", "content": SOLVE.format(problem=found.text)}],
            "ability": "MATH",
            "reward_model": {"style": "rule", "ground_truth": found.answer},
            "extra_info": {"index": problem.id, "transformed_from": origin},
        }
        append_line(self.path, json.dumps(row) + "\n")
        self.counts[found.method] += 1


def transform(
    problems: Iterable[Problem],
    transformer: Callable[[Problem], Transformed],
    output: Output,
    *,
    concurrency: int,
) -> Counter[str]:
    """Transform unfinished problems, several at a time, and return the counts of results.

    Raises:
        MegadapoError: the address cannot be used; finished problems are written.
    """
    unfinished, lock = list(_unfinished(problems, output)), Lock()

    def work(problem: Problem) -> None:
        found = transformer(problem)
        with lock:
            output.write(found)

    with ThreadPoolExecutor(concurrency) as executor:
        try:
            for future in as_completed([executor.submit(work, one) for one in unfinished]):
                future.result()
        finally:
            executor.shutdown(cancel_futures=True)
    return output.counts


def _unfinished(problems: Iterable[Problem], output: Output) -> Iterator[Problem]:
    """Yield each unfinished problem once, without held-out ones."""
    seen: set[str] = set()
    for problem in problems:
        key = normalised(problem.text)
        if key in seen:
            output.counts["left out: seen before"] += 1
        elif problem.id in output.done:
            output.counts["done before"] += 1
        elif output.is_held_out(problem.text):
            output.write(Transformed(problem=problem, refusal=HELD_OUT))
        else:
            yield problem
        seen.add(key)


def as_integer(text: str) -> str | None:
    """Return an integer in its usual form, or None for other texts."""
    plain = text.strip().strip("$").replace(",", "").replace("\u2212", "-")
    return str(int(plain)) if _INTEGER.fullmatch(plain) else None


def _read_whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file without an incomplete last line, which is removed from it."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Transform a data set; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="parquet or JSONL file, folder, or Hub dataset")
    parser.add_argument("output", type=Path, help="JSONL file to write or to continue")
    parser.add_argument("--address", required=True, help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="its name at the address")
    parser.add_argument("--held-out", action="append", default=[], metavar="SOURCE")
    parser.add_argument("--checks", type=int, default=4, help="solutions per problem (default 4)")
    parser.add_argument("--min-agreed", type=int, default=2, help="that must agree (default 2)")
    parser.add_argument("--concurrency", type=int, default=32, help="problems at a time")
    parser.add_argument("--max-tokens", type=int, default=8192, help="limit of a reply")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="limit of a reply")
    try:
        return _run(parser.parse_args(argv))
    except MegadapoError as error:
        print(f"transform_dataset: {error}", file=sys.stderr)
        return error.exit_code


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
    transformer = Transformer(
        client=client,
        model=arguments.model,
        max_tokens=arguments.max_tokens,
        num_checks=arguments.checks,
        min_agreed=arguments.min_agreed,
    )
    output = Output(
        path=arguments.output,
        held_out=[one.text for source in arguments.held_out for one in read_problems(source)],
        model=arguments.model,
        num_checks=arguments.checks,
    )
    output.open()
    problems = read_problems(arguments.source)
    counts = transform(problems, transformer, output, concurrency=arguments.concurrency)
    for result, count in sorted(counts.items()):
        print(f"{count:>8,} {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
