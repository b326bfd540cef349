"""The end of responses: the same tokens for sampling, training data and exported folders."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megadapo.data.answered import AnswerEncoder
from megadapo.data.rows import Row
from megadapo.errors import DataError
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.sampling.evaluation import HeldOutRequests
from megadapo.run.inputs import SamplingInputs
from megadapo.tokens.stops import stop_ids, turn_end, without_end
from megadapo.tokens.tokenizer import read_tokenizer
from tests.support.rollout.scripted_engines import RightAtLeast, ScriptedEngines, make_prompts
from tests.support.runs import runs_alone
from tests.support.tokenizers.small import KINDS, write_tokenizer

ENDS = {
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "smollm2": "<|im_end|>",
    "unigram": "<|im_end|>",
}


def names(tokenizer) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(stop_ids(tokenizer)))


def test_template_ends_a_turn(kind, tokenizer):
    name, is_own = kind
    assert tokenizer.convert_ids_to_tokens(turn_end(tokenizer)) == ENDS[name]
    first, *others = names(tokenizer)
    assert first == ENDS[name]
    if not is_own:
        assert {first, *others} == {ENDS[name], KINDS[name].eos, *KINDS[name].stops}


def test_base_model_stops_at_the_end_of_a_turn(tmp_path):
    """Its end-of-sequence token ends texts, and its template's end of a turn is another token."""
    folder = write_tokenizer("qwen3", tmp_path / "a", eos_token="<|endoftext|>")
    (folder / "generation_config.json").unlink()
    tokenizer = read_tokenizer(str(folder))
    assert names(tokenizer) == ["<|im_end|>", "<|endoftext|>"]
    encoder = AnswerEncoder(tokenizer, max_prompt_tokens=9, max_response_tokens=9)
    assert encoder.response_ids("3")[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


class Asked(ScriptedEngines):
    """Engines that record at which tokens responses are to end."""

    def submit(self, groups):
        self.stops = {group.settings.stop_ids for group in groups}
        super().submit(groups)


def test_training_and_evaluation_stop_alike(tmp_path):
    """Else evaluation would measure responses of another distribution."""
    changes = {
        "sampling": {"prompts_per_step": 4, "responses_per_prompt": 4, "selection": "all"},
        "rollout.max_response_tokens": 20,
        "algorithm": {"overlong_buffer": 0, "responses_per_mini_batch": 16},
    }
    config = runs_alone.config_of(tmp_path, changes)
    folder = write_tokenizer("qwen3", tmp_path / "a", eos_token="<|endoftext|>")
    tokenizer = read_tokenizer(str(folder))
    inputs = SamplingInputs(
        tokenizer=tokenizer,
        prompts=make_prompts(9),
        held_out={"": make_prompts(3)},
        scorer=RightAtLeast(40),
        episodes=EpisodeRequests(tokenizer=tokenizer, seed=0),
    )
    engines = Asked()
    inputs.sampler(config, engines).next_batch()
    asked = HeldOutRequests.create(
        inputs.held_out,
        config.evaluation,
        inputs.episodes,
        max_response_tokens=9,
    )
    stops = {stop_ids(inputs.tokenizer)}
    assert engines.stops == {request.settings.stop_ids for request in asked.requests} == stops


def test_answers_of_a_chat_of_a_base_model_share_a_sequence(tmp_path):
    """The template closes earlier answers with the token that ends the trained ones."""
    folder = write_tokenizer("qwen3", tmp_path / "a", eos_token="<|endoftext|>")
    tokenizer = read_tokenizer(str(folder))
    encoder = AnswerEncoder(tokenizer, max_prompt_tokens=99, max_response_tokens=9)
    chat = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    columns = {"messages": [{"role": role, "content": text} for role, text in chat]}
    [(tokens, wanted)] = encoder.encode(Row("line 1", columns))
    assert tokenizer.decode(tokens[wanted]) == "2<|im_end|>4<|im_end|>"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{{ messages[-1].content }}</s>", "</s>"),
        ("{{ messages[-1].content + ' </s>' }}", "</s>"),
        ("{{ messages[-1].content }}\nUser:", None),
        ("{{ messages[-1].content }} and </s>", None),
        ("{{ raise_exception('no') }}", None),
        ("no messages", None),
        ("", None),
    ],
)
def test_end_of_a_turn_follows_the_answer(tmp_path, template, end):
    folder = write_tokenizer("smollm2", tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</s>"]})
    tokenizer.chat_template = template
    found = turn_end(tokenizer)
    assert (found and tokenizer.convert_ids_to_tokens(found)) == end


def test_folder_names_further_ends(tmp_path):
    """config.json counts without generation_config.json, as for vLLM."""
    folder = write_tokenizer("smollm2", tmp_path / "a")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 3}))
    assert stop_ids(read_tokenizer(str(folder)))[1:] == (3,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert stop_ids(read_tokenizer(str(folder)))[1:] == (5, 6)
    (folder / "generation_config.json").write_text("{}")
    assert len(stop_ids(read_tokenizer(str(folder)))) == 1
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config.json is not JSON"):
        stop_ids(read_tokenizer(str(folder)))


def test_end_beyond_the_tokenizer_has_no_name(tmp_path):
    """Models with a padded vocabulary may name such tokens, which no text ends with."""
    folder = write_tokenizer("smollm2", tmp_path / "a")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [99999, 5]}))
    tokenizer = read_tokenizer(str(folder))
    encoder = AnswerEncoder(tokenizer, max_prompt_tokens=9, max_response_tokens=9)
    assert tokenizer.decode(encoder.response_ids("3")) == "3<|im_end|>"


def test_model_without_an_end_is_refused_for_training_data(tmp_path):
    folder = write_tokenizer("smollm2", tmp_path / "a", eos_token=None, chat_template=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert stop_ids(tokenizer) == ()
    with pytest.raises(DataError, match="no token that ends a response"):
        AnswerEncoder(tokenizer, max_prompt_tokens=9, max_response_tokens=9)


def test_answers_end_where_sampling_stops(kind, tokenizer):
    encoder = AnswerEncoder(tokenizer, max_prompt_tokens=64, max_response_tokens=64)
    end = stop_ids(tokenizer)[0]
    for text in ("3", "12 , and 's", f"a {ENDS[kind[0]]} b", "<think>1</think>"):
        ids = encoder.response_ids(text)
        assert ids[-1] == end and ids.count(end) == 1
        assert encoder.text_of(ids) == text
    # files of other programs often have the end in the text
    assert encoder.response_ids(f"3{ENDS[kind[0]]}") == encoder.response_ids("3")


def test_end_is_no_text(tmp_path):
    """An end that is not special would be decoded, and compared with the gold answer."""
    assert without_end([1, 2, 7], (7, 8)) == [1, 2]
    assert without_end([7, 2], (7,)) == [7, 2] and without_end([], (7,)) == []
    template = "{% for m in messages %}{{ m.content }}<｜User｜>{% endfor %}"
    folder = write_tokenizer("deepseek_v3", tmp_path / "a", chat_template=template)
    encoder = AnswerEncoder(read_tokenizer(str(folder)), max_prompt_tokens=9, max_response_tokens=9)
    assert encoder.text_of(encoder.response_ids("3")) == "3"


def test_reading_does_not_need_the_hub(tmp_path, monkeypatch):
    """A tokenizer without a folder, such as one made in a test, has its own ends only."""
    folder = write_tokenizer("gemma3", tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.name_or_path = ""
    assert names(tokenizer) == ["<end_of_turn>", "<eos>"]
    monkeypatch.chdir(tmp_path)
    tokenizer.name_or_path = str(Path("a"))
    assert names(tokenizer) == ["<end_of_turn>", "<eos>"]
