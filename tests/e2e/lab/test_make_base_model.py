"""The tool for base models of built-in tasks learns, and the shipped models are small."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import REPOSITORY
from tests.support.tools import load_tool

tool = load_tool("make_base_model")
SHIPPED = {
    "quickstart-base": "arithmetic",
    "chain-base": "arithmetic-chain",
    "experts-base": "arithmetic",
}
"""The task of each shipped base model."""


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(300)
def test_tool_learns_and_exports_its_weights(tmp_path):
    """Initial or wrongly arranged weights would have a loss near 5.6."""
    losses = tool.make_base_model(tmp_path / "model", num_steps=40, lr=2e-3, seed=3)
    assert losses[0] > 5.0
    assert losses[-1] < 2.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer.encode("12+34+56=?")
    ids = torch.tensor([prompt + tokenizer.encode("Answer: 102") + [tokenizer.eos_token_id]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, :-1]
    response = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    assert -logprobs[response, ids[0, response + 1]].mean() < 2.5


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_model_is_small_and_has_the_tools_tokenizer(name):
    folder = REPOSITORY / "configs" / name
    assert sum(p.stat().st_size for p in folder.iterdir()) < 4_200_000
    made = tool.make_tokenizer(tool.generate("train", tool.NUM_PROBLEMS, 0, task=SHIPPED[name]))
    shipped = AutoTokenizer.from_pretrained(folder)
    assert shipped.get_vocab() == made.get_vocab()
    answer = "12+34=46;46+5=51\nAnswer: 51"
    assert shipped.encode(answer) == made.encode(answer)


def test_problems_grow_from_the_shortest_to_all():
    """A start with long sums learns nothing, and without them the model cannot add them."""
    problems = [tool.Problem((1,) * num_terms) for num_terms in range(1, 101)]
    recipe = tool.RECIPES["arithmetic-chain"]
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "configs" / "quickstart-base")
    batches = tool.supervised_batches(problems, tokenizer, recipe, num_steps=8, seed=0)
    longest = [batch.prompt_lengths.max() for batch in batches]
    assert longest[0] <= 2 * 10 + 1 < longest[2]
    assert min(longest[4:]) > 2 * 80


def test_every_token_of_an_answer_has_a_loss():
    """Tokens that no policy sampled have none, and a model of them would stay random."""
    problems = tool.generate("train", 8, 0, task="arithmetic")
    tokenizer, recipe = tool.make_tokenizer(problems), tool.RECIPES["arithmetic"]
    (batch,) = tool.supervised_batches(problems, tokenizer, recipe, num_steps=1, seed=0)
    assert batch.loss_weights.sum() == pytest.approx(1.0)
