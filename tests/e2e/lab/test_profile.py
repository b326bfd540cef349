"""`megadapo profile` on the real trainer ranks of a recipe."""

import json

import pytest

from tests.support.runs.whole_runs import megadapo


@pytest.mark.full
def test_step_is_profiled_on_its_ranks_and_traced_over_all_processes(tmp_path):
    trace = tmp_path / "trace.json"
    result = megadapo(
        *("profile", "configs/quickstart.toml"),
        *("--steps=1", "--sequences=8", f"--trace={trace}", "--trainer.tensor_parallel=2"),
        *("--rollout.num_engines=1", "--sampling.prompts_per_step=8"),
        "--algorithm.responses_per_mini_batch=32",
        timeout=300,
    )
    assert "tokens on 2 ranks" in result.stdout
    assert "model TFLOP/s per rank" in result.stdout
    for row in (
        "gradients ",
        "backward attention ",
        "optimizer ",
        "aten::mm",
        "_PolicyHeadFunction",
        "_RMSNormFunction",
        "roofline measured here",
    ):
        assert row in result.stdout, result.stdout
    assert not list(tmp_path.glob("*.parts"))
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(rows) == ["driver", "trainer rank 0", "trainer rank 1", "engine 0"]
    # work of other processes is within the driver's phase
    for rank in (0, 1):
        start, end = phase(events, "megadapo::train")
        updates = [e for e in events if e["pid"] == rows[f"trainer rank {rank}"] and is_ours(e)]
        assert {"megadapo::mlp", "megadapo::head rows"} <= {e["name"] for e in updates}
        assert all(start <= e["ts"] and e["ts"] + e["dur"] <= end for e in updates)
    start, end = phase(events, "megadapo::rollout")
    steps = [e for e in events if e["pid"] == rows["engine 0"] and e["name"].startswith("execute_")]
    assert steps and all(start <= e["ts"] <= end for e in steps)


def phase(events: list[dict], name: str) -> tuple[float, float]:
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == 0 and e["name"] == name]
    return min(span[0] for span in spans), max(span[1] for span in spans)


def is_ours(event: dict) -> bool:
    return event["ph"] == "X" and event["name"].startswith("megadapo::")
