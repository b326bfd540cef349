"""The parts of the first contact with a GPU, in the order of the packages that they need."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megadapo.cluster.machine import GIB, Machine
from megadapo.config import RunConfig, load_config
from megadapo.plan.cards import H100, Card, card_of
from megadapo.plan.fit import problems
from megadapo.plan.phases import Phase, gpu_kinds, host_items, models_of
from megadapo.trainer.trainer import rank_environment

RECIPE = "configs/quickstart.toml"
REAL_RECIPE = "configs/smollm2-135m.toml"
MEGADAPO = (sys.executable, "-m", "megadapo.cli")
KILL_AND_RESUME = "kill-and-resume"
HEAD_SHAPES = {
    "32B": (65, "20480,5120,152064,bfloat16"),
    "32B slice": (30, "20480,5120,19008,bfloat16,8"),
    "7B": (40, "20480,3584,152064,bfloat16"),
    "1.5B": (25, "20480,1536,151936,bfloat16"),
}
"""Qwen2.5's heads with a time limit: 32B whole and one of its 8 tensor-parallel slices."""
TRAINERS = (
    ("trainer tiny", 60),
    ("trainer 0.5B", 65, "--trainer.tokens_per_micro_batch=16384"),
    ("trainer 0.2B deterministic", 40, "--trainer.deterministic=true"),
    ("trainer 1.5B", 90, "--trainer.tokens_per_micro_batch=8192"),
)
"""Trainers alone with a time limit and keys; the first one is the rehearsal's."""
RIVALS = ("eager", "Liger", "CCE", "verl Triton")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(vocab_size=1024),
    "0.2B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=4),
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28),
    "3B": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36),
    "7B": dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, tie_word_embeddings=False
    ),
}
"""Qwen2.5's models by size, and the rehearsal's."""
HEADS = {"0.2B": (14, 2), "0.5B": (14, 2), "1.5B": (12, 2), "3B": (16, 2), "7B": (28, 4)}
"""Attention heads, and those of keys and values."""
EVERYTHING = '--trainer.offload=["optimizer", "gradients", "parameters"]'
IN_UPDATES = '--trainer.offload=["optimizer", "gradients"]'
DELTAS = "--weights.mode=delta"
LARGEST = "largest"
MAIN_MEMORY_SHARE = 0.8
"""Share of a machine's main memory that a run may plan with."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command with its own time limit."""

    name: str
    limit_s: int
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Packages without which it cannot start."""
    skipped: str | None = None
    """Reason not to run it."""
    results: Path | None = None
    """File that it writes its measurements to."""
    unless: tuple[str, ...] = ()
    """Parts that make this one unnecessary: one of them has passed."""
    run: Path | None = None
    """Folder of the run that the part starts."""
    overrides: tuple[str, ...] = ()
    """Configuration of that run."""
    is_tight: bool = False
    """Whether engines must leave less memory than the optimizer takes."""

    @property
    def slug(self) -> str:
        """Its name in the names of files."""
        return self.name.replace(" ", "-")


@dataclass(kw_only=True)
class Outcome:
    """The result of one part."""

    part: Part
    result: str = "passed"
    """One of passed, failed and skipped."""
    reason: str = ""
    seconds: float = 0.0
    memory: list[tuple[float, str, float]] = field(default_factory=list)
    """Seconds since the start, phase of the run, and MiB in use."""

    def most_in(self, phase: str) -> float | None:
        """Return the most MiB in use in a phase."""
        return max((used for _, at, used in self.memory if at == phase), default=None)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Machine and folder of all parts."""

    folder: Path
    machine: Machine
    rehearses: bool
    trl_python: str | None = None
    """Python of an environment with TRL and vLLM."""

    @property
    def card(self) -> Card:
        """The machine's GPU, and for the rehearsal's plan an H100."""
        if self.rehearses:
            return H100
        gpu = self.machine.gpus[0]
        card = card_of(gpu.name)
        return card or replace(H100, name=gpu.name, memory_bytes=int(gpu.memory_gib * GIB))

    @property
    def num_steps(self) -> int:
        return 2 if self.rehearses else 5


def all_parts(setting: Setting) -> list[Part]:
    """Return the parts in their order; models of random weights are written first.

    The first ones need torch alone, the next ones Ray, and the others vLLM too.
    """
    first, *others = _heads(setting)
    kinds = TRAINERS[:1] if setting.rehearses else TRAINERS[1:]
    trainer, *trainers = (_trainer(setting, *kind) for kind in kinds)
    tests = Part(name="tests", limit_s=80, needs=("pytest",), command=_tests(setting))
    alone = [tests, first, trainer, _weights(setting), *others, *trainers]
    ray = [_replay(setting), _profile(setting)]
    vllm = [replace(part, needs=("ray", "vllm")) for part in _with_engines(setting)]
    return [*alone, *ray, *vllm]


def _with_engines(setting: Setting) -> list[Part]:
    """Return the parts that need vLLM."""
    small = write_model(setting, "tiny" if setting.rehearses else "0.5B")
    no_gpu = "needs a GPU" if setting.rehearses else None
    verified = "--weights.verify=every"
    bf16 = [*_bf16(small, setting), *_short(setting)]
    # so few elements change that deltas are sent: an update of many is sent in full
    lr = "--trainer.optimizer.lr=" + ("1e-10" if setting.rehearses else "1e-6")
    delta = [*bf16, verified, DELTAS, lr]
    fp8 = [*bf16, "--rollout.quantization=fp8", "--algorithm.importance.scope=all"]
    return [
        _command("doctor", 60, "doctor"),
        # log-probs, ratio, memory, and updates that are compared to the bit
        _train(setting, "bf16", 180, [*bf16, verified]),
        _kill_and_resume(setting, bf16),
        _train(setting, "delta", 150, delta),
        _train(setting, "fp8", 150, fp8, skipped=no_gpu),
        *_real(setting),
        *_largest(setting),
    ]


def write_model(setting: Setting, size: str) -> Path:
    """Write a model without weights, with the quickstart's tokenizer; return its folder."""
    folder = setting.folder / f"model-{size}"
    if folder.exists():
        return folder
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree("configs/quickstart-base", folder, ignore=ignore)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"dtype": "bfloat16", "max_position_embeddings": 4096, "vocab_size": 151936}
    if size in HEADS:
        config["num_attention_heads"], config["num_key_value_heads"] = HEADS[size]
    config |= SHAPES[size]
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def config_of(overrides: Iterable[str]) -> RunConfig:
    """Return the configuration of a run on one GPU."""
    plain = [override.removeprefix("--") for override in overrides]
    return load_config(RECIPE, [*plain, "cluster.device=cuda"])


def phases_of(overrides: Iterable[str], card: Card) -> dict[str, Phase]:
    """Return the plan of a run's phases on its GPU."""
    config = config_of(overrides)
    (kind,) = gpu_kinds(config, models_of(config), card)
    return {phase.name: phase for phase in kind.phases}


def _command(name: str, limit_s: int, *words: str) -> Part:
    return Part(name=name, limit_s=limit_s, command=(*MEGADAPO, *words))


def _benchmark(name: str, limit_s: int, script: str, *words: str) -> Part:
    command = (sys.executable, f"benchmarks/{script}.py", *words)
    return Part(name=name, limit_s=limit_s, command=command)


def _measurement(setting: Setting, part: Part) -> Part:
    """Return a part with the file of its measurements as the last word of its command."""
    file = setting.folder / "results" / f"{part.slug}.json"
    return replace(part, command=(*part.command, f"--json={file}"), results=file)


def _script(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, f"tools/first_gpu/{name}.py", *words)


def _tests(setting: Setting) -> tuple[str, ...]:
    # the slow ones are of speed, which other parts measure
    words = ("-m", "pytest", "-v", "-m", "gpu and not slow", "tests/gpu")
    return (sys.executable, *words, *(["--collect-only"] if setting.rehearses else []))


def _heads(setting: Setting) -> list[Part]:
    """Return one part per shape: a fault on a GPU ends its process."""
    shapes, options = HEAD_SHAPES, ["--device=cuda", "--repeats=5"]
    if setting.rehearses:
        shapes, options = {"tiny": (60, "256,128,1024,float32")}, ["--device=cpu", "--repeats=2"]
    options += [f"--only={name}" for name in RIVALS]
    parts = [
        _benchmark(f"head {name}", limit_s, "head", "--shape", shape, *options)
        for name, (limit_s, shape) in shapes.items()
    ]
    return [_measurement(setting, part) for part in parts]


def _trainer(setting: Setting, name: str, limit_s: int, *options: str) -> Part:
    """Return the part with a trainer's rank alone, with the environment of a run's ranks."""
    model = write_model(setting, name.split()[1])
    words = [*_bf16(model, setting), *_short(setting), EVERYTHING, *options]
    skipped = None
    if not setting.rehearses:
        words.append("--rollout.max_response_tokens=1024")
        skipped = misfit(words, setting)
    part = _train(setting, name, limit_s, words, skipped=skipped)
    config = config_of(words)
    environment = rank_environment(
        config.trainer,
        uses_cuda=not setting.rehearses,
        dtype=config.model.dtype,
        num_cores=setting.machine.num_cores,
    )
    variables = (f"{name}={value}" for name, value in environment.items())
    words += [_device(setting), f"--run.folder={part.run}"]
    command = ("env", *variables, *_script("trainer_alone", RECIPE, *words))
    return _measurement(setting, replace(part, run=None, needs=("megatron",), command=command))


def _device(setting: Setting) -> str:
    return f"--cluster.device={'cpu' if setting.rehearses else 'cuda'}"


def _weights(setting: Setting) -> Part:
    """Return the part with updates between two processes."""
    is_large = setting.card.memory_bytes > 40 * GIB
    size = "tiny" if setting.rehearses else "7B" if is_large else "0.5B"
    command = _script("weight_update", str(write_model(setting, size)))
    return _measurement(setting, Part(name=f"weights {size}", limit_s=40, command=command))


def _replay(setting: Setting) -> Part:
    """Return the part that trains on saved rollouts, is killed and resumes."""
    model = write_model(setting, "tiny" if setting.rehearses else "0.2B")
    words = [*_bf16(model, setting), "--run.num_steps=6", "--checkpoint.every=2", _device(setting)]
    # the saved log-probs are of no engine
    words += ["--oracles.logprob_abs_mean=100", "--oracles.logprob_abs_max=100"]
    rollouts = setting.folder / "rollouts"
    part = _train(setting, "replay", 70, [*words, "--evaluation.every=0"])
    command = _script("replay", *part.command, f"--replay={rollouts}")
    return replace(part, command=command, needs=("ray", "megatron"))


def _bf16(model: Path, setting: Setting) -> list[str]:
    """Return a run's overrides: no answer of random weights is correct, so all groups count."""
    own = ["--model.dtype=bfloat16", "--rollout.max_response_tokens=512"]
    if setting.rehearses:
        # some CPUs offer instructions for bf16 that vLLM may not use
        own = ["--model.dtype=float32"]
    return [
        f"--model.path={model}",
        "--model.init=random",
        "--sampling.selection=all",
        "--oracles.logprob_abs_mean=0.1",
        "--oracles.logprob_abs_max=1.0",
        *own,
    ]


def _fp32(setting: Setting) -> list[str]:
    """Return bounds for an fp32 recipe: its own ones are those of a CPU's rounding."""
    if setting.rehearses:
        return []
    return ["--oracles.logprob_abs_mean=1e-3", "--oracles.logprob_abs_max=0.1"]


def _short(setting: Setting) -> list[str]:
    return [
        f"--run.num_steps={setting.num_steps}",
        f"--checkpoint.every={setting.num_steps}",
        "--rollout.num_engines=1",
        "--trainer.optimizer.warmup_steps=1",
        "--evaluation.every=0",
    ]


def _train(
    setting: Setting,
    name: str,
    limit_s: int,
    overrides: Iterable[str],
    *,
    skipped: str | None = None,
) -> Part:
    # the report reads a run's own files, and a machine with torch alone has no TensorBoard
    overrides = ("--observe.writers=[]", *overrides)
    run = setting.folder / name.replace(" ", "-")
    command = (*MEGADAPO, "train", RECIPE, f"--run.folder={run}", *overrides)
    return Part(
        name=name, limit_s=limit_s, command=command, skipped=skipped, run=run, overrides=overrides
    )


def _kill_and_resume(setting: Setting, bf16: list[str]) -> Part:
    """Return the part whose updates need memory that the engine has.

    The trainer's optimizer is in main memory while the engine generates, and half of the optimizer
    would fit beside the engine.
    """
    overrides = [*bf16, "--run.num_steps=8", "--checkpoint.every=2", IN_UPDATES]
    phases = phases_of(overrides, setting.card)
    beside = phases["rollout"].total + phases["train"].items["optimizer"] // 2
    if not setting.rehearses:
        budget = config_of(overrides).rollout.gpu_memory_utilization
        share = 1.0 + budget - beside / setting.card.memory_bytes
        overrides.append(f"--rollout.gpu_memory_utilization={share:.4f}")
    part = _train(setting, "kill and resume", 240, overrides)
    command = _script("runner", KILL_AND_RESUME, *part.command)
    return replace(part, command=command, is_tight=not setting.rehearses)


def _real(setting: Setting) -> list[Part]:
    """Return the recipe of make real, and a comparison of its steps with TRL's."""
    words = ["--rollout.num_engines=1", "--rollout.gpu_memory_utilization=0.3", *_fp32(setting)]
    model, skipped, short = str(cached_model()), None, []
    if setting.rehearses:
        model = "configs/quickstart-base"
        words += ["--data.train=arithmetic:train:64", "--data.held_out=arithmetic:held_out:8"]
        words.append("--sampling.selection=all")
        short = ["--run.num_steps=2", "--evaluation.every=2"]
    elif not Path(model).is_dir():
        skipped = f"{model} is missing: tools/fetch_smollm2.py makes it"
    elif find_spec("reasoning_gym") is None:
        skipped = "pip install --no-deps -r requirements/real.lock before"
    run = f"--run.folder={setting.folder / 'real'}"
    command = (sys.executable, "tools/real.py", "--config", REAL_RECIPE, f"--model.path={model}")
    real = Part(name="real", limit_s=420, command=(*command, run, *words, *short), skipped=skipped)
    steps = "2" if setting.rehearses else "8"
    vllm = ["use_cpu=false", "use_vllm=true", "vllm_mode=colocate"]
    vllm.append("vllm_gpu_memory_utilization=0.2")
    options = ["--steps", steps, "--warmup", "2", "--trl-python", str(setting.trl_python)]
    options += [] if setting.rehearses else [f"--trl={one}" for one in vllm]
    options += [f"--model.path={model}", *words]
    beside = _benchmark("real beside TRL", 300, "step", REAL_RECIPE, *options)
    if setting.trl_python is None:
        skipped = "no environment with TRL was named: --trl-python"
    return [real, _measurement(setting, replace(beside, skipped=skipped))]


def cached_model() -> Path:
    """Return the folder in which tools/fetch_smollm2.py puts its model."""
    sys.path.append(str(Path(__file__).parents[1]))
    from fetch_smollm2 import default_folder

    return default_folder()


def _profile(setting: Setting) -> Part:
    """Return the profile of a trainer's step, and with vLLM the trace of a whole one."""
    model = write_model(setting, "tiny" if setting.rehearses else "0.5B")
    words = ["--steps=2", *_bf16(model, setting), "--rollout.num_engines=1", _device(setting)]
    limit_s = 55
    if find_spec("vllm"):
        limit_s = 180
        words.append(f"--trace={setting.folder / 'trace.json.gz'}")
    part = _command("profile", limit_s, "profile", RECIPE, *words)
    return replace(part, needs=("ray", "megatron"))


def _largest(setting: Setting) -> list[Part]:
    """Return runs of decreasing size; the first one that fits and passes is the only one."""
    if setting.rehearses:
        model = write_model(setting, "tiny")
        small = [*_bf16(model, setting), *_short(setting)]
        return [_train(setting, f"{LARGEST} tiny", 150, small)]
    parts: list[Part] = []
    for size, *options in (
        ("7B",),
        ("7B", "--trainer.optimizer.cpu_offload_fraction=1.0"),
        ("3B",),
        ("1.5B",),
    ):
        overrides = [*_bf16(write_model(setting, size), setting), *_short(setting), IN_UPDATES]
        overrides += ["--run.num_steps=3", "--checkpoint.every=100000", *options]
        overrides += ["--trainer.tokens_per_micro_batch=4096"]
        name = f"{LARGEST} {size}" + (" optimizer in main memory" if options else "")
        reason = misfit(overrides, setting)
        part = _train(setting, name, 420, overrides, skipped=reason)
        parts.append(replace(part, unless=tuple(one.name for one in parts)))
    return parts


def misfit(overrides: Iterable[str], setting: Setting) -> str | None:
    """Return why a run does not fit on this machine by the plan, if it does not."""
    config = config_of(overrides)
    models = models_of(config)
    if found := problems(config, models, setting.card):
        return found[0].partition(";")[0]
    items = host_items(config, models, setting.card, 1)
    needed = sum(items.values()) / GIB
    if needed > MAIN_MEMORY_SHARE * setting.machine.memory_gib:
        return f"needs {needed:.0f} GiB of main memory, and the machine has too little"
    save, free = items["snapshot of a save"], shutil.disk_usage(setting.folder).free
    if save > free:
        return f"needs {save / GIB:.0f} GiB of disk for its save, and {free / GIB:.0f} are free"
    return None
