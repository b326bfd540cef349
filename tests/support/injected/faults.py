"""Small faults for whole runs, each in one place of step 2 of 3.

A fault replaces functions as they are imported: `FAULTS` has, by its name, points `module:name` and
a function that returns the replacement of each. Group 5 is the second of the step's four groups
with eight responses; two updates have 16 responses each.
"""

STEP = 2
GROUP, RESPONSE, TOKEN = 1, 2, 3
"""Places from 0 in the step's batch."""
SEQUENCE = 8 * GROUP + RESPONSE
TENSOR = "layers.1.self_attention.linear_qkv.weight"

BATCH = "megadapo.run.step.training:make_batch"
SEEDS = "megadapo.rollout.types:response_seeds"
RANK = "megadapo.trainer.rank:TrainerRank"


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
    "token in the batch": {BATCH: after_batch(batch_token)},
    "loss weight": {BATCH: after_batch(loss_weight)},
    "weight": {f"{RANK}.update": after_update(other_weight)},
    "publication": {
        f"{RANK}.update": after_update(published_weight),
        f"{RANK}.begin_save": put_back,
    },
}
"""Points and wraps of each fault."""
