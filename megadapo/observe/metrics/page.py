"""The page of all metrics, docs/metrics.md."""

from megadapo.observe.metrics.names import METRICS

_NOTES = """\
`reward.functions` beyond the rule add names: `reward/NAME` is the mean score of a function without
its weight, `reward/NAME/PART` the mean of a part, and `reward/NAME/failed` the share of responses
that it failed on. A function that scores steps also has `reward/NAME/steps`, the mean number of
steps, and `reward/NAME/step_mean`, the mean score of a step. A step without such values leaves
them out.

Each entry of `rollout.environments` adds the means of its episodes: `environment/NAME/return`,
`environment/NAME/turns`, `environment/NAME/seconds` for the time that it took, and every number
that it counts; `environment/NAME/out_of_turns` is the share of episodes that ended at `max_turns`,
which are not truncated; `environment/NAME/failed` is the share of responses that it failed on,
which have no score; `environment/NAME/cut_messages` is the number of an episode's messages and
texts that were cut at `max_observation_tokens`. `environment/NAME/failures/KIND` is the number of
its failures in the step, those after which a response was requested again included, by kind of
cause: failure (`EnvironmentFailure`), exception, timeout, lost_process, no_capacity (of memory or
threads) and not_continued (an episode that cannot be repeated or has lost its records). A step
leaves out kinds without failures.

If data.held_out is a table, `held_out/NAME/accuracy` is the accuracy of each set, in the steps with
`eval/accuracy`, which is their mean; without an accuracy there is `held_out/NAME/score`. `megadapo
sft` and `megadapo reward-model` have
`held_out/NAME/loss`, and for pairs `held_out/NAME/pair_accuracy`.

If saved rollouts are trained on again, everything that needs engines is null, group metrics
describe the saved groups, and `parity/*` compares with the saved log-probs.
"""


def metrics_page() -> str:
    """Return docs/metrics.md: one row per metric, and notes on the names that users add."""
    meanings = {name: meaning.replace("|", "\\|") for name, meaning in METRICS.items()}
    rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in meanings.items())
    return f"""# Metrics

`metrics.jsonl` has one object a step with all of these names, null where a step has no value.
TensorBoard and wandb receive the same numbers. `evaluations.jsonl` has each evaluation with
its standard error, under the step that trained its weights.

This page is written by `megadapo config --metrics`.

| metric | meaning |
| --- | --- |
{rows}

{_NOTES}"""
