"""Ranges of layers in a profile: all there, nested, without effect, and told apart by rank."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from megadapo.lab.profiling.trace import TracePart, merge_traces
from megadapo.trainer.types import UpdateResult
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.probes import build, train, update

HEAD = {"head logits", "head rows", "head d_hidden", "head d_weight"}
PASSES = {"logprobs", "gradients", "optimizer"}


def profiled_update(rendezvous, settings, batch, folder: Path) -> UpdateResult:
    """Leaves rank-N.json, a trace of each rank, in the folder."""
    import torch

    from megadapo.trainer.model.layer_ranges import layer_ranges

    def num_hooks() -> int:
        # torch has no public count of what a module calls
        modules = [module for chunk in rank.chunks for module in chunk.modules()]
        return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules)

    rank = build(rendezvous, settings)
    before = num_hooks()
    with layer_ranges(rank.chunks), torch.profiler.profile() as profile:
        result = update(rank, batch, step=1)
    assert num_hooks() == before, "ranges cost something after they have ended"
    profile.export_chrome_trace(str(folder / f"rank-{rendezvous.rank}.json"))
    return result


@pytest.mark.parametrize(
    ("model", "layout", "mlp"),
    [
        ("qwen2-untied", {"pipeline": 2, "recompute": "full"}, "mlp"),
        pytest.param("qwen3-moe", {"data": 2, "expert": 2}, "experts", marks=pytest.mark.full),
    ],
    ids=["stages", "experts"],
)
def test_trace_has_layers_and_head_passes_of_all_ranks(ranks, tmp_path, model, layout, mlp):
    batch = random_batch(RAGGED, num_mini_batches=2)
    layout = {"tokens_per_micro_batch": 10_000, **layout}
    plain = [results for (results,), _ in ranks.on(model, train, batch, 1, **layout)]
    profiled = ranks.on(model, profiled_update, batch, tmp_path, **layout)
    assert [one.metrics for one in profiled] == plain

    parts = [TracePart(name=f"rank {r}", file=tmp_path / f"rank-{r}.json") for r in range(2)]
    merge_traces(parts, tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert rows == {0: "rank 0", 1: "rank 1"}
    ours = [e for e in events if e["ph"] == "X" and e["name"].startswith("megadapo::")]
    assert nest(ours)
    found = Counter((e["pid"], e["name"].removeprefix("megadapo::")) for e in ours)
    kinds = {"norm", "attention", mlp, *(f"backward {k}" for k in ("norm", "attention", mlp))}
    has_stages = "pipeline" in layout
    for rank in range(2):
        names = {name for owner, name in found if owner == rank}
        assert names >= kinds | PASSES
        assert ("embedding" in names) == (not has_stages or rank == 0)
        assert (names >= HEAD) == (not has_stages or rank == 1)
    if has_stages:
        # one layer a stage: for each mini-batch the old log-probs, the forward pass, and that again
        # for the backward pass
        assert found[0, "attention"] == 6 and found[0, "backward attention"] == 2


def nest(ranges: list[dict]) -> bool:
    """Return whether the ranges of each thread nest or are disjoint."""
    by_thread = defaultdict(list)
    for one in ranges:
        by_thread[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for spans in by_thread.values():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if open_ends and end > open_ends[-1] + 0.002:
                return False
            open_ends.append(end)
    return True
