"""The tool for base models learns, and the shipped models are small."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megadapo.data.rows import Row
from megadapo.tokens.turns import Turns
from tests.support import REPOSITORY
from tests.support.tools import load_tool

tool = load_tool("make_base_model")
SHIPPED = {
    "quickstart-base": "arithmetic",
    "chain-base": "arithmetic-chain",
    "experts-base": "arithmetic",
    "styles-base": "arithmetic-styles",
}
"""The task of each shipped base model."""


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


GAMES = [
    Row("games", {"messages": [{"role": role, "content": text} for role, text in messages]})
    for messages in (
        [("user", "Find my number from 12 to 57."), ("assistant", "40")],
        [
            *(("user", "Find my number from 8 to 40."), ("assistant", "25"), ("user", "higher")),
            *(("assistant", "x"), ("user", "not a number from 8 to 40"), ("assistant", "30")),
            *(("user", "lower"), ("assistant", "27")),
        ],
    )
]


def test_only_the_answers_of_a_chat_have_a_loss():
    """A model that learns the environment's messages too would write them itself."""
    tokenizer = tool.make_chat_tokenizer(GAMES)
    examples = tool.chat_examples(GAMES, tokenizer, tool.CHATS)
    (batch,) = tool.supervised_batches(examples, tokenizer, tool.CHATS, num_steps=1, seed=0)
    assert batch.loss_weights.sum() == pytest.approx(1.0)
    learned = [tokenizer.decode(r.token_ids[r.is_sampled]) for _, r in examples]
    assert learned == ["40<|im_end|>", "25<|im_end|>x<|im_end|>30<|im_end|>27<|im_end|>"]
    for row, (prompt, response) in zip(GAMES, examples, strict=True):
        chat = [{"role": role, "content": text} for role, text in row.conversation]
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        assert whole == tokenizer.decode([*prompt, *response.token_ids]) + "\n"


def test_shipped_player_has_the_tools_template_and_exact_turns():
    """Glue of other tokens than the model has learned would make its play random."""
    folder = REPOSITORY / "configs" / "agent-base"
    assert sum(p.stat().st_size for p in folder.iterdir()) < 4_200_000
    shipped = AutoTokenizer.from_pretrained(folder)
    assert (shipped.bos_token, shipped.eos_token) == (None, "<|im_end|>")
    assert shipped.chat_template == tool.CHATML
    prompt, response = tool.chat_examples(GAMES, shipped, tool.CHATS)[1]
    ids = response.token_ids.tolist()
    start = [*prompt, *ids[: ids.index(shipped.eos_token_id) + 1]]
    glue = Turns(shipped).ids_after(start, [{"role": "user", "content": "higher"}])
    assert [*start, *glue] == [*prompt, *ids][: len(start) + len(glue)]
    assert shipped.decode(glue) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
