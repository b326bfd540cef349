"""Small faults for whole runs, each in one place of step 2 of 3.

A fault replaces functions as they are imported: `FAULTS` has, by its name, points `module:name` and
a function that returns the replacement of each. Group 5 is the second of the step's four groups
with eight responses; two updates have 16 responses each.
"""

STEP = 2
GROUP, RESPONSE, TOKEN = 1, 2, 3
"""Places from 0 in the step's batch."""
SEQUENCE = 8 * GROUP + RESPONSE
UPDATES = 2
"""Updates of a step."""
TENSOR = "layers.1.self_attention.linear_qkv.weight"

BATCH = "megadapo.run.step.training:make_batch"
ADVANTAGES = "megadapo.run.step.training:advantages"
SEEDS = "megadapo.rollout.types:response_seeds"
UPDATE = "megadapo.trainer.model.megatron_internals:clip_and_step"
RANK = "megadapo.trainer.rank:TrainerRank"
STEP_IF_FINITE = "megadapo.trainer.update.optimizer:step_if_finite"


def put(target, **values):
    """Set fields of a frozen object in place: every later reader sees them."""
    for name, value in values.items():
        object.__setattr__(target, name, value)


def before_batch(edit):
    """Wrap `make_batch`: `edit` changes the sampled groups, which are saved and trained on."""

    def wrap(original):
        def make_batch(sampled, config, *, policy_version):
            if policy_version == STEP - 1:
                edit(sampled)
            return original(sampled, config, policy_version=policy_version)

        return make_batch

    return wrap


def after_batch(edit):
    """Wrap `make_batch`: `edit` changes the trainer's batch only.

    It gets the batch, the sequence, and the place of its token among all tokens.
    """

    def wrap(original):
        def make_batch(sampled, config, *, policy_version):
            batch, advantages = original(sampled, config, policy_version=policy_version)
            if policy_version == STEP - 1:
                start, stop = batch.cu_seqlens[SEQUENCE : SEQUENCE + 2]
                first = start + batch.prompt_lengths[SEQUENCE]
                edit(batch, slice(start, stop), first + TOKEN)
            return batch, advantages

        return make_batch

    return wrap


def other_reward(sampled):
    put(sampled.groups[GROUP].scores[RESPONSE], reward=0.25)


def reverse_batch(sampled):
    """Train on the groups in another order than the one that is saved."""
    put(sampled, groups=sampled.groups[::-1])


def other_advantage(original):
    def advantages(groups, *args, **options):
        values = original(groups, *args, **options)
        if groups[0].prompt_index == 4:
            values[SEQUENCE] *= 1.5
        return values

    return advantages


def batch_token(batch, sequence, token):
    batch.tokens[token] += 1


def loss_weight(batch, sequence, token):
    batch.loss_weights[sequence] *= 2


def other_seed(original):
    def response_seeds(num_responses, *parts):
        seeds = list(original(num_responses, *parts))
        if parts[1:3] == ("train", 5):
            seeds[RESPONSE] += 1
        return tuple(seeds)

    return response_seeds


def other_evaluation(original):
    def response_seeds(num_responses, *parts):
        seeds = original(num_responses, *parts)
        return tuple(seed + 1 for seed in seeds) if parts[1] == "evaluation" else seeds

    return response_seeds


def silent_lr(original):
    """Double the rate of the second update of the step, after its metric was taken."""
    count = 0

    def clip_and_step(optimizer, grad_norm):
        nonlocal count
        count += 1
        if count == STEP * UPDATES:
            for group in optimizer.param_groups:
                group["lr"] *= 2
        original(optimizer, grad_norm)

    return clip_and_step


def not_finite(original):
    """Give the first update of the step a loss that is not finite."""
    count = 0

    def step_if_finite(optimizer, *, loss, lr):
        nonlocal count
        count += 1
        is_first = count == (STEP - 1) * UPDATES + 1
        return original(optimizer, loss=float("nan") if is_first else loss, lr=lr)

    return step_if_finite


def weight_of(rank):
    """Return a weight of the rank's model."""
    for chunk in rank.chunks:
        for name, weight in chunk.named_parameters():
            if name.endswith(TENSOR):
                return weight.detach()
    raise AssertionError(f"the model has no {TENSOR}")


def after_update(edit):
    """Wrap a rank's update: `edit` changes the rank when the step's updates are done."""

    def wrap(original):
        def update(rank, request):
            result = original(rank, request)
            if request.step == STEP:
                edit(rank)
            return result

        return update

    return wrap


def other_weight(rank):
    weight_of(rank)[3, 5] += 0.01


def other_moment(rank):
    for part in rank.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].view(-1)[3] += 0.01
            return


_CHANGED = []
"""The weight that differs, and its right value."""


def published_weight(rank):
    """Change a weight for the publication; `put_back` restores it before the checkpoint."""
    weight = weight_of(rank)
    _CHANGED.append((weight, weight[3, 5].clone()))
    weight[3, 5] += 0.05


def put_back(original):
    def begin_save(rank, folder):
        for weight, value in _CHANGED:
            weight[3, 5] = value
        _CHANGED.clear()
        return original(rank, folder)

    return begin_save


FAULTS = {
    "seed": {SEEDS: other_seed},
    "reward": {BATCH: before_batch(other_reward)},
    "advantage": {ADVANTAGES: other_advantage},
    "token in the batch": {BATCH: after_batch(batch_token)},
    "loss weight": {BATCH: after_batch(loss_weight)},
    "order of the batch": {BATCH: before_batch(reverse_batch)},
    "not finite": {STEP_IF_FINITE: not_finite},
    "silent learning rate": {UPDATE: silent_lr},
    "weight": {f"{RANK}.update": after_update(other_weight)},
    "moment": {f"{RANK}.update": after_update(other_moment)},
    "publication": {
        f"{RANK}.update": after_update(published_weight),
        f"{RANK}.begin_save": put_back,
    },
    "evaluation": {SEEDS: other_evaluation},
}
"""Points and wraps of each fault."""
