"""The same loop asynchronously: the engines generate while the trainer computes.

    python examples/loop/async_loop.py [--section.key=value ...]

A thread fills the next batch during the update (`BackgroundSampler`). Responses that a publication
stops are continued with the new weights, so a batch has tokens of several policy versions. The
update compares each token with the version that sampled it.
"""

from loop import main

if __name__ == "__main__":
    main(
        "sampling.mode=async",
        "sampling.max_staleness=3",
        "cluster.placement=separate",
        "evaluation.every=0",
    )
