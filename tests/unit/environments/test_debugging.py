"""Messages for the author of an environment: its exceptions and its prints."""

import asyncio
import linecache
import re
from pathlib import Path

from megadapo.rollout.episodes.host import EpisodeHost
from tests.support.rollout import hostile_environments
from tests.support.rollout.hosts import config_of, task_of, turn_of

SOURCE = hostile_environments.__file__


def failures(log_folder: Path, *texts: str) -> list[str | None]:
    """Return the failure of one step of each text, each in an episode of its own."""

    async def play() -> list[str | None]:
        host = EpisodeHost([config_of("Obedient")], None, log_folder)
        try:
            await host.start()
            host.begin(0, "")
            found = []
            for number, text in enumerate(texts):
                await host.open(f"{number}", 0, task_of("a"))
                found.append((await host.step(f"{number}", 0, turn_of(text))).failure)
            return found
        finally:
            await host.stop()

    return asyncio.run(play())


def test_exception_names_the_users_line_that_it_passed_last(tmp_path):
    """Catches the line of a library, and one of megadapo's own files."""
    texts = ["raise no table", "parse {", "socket", "fail full"]
    raised, parsed, forbidden, failed = failures(tmp_path, *texts)
    sources = {raised: "raise ValueError(text)", parsed: "json.loads(text)", forbidden: "socket("}
    for failure, source in sources.items():
        name, line = re.search(r" \((\S+), line (\d+)\)$", failure).groups()
        assert name == Path(SOURCE).name
        assert source in linecache.getline(SOURCE, int(line))
    assert parsed.startswith("exception: JSONDecodeError: Expecting property name")
    assert failed == "failure: full"


def test_prints_of_an_environment_are_in_its_log(tmp_path):
    failures(tmp_path, "print many words", "say hello")
    assert "many words" in (tmp_path / "environment-Obedient.log").read_text()
