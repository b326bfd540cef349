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
PROMPT = "megadapo.data.prompts:PromptStream.at"
LR = "megadapo.trainer.types:TrainerSettings.lr_at"
UPDATE = "megadapo.trainer.model.megatron_internals:clip_and_step"
RANK = "megadapo.trainer.rank:TrainerRank"
STEP_IF_FINITE = "megadapo.trainer.update.optimizer:step_if_finite"


def put(target, **values):
    """Set fields of a frozen object in place: every later reader sees them."""
    for name, value in values.items():
        object.__setattr__(target, name, value)


def at_place(values, place, value):
    """Return a copy of an array with another value."""
    changed = values.copy()
    changed[place] = value
    return changed


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
                first = batch.cu_seqlens[SEQUENCE] + batch.prompt_lengths[SEQUENCE]
                edit(
                    batch, slice(batch.cu_seqlens[SEQUENCE], batch.cu_seqlens[SEQUENCE + 1]), first
                )
            return batch, advantages

        return make_batch

    return wrap


def in_response(edit):
    return before_batch(lambda sampled: edit(sampled.groups[GROUP].responses[RESPONSE]))


def in_score(edit):
    return before_batch(lambda sampled: edit(sampled.groups[GROUP].scores[RESPONSE]))


def label(response):
    put(response, policy_versions=at_place(response.policy_versions, TOKEN, STEP - 2))


def token(response):
    put(response, token_ids=at_place(response.token_ids, TOKEN, response.token_ids[TOKEN] + 1))


def engine_logprob(response):
    value = response.logprobs[TOKEN] * 1.000001
    put(response, logprobs=at_place(response.logprobs, TOKEN, value))


def swap_groups(sampled):
    one, two = sampled.groups[GROUP], sampled.groups[GROUP + 1]
    names = ("prompt", "prompt_ids", "responses", "scores")
    of_one, of_two = ({name: getattr(group, name) for name in names} for group in (one, two))
    put(one, **of_two)
    put(two, **of_one)


def swap_responses(sampled):
    """Exchange the response with the first one of another length."""
    group = sampled.groups[GROUP]
    length = group.lengths[RESPONSE]
    other = next(i for i, n in enumerate(group.lengths) if n != length)
    for name in ("responses", "scores"):
        values = list(getattr(group, name))
        values[RESPONSE], values[other] = values[other], values[RESPONSE]
        put(group, **{name: tuple(values)})


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


def batch_token(batch, sequence, first):
    batch.tokens[first + TOKEN] += 1


def batch_prompt(batch, sequence, first):
    batch.tokens[first - 1] -= 1


def batch_advantage(batch, sequence, first):
    batch.advantages[sequence] *= 1.5


def loss_weight(batch, sequence, first):
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


def other_prompt(original):
    return lambda stream, index: original(stream, 1000 if index == 5 else index)


def double_lr(original):
    def lr_at(settings, step):
        lr = original(settings, step)
        return lr if step != STEP else 2 * lr

    return lr_at


def at_update(number, edit):
    """Wrap the optimizer's step: in update `number` of the step `edit` replaces the original."""
    count = 0

    def wrap(original):
        def clip_and_step(optimizer, grad_norm):
            nonlocal count
            count += 1
            if count == (STEP - 1) * UPDATES + number:
                edit(original, optimizer, grad_norm)
            else:
                original(optimizer, grad_norm)

        return clip_and_step

    return wrap


def not_finite(original):
    """Give the first update of the step a loss that is not finite."""
    count = 0

    def step_if_finite(optimizer, *, loss, lr):
        nonlocal count
        count += 1
        is_first = count == (STEP - 1) * UPDATES + 1
        return original(optimizer, loss=float("nan") if is_first else loss, lr=lr)

    return step_if_finite


def skip(original, optimizer, grad_norm):
    pass


def silent_lr(original, optimizer, grad_norm):
    for group in optimizer.param_groups:
        group["lr"] *= 2
    original(optimizer, grad_norm)


def less_clipping(original, optimizer, grad_norm):
    """Clip by another norm than the measured one."""
    original(optimizer, 100 * grad_norm)


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
    "label": {BATCH: in_response(label)},
    "token": {BATCH: in_response(token)},
    "engine log-prob": {BATCH: in_response(engine_logprob)},
    "finish reason": {BATCH: in_response(lambda one: put(one, finish_reason="length"))},
    "swapped groups": {BATCH: before_batch(swap_groups)},
    "swapped responses": {BATCH: before_batch(swap_responses)},
    "seed": {SEEDS: other_seed},
    "prompt": {PROMPT: other_prompt},
    "reward": {BATCH: in_score(lambda score: put(score, reward=0.25))},
    "verdict": {BATCH: in_score(lambda score: put(score, correct=not score.correct))},
    "advantage": {ADVANTAGES: other_advantage},
    "token in the batch": {BATCH: after_batch(batch_token)},
    "prompt in the batch": {BATCH: after_batch(batch_prompt)},
    "advantage in the batch": {BATCH: after_batch(batch_advantage)},
    "loss weight": {BATCH: after_batch(loss_weight)},
    "order of the batch": {BATCH: before_batch(reverse_batch)},
    "not finite": {STEP_IF_FINITE: not_finite},
    "learning rate": {LR: double_lr},
    "silent learning rate": {UPDATE: at_update(2, silent_lr)},
    "first update skipped": {UPDATE: at_update(1, skip)},
    "last update skipped": {UPDATE: at_update(2, skip)},
    "clipping": {UPDATE: at_update(2, less_clipping)},
    "weight": {f"{RANK}.update": after_update(other_weight)},
    "moment": {f"{RANK}.update": after_update(other_moment)},
    "publication": {
        f"{RANK}.update": after_update(published_weight),
        f"{RANK}.begin_save": put_back,
    },
    "evaluation": {SEEDS: other_evaluation},
}
"""Points and wraps of each fault."""
