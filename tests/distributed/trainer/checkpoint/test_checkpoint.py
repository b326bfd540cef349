"""A checkpoint continues the same training at another split, moments included."""

import re
import resource
from functools import partial

import numpy as np
import pytest

from megadapo.errors import CorruptCheckpointError, InfraError
from megadapo.weights.disk.files import check_files
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.probes import (
    build,
    gathered,
    initial_weights,
    load_refusal,
    save_at,
    train,
    update,
)
from tests.support.trainer.ranks import layout, with_marks

TP2 = {"tensor": 2}
ORIGINS = {
    "tp2": ("qwen2-tied", ["cp2-pp2", "tp2-dp2-sp", "one"]),
    # each rank holds a slice of every moment, and a tied embedding a bucket of its own:
    # megatron-core alone would save masters and moments behind that bucket shifted
    "cp2-pp2": ("qwen2-tied", ["one"]),
    "one": ("deep-untied", ["vpp2-dp2-overlap", "pp2-last1"]),
    # every chunk has its own buffers, the first one several buckets, the tied embedding its own;
    # moments and layers under the numbers of their chunk would come back to other layers
    "vpp2-dp2-overlap": ("deep-tied", ["one", "tp2"]),
    "vpp2": ("deep-tied", ["one", "tp2"]),
    "pp2-last1": ("deep-tied", ["one", "tp2"]),
    # moments of one rank's experts could be lost, or come back to another's
    "tp2-dp2-sp-ep2": ("qwen3-moe", ["pp2-dp2-ep2"]),
}
"""Split that saves -> model, and further splits that load."""


@pytest.mark.parametrize(
    "origin",
    with_marks(
        ["cp2-pp2"],
        slow=("tp2-dp2-sp-ep2", "vpp2-dp2-overlap"),
        full=("tp2", "one", "vpp2", "pp2-last1"),
    ),
)
def test_loading_at_another_split_continues_the_training(ranks, tmp_path, origin):
    """Without its moments an update moves a weight by another amount of about 1e-3."""
    model, others = ORIGINS[origin]
    batch = random_batch(RAGGED, num_mini_batches=2)
    saving = partial(train, save=tmp_path / "saved", save_after=3)
    _, expected = ranks.on(model, saving, batch, 4, **layout(origin))[0]
    go_on = partial(train, load=tmp_path / "saved", first_step=4)
    for split in (*others, origin):
        _, found = ranks.on(model, go_on, batch, 1, **layout(split))[0]
        for name, weight in expected.items():
            if split == origin:
                assert found[name].tobytes() == weight.tobytes(), name
            np.testing.assert_allclose(found[name], weight, rtol=0, atol=2e-6, err_msg=name)


def test_bf16_weights_continue_from_their_fp32_masters(ranks, tmp_path):
    """Masters rebuilt from bf16 weights would lose every update smaller than a rounding step."""
    run = partial(ranks.on, "qwen2-tied", dtype="bfloat16", lr=1e-4)
    batch = random_batch(RAGGED)
    saving = partial(train, save=tmp_path / "saved", save_after=3)
    results, expected = run(saving, batch, 4, **TP2)[0]
    go_on = partial(train, load=tmp_path / "saved", first_step=4)
    again, found = run(go_on, batch, 1, **TP2)[0]
    assert results[0]["policy/ratio_first_max_error"] == 0.0
    assert again[0] == results[3]
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    _, moved = run(go_on, batch, 1, pipeline=2)[0]
    for name, weight in expected.items():
        np.testing.assert_allclose(moved[name], weight, rtol=2**-7, atol=1e-4, err_msg=name)


def test_damage_of_any_file_is_named(ranks, tmp_path):
    """torch reads a flipped byte, and another step's file, without an error."""
    files = ranks.on("qwen2-tied", _save_twice, tmp_path, tensor=2, data=2)[0]
    saved, elsewhere = tmp_path / "1", tmp_path / "0"
    parts = (f"__{rank}_0.distcp" for rank in range(4))
    whole = {".metadata", "metadata.json", "common.pt", "extra_state.distcp", "optimizer.json"}
    assert set(files) == whole | set(parts)
    check_files(saved, files)
    for name in files:
        victim, content = saved / name, (saved / name).read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (content[:-1], flipped, (elsewhere / name).read_bytes(), None):
            victim.unlink()
            if damaged is not None:
                victim.write_bytes(damaged)
            if damaged != content:
                # a node whose mount is late sees no file, which says nothing about it
                kind = InfraError if damaged is None else CorruptCheckpointError
                with pytest.raises(kind, match=re.escape(str(victim))):
                    check_files(saved, files)
        victim.write_bytes(content)
    victim = saved / "__3_0.distcp"
    victim.write_bytes(victim.read_bytes()[:3000] + bytes(1) + victim.read_bytes()[3001:])
    for refusal in ranks.on("qwen2-tied", _check, saved, files, CorruptCheckpointError, **TP2):
        assert str(victim) in refusal
    # one rank cannot read another file: nothing is damaged before all have read theirs
    (saved / "__2_0.distcp").rename(tmp_path / "away")
    for refusal in ranks.on("qwen2-tied", _check, saved, files, InfraError, **TP2):
        assert "__2_0.distcp cannot be read on node" in refusal and "damaged" not in refusal


def test_failed_write_names_the_rank_and_next_save_works(ranks, tmp_path):
    """One rank's disk may be full, or its folder another's; the others must not wait for it."""
    (tmp_path / "0").mkdir()
    (alone, files), (refused, _) = ranks.on(
        "qwen2-tied", _save_where_one_cannot_write, tmp_path, data=2
    )
    assert alone == "" and refused.startswith("rank 1: ") and "File too large" in refused
    check_files(tmp_path / "1", files)


def _save_where_one_cannot_write(rendezvous, settings, folder):
    rank = build(rendezvous, settings)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rendezvous.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    rank.begin_save(folder / "0")
    error = rank.writer.report(wait=True).error
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return error, save_at(rank, folder / "1")


def _save_twice(rendezvous, settings, folder):
    rank = build(rendezvous, settings)
    batch = random_batch(RAGGED)
    files = []
    for number in range(2):
        update(rank, batch, step=number + 1)
        files.append(save_at(rank, folder / str(number)))
    return files[1]


def _check(rendezvous, settings, folder, files, kind):
    from megadapo.trainer.checkpoint.checkpoint import check_across_ranks

    build(rendezvous, settings)
    with pytest.raises(kind) as caught:
        check_across_ranks(folder, files)
    return str(caught.value)


def test_checkpoint_that_does_not_fit_names_the_tensor(ranks, tmp_path):
    """Loading what is there and going on with the rest would train a half-random model."""
    saved = tmp_path / "saved"
    ranks.on("qwen2-tied", partial(train, save=saved), random_batch(RAGGED), 1, **TP2)
    assert str(saved) in ranks.on("qwen3", load_refusal, saved)[0]
    part = saved / "__0_0.distcp"
    content = part.read_bytes()
    part.write_bytes(content[:-5000])
    assert str(saved) in ranks.on("qwen2-tied", load_refusal, saved)[0]
    part.write_bytes(content)
    (saved / "__1_0.distcp").unlink()
    assert str(saved) in ranks.on("qwen2-tied", load_refusal, saved)[0]


def test_ranks_write_equal_parts_while_training_continues(ranks, tmp_path):
    """A save that kept an earlier one's tensors, or live ones, would come back as another step."""
    answers = ranks.on("qwen2-untied", _save_while_training, tmp_path, data=4)
    expected, num_bytes = answers[0][0], [answer[1] for answer in answers]
    assert max(num_bytes) <= 1.2 * sum(num_bytes) / len(num_bytes)
    for number in (1, 2):
        found = ranks.on("qwen2-untied", initial_weights, tmp_path / str(number), **TP2)[0]
        for name, weight in expected[number].items():
            assert found[name].tobytes() == weight.tobytes(), (number, name)


def _save_while_training(rendezvous, settings, folder):
    rank = build(rendezvous, settings)
    batch, expected = random_batch(RAGGED), []
    for number in range(3):
        update(rank, batch, step=number + 1)
        expected.append(gathered(rank))
        files = save_at(rank, folder / str(number), meanwhile=lambda: update(rank, batch, step=9))
    return expected, files[f"__{rendezvous.rank}_0.distcp"].bytes
