"""The benchmark of the driver's work on a step."""

import json

from driver import LONGEST, main, make_groups

PARTS = ["shaped rewards", "advantages", "loss weights", "pack", "reflection phrases", "all"]


def test_table_and_record_have_every_part(tmp_path, capsys):
    file = tmp_path / "driver.json"
    size = ["--groups", "32", "--responses", "16", "--tokens", "20", "--steps", "2"]
    assert main([*size, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in PARTS)
    record = json.loads(file.read_text())
    assert [list(step) for step in record["steps"]] == [PARTS] * 2
    assert record["size"]["groups"] == 32 and record["size"]["tokens"] > 0


def test_groups_have_the_mean_length_and_a_long_tail():
    """Equal lengths would hide the cost of ragged arrays."""
    groups = make_groups(64, 16, 5000)
    lengths = [length for group in groups for length in group.lengths]
    assert 4500 < sum(lengths) / len(lengths) < 5500
    assert min(lengths) < 1000 and 15_000 < max(lengths) <= LONGEST
    assert all(0 < sum(group.correct) < 16 for group in groups)
