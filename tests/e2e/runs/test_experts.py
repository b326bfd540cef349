"""A model with experts in engines and trainer at once: whole runs, and who goes to which expert."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from megadapo.data.batch import PackedBatch, pack_responses
from megadapo.data.group import Response
from tests.support import REPOSITORY
from tests.support.processes.forked import run_processes
from tests.support.runs.whole_runs import metrics, run
from tests.support.trainer.ranks import Ranks, settings_for

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

MODEL = REPOSITORY / "configs" / "experts-base"
NUM_SEQUENCES = 16
PROMPT_LENGTH, RESPONSE_LENGTH = 9, 60


@pytest.mark.parametrize(
    "further",
    [
        [],
        ["--trainer.router_replay=true", "--sampling.mode=partial", "--sampling.max_staleness=2"],
    ],
    ids=["free", "replayed-partial"],
)
def test_experts_on_two_ranks_keep_parity(tmp_path: Path, further: list[str]) -> None:
    """Experts replayed at a wrong token or layer, or left behind by an update, would break it."""
    folder = tmp_path / "run"
    split = ["--trainer.data_parallel=2", "--trainer.expert_parallel=2"]
    aux = "--trainer.router_aux_loss_coef=0.001"
    run(folder, f"--model.path={MODEL}", *split, aux, *further, num_steps=3)
    records = metrics(folder)
    assert [record["policy/ratio_first_max_error"] for record in records] == [0.0] * 3
    assert all(record["parity/logprob_abs_max"] < 1e-4 for record in records)
    assert all(0.9 < record["experts/balance_loss"] < 2.0 for record in records)
    assert all(1.0 <= record["experts/max_load"] <= 4.0 for record in records)


def engine_routes(_index: int, folder: Path, answer: Path) -> None:
    """Return the tokens that one engine samples, and the experts of each token.

    vLLM itself returns these on GPUs only, so its routers are asked here.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="0", VLLM_CPU_NUM_OF_RESERVED_CPU="0")
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=1)
    config = json.loads((folder / "config.json").read_text())
    chosen: list[list[list[int]]] = [[] for _ in range(config["num_hidden_layers"])]

    def ask_routers(model: torch.nn.Module) -> None:
        for layer, rows in zip(model.model.layers, chosen, strict=True):
            router = layer.mlp.experts.router
            router.set_capture_fn(lambda ids, rows=rows: rows.extend(ids.tolist()))

    llm.apply_model(ask_routers)
    draw = np.random.default_rng(0)
    found = []
    for seed in range(NUM_SEQUENCES):
        prompt = draw.integers(0, config["vocab_size"], PROMPT_LENGTH).tolist()
        for rows in chosen:
            rows.clear()
        settings = SamplingParams(
            max_tokens=RESPONSE_LENGTH, ignore_eos=True, logprobs=0, seed=seed, temperature=1.0
        )
        (output,) = llm.generate({"prompt_token_ids": prompt}, settings, use_tqdm=False)
        (response,) = output.outputs
        logprobs = [
            entry[token].logprob
            for token, entry in zip(response.token_ids, response.logprobs, strict=True)
        ]
        # the last token is sampled and not read
        length = PROMPT_LENGTH + RESPONSE_LENGTH - 1
        routes = [rows[:length] for rows in chosen]
        found.append([prompt, list(response.token_ids), logprobs, routes])
    answer.write_text(json.dumps(found))


def trainer_routes(rendezvous, settings, batch: PackedBatch):
    """[layers, tokens, experts] bool and log-probs [tokens], the sequences of a batch in order."""
    from megadapo.trainer.model.experts import BalancedRouter
    from megadapo.trainer.rank import TrainerRank

    rank = TrainerRank(settings, rendezvous)
    chosen, members = [], []
    for module in rank.chunks[0].modules():
        if isinstance(module, BalancedRouter):
            module.register_forward_hook(
                lambda module, inputs, output: chosen.append(output[1].numpy())
            )
    (mini_batch,) = rank.splitter.split_responses(batch)
    (micro_batch,) = mini_batch
    members = micro_batch.members
    (logprobs,) = rank.logprobs_of(mini_batch)
    found = np.full(len(batch.tokens), np.nan)
    found[micro_batch.source] = logprobs[micro_batch.rows].numpy()
    starts, stops = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    source = np.concatenate([np.arange(starts[i], stops[i]) for i in members])
    routes = np.empty((len(chosen), len(batch.tokens), chosen[0].shape[1]), dtype=bool)
    routes[:, source] = np.stack(chosen)
    return routes, found


def test_engine_and_trainer_route_to_the_same_experts(tmp_path: Path) -> None:
    run_processes(engine_routes, (MODEL, tmp_path / "answer.json"), 1, fresh=True)
    answers = json.loads((tmp_path / "answer.json").read_text())
    responses = [
        Response(
            token_ids=np.array(response, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            finish_reason="length",
            policy_versions=np.zeros(len(response), dtype=np.int32),
            text="",
        )
        for _, response, logprobs, _ in answers
    ]
    ones = np.ones(len(responses))
    batch = pack_responses(
        [prompt for prompt, *_ in answers],
        responses,
        advantages=ones,
        loss_weights=ones,
        mini_batch_size=len(responses),
    )
    ranks = Ranks()
    settings = settings_for(str(MODEL), tokens_per_micro_batch=100_000)
    ((routes, logprobs),) = ranks.run(1, trainer_routes, settings, batch)
    ranks.close()
    same = []
    for index, (_, _, _, of_engine) in enumerate(answers):
        start, stop = batch.cu_seqlens[index : index + 2]
        engine = np.zeros_like(routes[:, start : stop - 1])
        np.put_along_axis(engine, np.array(of_engine), True, axis=-1)
        same.append((engine == routes[:, start : stop - 1]).all(axis=-1))
    assert np.concatenate(same, axis=-1).mean() > 0.9995
    assert np.nanmax(np.abs(logprobs - batch.logprobs_rollout)) < 1e-4
