"""The script for the first GPU: its parts without one, their limits, and what it chooses to run."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megadapo.cluster.machine import Gpu, inspect_machine
from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.metrics.records import MetricsLog
from tests.support import REPOSITORY

SCRIPT = REPOSITORY / "tools" / "first_gpu.sh"
H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_gib=79.6, compute_capability=(9, 0))


@pytest.fixture
def tool(monkeypatch) -> SimpleNamespace:
    """The modules beside the script."""
    monkeypatch.syspath_prepend(str(SCRIPT.with_suffix("")))
    monkeypatch.chdir(REPOSITORY)
    names = ("parts", "runner", "gpu_report")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=1500,
        env=os.environ | {"PATH": path},
    )


def parts_on_gpu(tool: SimpleNamespace, folder: Path, memory_gib: float, **more: str) -> dict:
    machine = replace(inspect_machine(), gpus=(H100,), memory_gib=memory_gib)
    setting = tool.parts.Setting(folder=folder, machine=machine, rehearses=False, **more)
    return {part.name: part for part in tool.parts.all_parts(setting)}


@pytest.mark.skipif(inspect_machine().uses_cuda, reason="needs a machine without CUDA")
def test_earlier_results_and_a_machine_without_gpu_are_refused(tool, tmp_path, monkeypatch, capsys):
    """Results would be overwritten, or each part would fail for itself."""
    cases = {"name another folder": ["--rehearse", tmp_path], "--rehearse": [tmp_path / "results"]}
    for says, arguments in cases.items():
        monkeypatch.setattr(sys, "argv", ["first_gpu.sh", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            tool.runner.main()
        assert ended.value.code == 2 and says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_largest_model_depends_on_main_memory_and_disk(tool, tmp_path, monkeypatch):
    in_main_memory = "largest 7B optimizer in main memory"
    disk = SimpleNamespace(free=2**40, total=2**40)
    monkeypatch.setattr(tool.parts.shutil, "disk_usage", lambda folder: disk)
    small, large = (parts_on_gpu(tool, tmp_path, memory) for memory in (128, 512))
    disk.free = 2**30
    assert "GiB of disk" in parts_on_gpu(tool, tmp_path, 512)["largest 3B"].skipped
    assert small[in_main_memory].skipped.startswith("needs ")
    assert large[in_main_memory].skipped is small["largest 3B"].skipped is None
    assert "exceed" in large["largest 7B"].skipped


def test_first_save_does_not_fit_beside_a_waking_engine(tool, tmp_path):
    """With room for the optimizer the part would pass without putting the engine to sleep."""
    part = parts_on_gpu(tool, tmp_path, 512)["kill and resume"]
    config = tool.parts.config_of(part.overrides)
    models = tool.parts.models_of(config)
    card = tool.parts.card_of(H100.name)
    (kind,) = tool.parts.gpu_kinds(config, models, card)
    totals = {phase.name: phase.total for phase in kind.phases}
    optimizer = max(phase.items.get("optimizer", 0) for phase in kind.phases)
    free = card.memory_bytes - totals["rollout"]
    assert 0.3 * optimizer < free < 0.7 * optimizer
    assert max(totals.values()) < card.memory_bytes


def test_real_recipe_needs_its_model_and_trl_an_environment(tool, tmp_path, monkeypatch):
    """Without a network the part would use up its time on retries of a download."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parts = parts_on_gpu(tool, tmp_path / "without", 512)
    assert "fetch_smollm2.py" in parts["real"].skipped
    assert "--trl-python" in parts["real beside TRL"].skipped
    tool.parts.cached_model().mkdir(parents=True)
    monkeypatch.setattr(tool.parts, "find_spec", lambda name: object())
    parts = parts_on_gpu(tool, tmp_path / "with", 512, trl_python="/trl/bin/python")
    assert parts["real"].skipped is parts["real beside TRL"].skipped is None
    # TRL would train on the CPU beside our GPU
    assert "--trl=use_cpu=false" in parts["real beside TRL"].command
    # the recipe's own keys, so that a renamed one is noticed
    words = [word for word in parts["real"].command if re.match("--[a-z]+[.]", word)]
    tool.parts.load_config(tool.parts.REAL_RECIPE, [word[2:] for word in words])


def test_recipes_bounds_are_those_of_a_gpu(tool, tmp_path):
    """A CPU's bound on the mean ended every run in bf16 after its first step."""
    parts = parts_on_gpu(tool, tmp_path, 512)
    for name, least in (("bf16", 0.1), ("largest 3B", 0.1)):
        bounds = tool.parts.config_of(parts[name].overrides).oracles
        assert bounds.logprob_abs_mean >= least and bounds.logprob_abs_max >= 0.1
    assert "--oracles.logprob_abs_mean=1e-3" in parts["real"].command


@pytest.mark.parametrize(
    ("densities", "result"), [([None, None], "failed"), ([0.4], "failed"), ([None, 0.02], "passed")]
)
def test_delta_part_fails_if_all_updates_were_full(tool, tmp_path, densities, result):
    """With a large learning rate every update was sent in full, and the part passed."""
    steps = ({"step": n, "weights/density": one} for n, one in enumerate(densities, start=1))
    lines = [json.dumps(step) + "\n" for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    part = tool.parts.Part(name="delta", limit_s=1, command=(), run=tmp_path)
    outcome = tool.parts.Outcome(part=part)
    tool.runner.check_deltas(outcome)
    assert outcome.result == result and outcome.reason


@pytest.mark.parametrize("change", ["nan", "unpublished", "torn"])
def test_odd_metrics_of_a_part_do_not_end_the_script(tool, tmp_path, monkeypatch, change):
    """A NaN, an update that was never sent or a torn line ended it, and all later parts."""
    values = {
        "nan": {"parity/logprob_abs_max": float("nan")},
        "unpublished": {"weights/bytes": None, "time/train_s": None},
        "torn": {},
    }[change]
    with MetricsLog(tmp_path / "run") as log:
        log.record({**dict.fromkeys(METRIC_NAMES, 0.5), "step": 1, **values})
    if change == "torn":
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "po')
    parts = [
        tool.parts.Part(name=name, limit_s=9, command=(sys.executable, "-c", "pass"), **more)
        for name, more in (("odd", {"run": tmp_path / "run"}), ("next", {}))
    ]
    monkeypatch.setattr(tool.runner, "all_parts", lambda setting: parts)
    monkeypatch.setattr(sys, "argv", ["first_gpu.sh", "--rehearse", str(tmp_path / "all")])
    assert tool.runner.main() == 0
    report = (tmp_path / "all" / "results" / "report.md").read_text()
    assert report.count("| passed |") == 2 and "No details" not in report
    record = json.loads((tmp_path / "all" / "results" / "first-gpu.json").read_text())
    assert [step["step"] for step in record["parts"][0]["steps"]] == [1]


def test_unknown_part_is_refused(tool, tmp_path, monkeypatch):
    """A misspelt name ran nothing and ended with 0."""
    folder = tmp_path / "all"
    monkeypatch.setattr(sys, "argv", ["x", "--rehearse", "--only", "heads", str(folder)])
    with pytest.raises(SystemExit, match="no such part; there are .*head tiny"):
        tool.runner.main()
    assert not folder.exists()


def test_saves_are_removed_after_their_part(tool, tmp_path, monkeypatch):
    """The saves of all parts together filled the disk."""
    folder = tmp_path / "all"
    code = f"import os; os.makedirs({str(folder / 'bf16' / 'checkpoints' / 'step-1')!r})"
    part = tool.parts.Part(name="bf16", limit_s=9, command=(sys.executable, "-c", code))
    monkeypatch.setattr(tool.runner, "all_parts", lambda setting: [part])
    monkeypatch.setattr(sys, "argv", ["first_gpu.sh", "--rehearse", str(folder)])
    assert tool.runner.main() == 0
    assert (folder / "bf16").is_dir() and not list((folder / "bf16").iterdir())


def test_parts_without_engines_come_first_and_fit_in_ten_minutes(tool, tmp_path, monkeypatch):
    """A machine without vLLM would spend its time before the parts that it can run."""
    monkeypatch.setattr(tool.parts, "find_spec", lambda name: None)
    parts = list(parts_on_gpu(tool, tmp_path, 128).values())
    needs = ["vllm" in part.needs for part in parts], ["ray" in part.needs for part in parts]
    assert needs == (sorted(needs[0]), sorted(needs[1]))
    alone = [part for part in parts if "vllm" not in part.needs]
    assert [part.name for part in alone if "ray" in part.needs] == ["replay", "profile"]
    assert {"tests", "head 32B", "head 32B slice", "head 7B", "head 1.5B"} < {p.name for p in alone}
    trainers = {part.name for part in alone if part.name.startswith("trainer ")}
    assert trainers == {"trainer 0.5B", "trainer 0.2B deterministic", "trainer 1.5B"}
    assert not any(part.skipped for part in alone)
    assert sum(part.limit_s for part in alone) <= 600


@pytest.mark.parametrize(
    ("needs", "left_s", "reason"),
    [(("json", "nowhere"), 99.0, "needs nowhere"), ((), 4.0, "takes up to 9 s, and 4 s are left")],
)
def test_part_that_cannot_end_is_skipped(tool, tmp_path, needs, left_s, reason):
    """It ended with a traceback of an import, or was cut off."""
    part = tool.parts.Part(name="one", limit_s=9, command=("false",), needs=needs)
    setting = tool.parts.Setting(folder=tmp_path, machine=inspect_machine(), rehearses=False)
    outcome = tool.runner.run_or_skip(part, setting, [], left_s=left_s)
    assert (outcome.result, outcome.reason) == ("skipped", reason)


def test_interpreter_without_packages_is_told_what_to_bring(tmp_path):
    """It was a traceback, of the first module of many."""
    command = [sys.executable, "-S", "-E", SCRIPT.with_suffix("") / "runner.py", tmp_path / "all"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and not list(tmp_path.iterdir())
    assert "has no module" in result.stderr and "pack.py (--piece FILE)" in result.stderr
    assert "Traceback" not in result.stderr


def test_measurements_of_a_part_that_is_cut_off_are_kept(tool, tmp_path, monkeypatch):
    """The record of a trainer that ended in its save had none of its speed and memory."""
    folder, words = tmp_path / "all", ["--model.path=configs/quickstart-base"]
    results = folder / "results" / "trainer.json"
    found = {"tflops": 400.0, "memory": {"train": 1000.0, "load": 7.0}}
    code = f"open({str(results)!r}, 'w').write({json.dumps(found)!r}); import time; time.sleep(60)"
    part = tool.parts.Part(
        name="trainer",
        limit_s=2,
        command=(sys.executable, "-c", code),
        results=results,
        overrides=words,
    )
    monkeypatch.setattr(tool.runner, "SLOWER", 1)
    monkeypatch.setattr(tool.runner, "all_parts", lambda setting: [part])
    monkeypatch.setattr(sys, "argv", ["first_gpu.sh", "--rehearse", str(folder)])
    assert tool.runner.main() == 1
    record = json.loads((folder / "results" / "first-gpu.json").read_text())["parts"][0]
    assert record["result"] == "failed" and record["results"] == found
    train = tool.parts.phases_of(words, tool.parts.H100)["train"]
    engine = sum(train.items[name] for name in ("engine, asleep", "weight buckets"))
    planned = round((train.total - engine) / 2**20)
    assert record["memory"] == {"train": {"planned": planned, "measured": 1000.0}}
    assert "| train |" in (folder / "results" / "report.md").read_text()


def test_part_that_takes_too_long_is_ended_with_its_processes(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool.runner, "GRACE_S", 1.0)
    code = "import subprocess, time; subprocess.Popen(['sleep', '300'], start_new_session=True); "
    command = (sys.executable, "-c", code + "time.sleep(300)")
    part = tool.parts.Part(name="slow", limit_s=2, command=command)
    started = time.monotonic()
    outcome = tool.runner.run_part(part, tmp_path / "log", limit_s=2.0, on_gpu=False)
    assert outcome.result == "failed"
    assert outcome.reason == "not done after 2 s; 1 processes were left and ended"
    assert time.monotonic() - started < 30
    assert tool.runner.end_marked(f"slow {os.getpid()}") == 0


def test_goals_are_compared_with_the_fastest_rival(tool):
    times = {
        "three products alone": 100.0,
        "megadapo": 110.0,
        "Liger slow": 300.0,
        "Liger fast": 165.0,
        "verl Triton linear_cross_entropy": 200.0,
    }
    results = [{"name": name, "best_ms": ms, "absent": None} for name, ms in times.items()]
    products, verl, liger = tool.gpu_report.goals(results)
    assert products.startswith("1.10 x") and products.endswith("(met)")
    assert verl.startswith("1.82 x") and verl.endswith("(not met)")
    assert liger.startswith("1.50 x the speed of Liger fast") and liger.endswith("(met)")
    gone = {"name": "verl Triton x", "best_ms": None, "absent": "verl is not installed"}
    kept = [one for one in results if "verl" not in one["name"]]
    assert "did not run: verl is not installed" in tool.gpu_report.goals([*kept, gone])[1]


@pytest.mark.full
@pytest.mark.timeout(1600)
def test_parts_pass_without_a_gpu(tmp_path):
    result = run("--rehearse", str(tmp_path / "all"))
    report = (tmp_path / "all" / "results" / "report.md").read_text()
    assert result.returncode == 0, report
    assert report.count("| passed |") == 12
    assert report.count("needs a GPU") == 1
    assert "export in transformers" in report and "--trl-python" in report
    assert "policy/ratio_first_max_error" in report and "did not run" in report
