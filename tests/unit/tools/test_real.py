"""The tools of make real: sampling in plain transformers, commands, and their memory."""

import importlib
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megadapo.config import load_config
from megadapo.errors import ConfigError, InfraError
from megadapo.rollout.types import OpenGroup, SamplingSettings
from tests.support import REPOSITORY
from tests.support.models.tiny_models import make_text_model

SETTINGS = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=24)


@pytest.fixture
def tools(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    names = ("real", "plain_accuracy")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def groups_of(settings: SamplingSettings, num: int = 2) -> list[OpenGroup]:
    rng = np.random.default_rng(0)
    return [
        OpenGroup(
            key=-key,
            prompt_ids=tuple(rng.integers(2, 40, size=length).tolist()),
            seeds=tuple(range(num)),
            settings=settings,
        )
        for key, length in enumerate((3, 40, 1, 17, 8), start=1)
    ]


def test_responses_do_not_depend_on_the_padding_of_their_batch(tools, tmp_path):
    """Padding that is read, or on the wrong side, changes the shorter prompts' responses."""
    folder = make_text_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)

    def alone(group: OpenGroup, **more: int | None) -> list[int]:
        ids = torch.tensor([group.prompt_ids])
        output = model.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0, **more)
        return output[0, ids.shape[1] :].tolist()

    # a token that ends some of the responses early
    end = alone(groups_of(SETTINGS)[0], eos_token_id=None)[4]
    model.generation_config.eos_token_id = [1, end]
    model.generation_config.save_pretrained(folder)
    engine = tools.plain_accuracy.PlainEngine(folder, "float32")
    engine.submit(groups_of(SETTINGS))
    found = {group.key: group for group in engine.finished()}
    assert engine.num_in_flight == 0 and engine.finished() == []
    reasons = set()
    for asked in groups_of(SETTINGS):
        expected = alone(asked)
        for response in found[asked.key].responses:
            assert response.token_ids.tolist() == expected
            assert response.truncated == (expected[-1] not in (1, end))
            assert "<eos>" not in response.text
            reasons.add(response.finish_reason)
    assert reasons == {"stop", "length"}


def test_temperature_reaches_transformers(tools, tmp_path):
    engine = tools.plain_accuracy.PlainEngine(make_text_model(tmp_path), "float32")
    for temperature, is_drawn in ((1.0, True), (1e-3, False)):
        [asked, *_] = groups_of(replace(SETTINGS, temperature=temperature), num=4)
        engine.submit([asked])
        [group] = engine.finished()
        assert (len({one.text for one in group.responses}) > 1) == is_drawn


def test_failed_command_ends_the_sequence(tools, capfd):
    """An export of an old checkpoint would be measured after a failed training."""
    with pytest.raises(InfraError, match="train ended with exit code"):
        tools.real.megadapo("train", "nowhere.toml")
    assert "nowhere.toml" in capfd.readouterr().err


def test_recipe_without_evaluations_is_refused_at_once(tools):
    """It would fail an hour later, when the table has nothing to show."""
    config = load_config(REPOSITORY / "configs" / "smollm2-135m.toml", ["evaluation.every=0"])
    with pytest.raises(ConfigError, match=r"evaluation\.every"):
        tools.real.real(config, ["nowhere"])


def test_memory_is_that_of_all_descendants(tools):
    """Ray's and vLLM's processes are children of children."""
    child = "x = bytearray(64 << 20); print(flush=True); import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert 64 << 20 < tools.real.used_bytes(process.pid) < 128 << 20
    finally:
        for pid in tools.real.descendants(process.pid):
            subprocess.run(["kill", str(pid)])
        process.wait(timeout=20)
    until = time.monotonic() + 10
    while tools.real.used_bytes(process.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert tools.real.used_bytes(process.pid) == 0
