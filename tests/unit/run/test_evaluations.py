"""Evaluations of a run: start, wait, result and step."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from megadapo.cluster.calls import Watch
from megadapo.config import RunConfig
from megadapo.observe.metrics.records import EvaluationRecord, MetricsLog
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.journal.journal import EVALUATION, journal_path
from megadapo.run.evaluations import Evaluations, ReservedEngine, find_unfinished
from megadapo.run.inputs import SamplingInputs
from megadapo.run.state.checkpoint import EVALUATING, CheckpointStore, load
from tests.support.rollout.groups import payloads
from tests.support.rollout.scripted_engines import (
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
)
from tests.support.runs import runs_alone
from tests.support.runs.checkpoints import save_checkpoint, write_shard

NUM_PROBLEMS = 6


def config_of(
    placement: str, folder: str | Path = "somewhere", reward_weight: float = 1.0
) -> RunConfig:
    changes = {
        "reward.functions": [{"function": "rule", "weight": reward_weight}],
        "evaluation": {"every": 1, "samples_per_problem": 4, "placement": placement},
        "rollout.max_response_tokens": 20,
        "algorithm.overlong_buffer": 0,
        "cluster.placement": "separate",
        "checkpoint.every": 1,
        "observe.saved_groups": 0,
    }
    return runs_alone.config_of(folder, changes)


def make(
    placement: str,
    engines: ScriptedEngines,
    folder: Path | None = None,
    weights: str = "weights",
    reserved: ReservedEngine | None = None,
    reward_weight: float = 1.0,
) -> Evaluations:
    tokenizer = PlainTokenizer()
    inputs = SamplingInputs(
        tokenizer=tokenizer,
        prompts=[],
        held_out={"": make_prompts(NUM_PROBLEMS)},
        scorer=RightAtLeast(40),
        episodes=EpisodeRequests(tokenizer=tokenizer, seed=0),
    )
    return Evaluations(
        config_of(placement, reward_weight=reward_weight),
        engines,
        inputs,
        SimpleNamespace(phase=lambda name: nullcontext()),
        fingerprint=lambda: weights,
        folder=folder,
        reserved=reserved,
    )


class Reserved:
    """Evaluations with a reserved engine, and counters of its use."""

    def __init__(self, folder: Path | None = None) -> None:
        self.others, self.own = ScriptedEngines(), ScriptedEngines(at_once=1)
        self.num_looks = 0
        engine = ReservedEngine(engines=self.own, publish=self._publish, watch=Watch(self._look))
        self.evaluations = make("engine", self.others, folder, reserved=engine)

    def _publish(self, policy_version: int) -> None:
        assert self.own.num_in_flight == 0, "it generates"
        self.own.policy_version = policy_version

    def _look(self) -> None:
        self.num_looks += 1


def finished(evaluations: Evaluations) -> list[EvaluationRecord]:
    return [record for record, _ in evaluations.take_finished()]


def record_of(step: int) -> EvaluationRecord:
    engines = ScriptedEngines()
    engines.policy_version = step
    evaluations = make("alone", engines)
    evaluations.begin(step)
    [record] = finished(evaluations)
    return record


@pytest.mark.parametrize(("placement", "step"), [("alone", 2), ("interleaved", 5)])
def test_evaluation_without_rollouts_ends_at_once(placement, step):
    evaluations = make(placement, ScriptedEngines())
    evaluations.begin(step)
    assert evaluations.sampling_engines.evaluation is None
    [record] = finished(evaluations)
    assert (record.step, record.num_problems) == (step, NUM_PROBLEMS)
    assert finished(evaluations) == []


def test_interleaved_evaluation_keeps_its_weights():
    engines = ScriptedEngines()
    engines.policy_version = 2
    evaluations = make("interleaved", engines)
    evaluations.begin(2)
    assert finished(evaluations) == []
    assert evaluations.sampling_engines.evaluation is not None
    evaluations.finish()
    assert finished(evaluations) == [record_of(2)]
    assert evaluations.sampling_engines.evaluation is None and engines.num_in_flight == 0
    evaluations.finish()
    assert finished(evaluations) == []


def test_stored_answers_need_equal_weights_and_rewards(tmp_path):
    """A redone step may end in other weights; --accept-changes may change the rewards."""
    first = ScriptedEngines()
    make("alone", first, tmp_path).begin(3)
    assert len(payloads(journal_path(tmp_path, EVALUATION, 3))) == 1 + NUM_PROBLEMS
    cases = (
        ("weights", 1.0, 0),
        ("other weights", 1.0, NUM_PROBLEMS),
        ("weights", 2.0, NUM_PROBLEMS),
    )
    for weights, reward_weight, num_asked in cases:
        engines = ScriptedEngines()
        evaluations = make("alone", engines, tmp_path, weights, reward_weight=reward_weight)
        evaluations.begin(3)
        assert len(engines.asked) == num_asked
        assert len(finished(evaluations)) == 1


def test_no_fingerprint_without_stored_answers():
    evaluations = make("alone", ScriptedEngines())
    evaluations._fingerprint = lambda: pytest.fail("nobody asked for it")
    evaluations.begin(1)
    assert len(finished(evaluations)) == 1


def test_running_evaluation_can_be_abandoned():
    evaluations = make("interleaved", ScriptedEngines())
    evaluations.begin(1)
    evaluations.close()
    assert finished(evaluations) == []


def test_training_never_waits_for_the_reserved_engine():
    run = Reserved()
    run.evaluations.begin(2)
    assert len(run.own.asked) == NUM_PROBLEMS and run.others.asked == []
    assert run.evaluations.sampling_engines.evaluation is None
    for num_left in range(NUM_PROBLEMS - 1, 0, -1):
        run.others.policy_version += 1
        run.evaluations.finish_pending()
        run.evaluations.check()
        assert run.own.num_in_flight == num_left and run.evaluations.reserved_step == 2
    records = []
    while not records:
        records = finished(run.evaluations)
    assert records == [record_of(2)] and run.evaluations.reserved_step is None
    assert run.num_looks == 0


def test_next_evaluation_waits_for_the_reserved_engine():
    run = Reserved()
    for step in (0, 2, 5):
        run.others.policy_version = step
        run.evaluations.begin(step)
    assert finished(run.evaluations) == [record_of(step) for step in (0, 2, 5)]
    assert len(run.own.asked) == 2 * NUM_PROBLEMS and len(run.others.asked) == NUM_PROBLEMS
    assert run.num_looks == 2 * NUM_PROBLEMS


def test_reserved_engine_reuses_stored_answers(tmp_path):
    first, second = Reserved(tmp_path), Reserved(tmp_path)
    first.evaluations.begin(2)
    path = journal_path(tmp_path, EVALUATION, 2)
    while not path.exists() or len(payloads(path)) < 2:
        first.evaluations.check()
    first.evaluations.close()
    first.evaluations.check()
    num_known = len(payloads(path)) - 1
    assert 0 < num_known < NUM_PROBLEMS
    second.evaluations.begin(2)
    assert len(second.own.asked) == NUM_PROBLEMS - num_known
    second.evaluations.finish()
    assert finished(second.evaluations) == [record_of(2)]


def saved_run(folder: Path, **state: int):
    """Write checkpoints of steps 2 and 3; `state` is the newer one's."""
    store = CheckpointStore(folder / "checkpoints", keep=2)
    for step in (2, 3):
        save_checkpoint(store, step, write_shard, state=state if step == 3 else {})
    return load(folder / "checkpoints" / "step-3")


def test_run_resumes_evaluation_of_older_weights(tmp_path):
    config = config_of("engine", tmp_path)
    checkpoint = saved_run(tmp_path, **{EVALUATING: 2})
    unfinished, notes = find_unfinished(config, checkpoint)
    assert notes == [] and unfinished is not None
    assert unfinished.step == 2
    assert unfinished.trainer_folder == tmp_path / "checkpoints" / "step-2" / "trainer"
    alone, notes = find_unfinished(config_of("alone", tmp_path), checkpoint)
    assert alone is None and "step 2" in notes[0] and "evaluation.placement" in notes[0]
    with MetricsLog(tmp_path, writers=(), config={}) as log:
        log.record_evaluation(record_of(2))
    assert find_unfinished(config, checkpoint) == (None, [])


@pytest.mark.parametrize(("state", "lost"), [({}, 0), ({EVALUATING: 3}, 0), ({EVALUATING: 1}, 1)])
def test_no_evaluation_to_resume(tmp_path, state, lost):
    config = config_of("engine", tmp_path)
    unfinished, notes = find_unfinished(config, saved_run(tmp_path, **state))
    assert unfinished is None and len(notes) == lost
    assert find_unfinished(config, None) == (None, [])


def test_evaluation_of_step_zero_needs_no_checkpoint(tmp_path):
    checkpoint = saved_run(tmp_path, **{EVALUATING: 0})
    unfinished, _ = find_unfinished(config_of("engine", tmp_path), checkpoint)
    assert unfinished is not None and (unfinished.step, unfinished.files) == (0, {})
