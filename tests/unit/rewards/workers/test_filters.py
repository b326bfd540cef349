"""The tables of the seccomp filter and of Landlock: numbers and layouts are the kernel's."""

import re
from pathlib import Path

import pytest

from megadapo.rewards.workers import landlock, seccomp


def test_numbers_of_system_calls_are_those_of_the_kernel() -> None:
    """A wrong number would leave a call open and deny another one."""
    headers = {
        0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        1: Path("/usr/include/asm-generic/unistd.h"),
    }
    known = seccomp._SYSTEM_CALLS | seccomp._DENIED_ALONE | seccomp._CHECKED | seccomp._SELF_ONLY
    for index, header in headers.items():
        if not header.exists():
            pytest.skip("needs the kernel's headers")
        defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
        numbers = {name: int(number) for name, number in defined}
        assert {name: numbers.get(name) for name in known} == {
            name: both[index] for name, both in known.items()
        }
        later = [name for name, number in numbers.items() if number >= seccomp._FIRST_UNKNOWN]
        assert not set(later) & set(known)


def test_landlock_handles_all_that_a_kernel_can() -> None:
    """Accesses that a ruleset does not handle stay allowed; unknown bits are refused."""
    assert landlock.ruleset(3) == b"\xff\x7f" + bytes(6)
    assert landlock.ruleset(4) == b"\xff\x7f" + bytes(6) + b"\x03" + bytes(7)
    assert landlock.ruleset(5) == b"\xff\xff" + bytes(6) + b"\x03" + bytes(7)
    assert landlock.ruleset(7) == b"\xff\xff" + bytes(6) + (b"\x03" + bytes(7)) * 2
