"""Commands through their own entry, in this process."""

from megadapo.cli import run_command


def convert(*words: object) -> int:
    """Exit status of `megadapo convert` with these words."""
    return run_command(["convert", *map(str, words)])
