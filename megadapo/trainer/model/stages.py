"""The layers of each pipeline stage, and the splits that megatron-core cannot make."""

from __future__ import annotations

from megadapo.trainer.config import TrainerConfig
from megadapo.weights.layout.stages import stage_layers


def layers_of_stages(num_layers: int, trainer: TrainerConfig) -> list[tuple[int, ...]]:
    """[stage] -> the layers it holds, ascending; the split must have no `stage_problems`."""
    assert not stage_problems(num_layers, trainer), "the split is validated before it is used"
    return stage_layers(
        num_layers,
        pp_size=trainer.pipeline_parallel,
        vpp_size=trainer.virtual_pipeline,
        first=trainer.first_stage_layers,
        last=trainer.last_stage_layers,
    )


def stage_problems(num_layers: int, trainer: TrainerConfig) -> list[str]:
    """What keeps so many layers from being split as the trainer's keys say; empty if nothing."""
    fixed = _fixed_sizes(trainer)
    num_even = trainer.pipeline_parallel - len(fixed)
    rest = num_layers - sum(fixed.values())
    keys = " and ".join(f"trainer.{name} = {size}" for name, size in fixed.items())
    if not fixed and num_layers % num_even:
        return [
            f"trainer.pipeline_parallel = {num_even} does not divide the model's "
            f"num_hidden_layers = {num_layers}; sizes that fit this model: {divisors(num_layers)} "
            "(or give the ends fewer layers: trainer.first_stage_layers, trainer.last_stage_layers)"
        ]
    if fixed and (rest < num_even or rest % max(1, num_even) or (rest and not num_even)):
        return [
            f"{keys} of num_hidden_layers = {num_layers}: {rest} layers are left for the "
            f"{num_even} other stages of trainer.pipeline_parallel = {trainer.pipeline_parallel}; "
            "each of them must get as many, and at least one"
        ]
    if not num_even and trainer.virtual_pipeline > 1:
        # megatron-core divides by the number of other stages there
        return [
            f"{keys} leave no other stage, which trainer.virtual_pipeline = "
            f"{trainer.virtual_pipeline} needs: set one of them only"
        ]
    sizes = _stage_sizes(num_layers, trainer)
    unfit = [size for size in dict.fromkeys(sizes) if size % trainer.virtual_pipeline]
    return [
        f"trainer.virtual_pipeline = {trainer.virtual_pipeline} does not divide the {size} layers "
        f"of a pipeline stage (num_hidden_layers = {num_layers}); sizes that fit such a stage: "
        f"{divisors(size)}"
        for size in unfit
    ]


def _stage_sizes(num_layers: int, trainer: TrainerConfig) -> list[int]:
    fixed = _fixed_sizes(trainer)
    num_even = trainer.pipeline_parallel - len(fixed)
    even = (num_layers - sum(fixed.values())) // num_even if num_even else 0
    sizes = [even] * trainer.pipeline_parallel
    sizes[0] = fixed.get("first_stage_layers", even)
    sizes[-1] = fixed.get("last_stage_layers", even)
    return sizes


def _fixed_sizes(trainer: TrainerConfig) -> dict[str, int]:
    sizes = {
        "first_stage_layers": trainer.first_stage_layers,
        "last_stage_layers": trainer.last_stage_layers,
    }
    return {name: size for name, size in sizes.items() if size}


def divisors(number: int) -> str:
    """ "1, 2, 4" for 4: sizes to suggest where one does not divide."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
