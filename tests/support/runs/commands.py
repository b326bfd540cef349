"""Commands through their own entry, in this process."""

from megadapo.cli import run_command


def convert(*words: object) -> int:
    return run_command(["convert", *map(str, words)])
