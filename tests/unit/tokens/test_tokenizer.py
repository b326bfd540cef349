"""Tokenizers that change texts are noticed, and templates get their variables."""

import json
import random
import unicodedata

import pytest

from megadapo.errors import ConfigError, DataError
from megadapo.tokens.chat import chat_ids
from megadapo.tokens.tokenizer import PROBE, read_tokenizer
from tests.support.models.tiny_models import write_tokenizer as write_digits
from tests.support.tokenizers.small import write_tokenizer
from tests.unit.tokens.test_chat import text_of


def test_texts_survive(tokenizer):
    source = random.Random(4)
    for _ in range(60):
        text = unicodedata.normalize("NFC", text_of(source))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_tokenizer_that_loses_blanks_is_refused(tmp_path):
    """DeepSeek's tokenizer.json in a folder with Llama's model_type, as of distilled models."""
    folder = write_tokenizer("deepseek_v3", tmp_path / "a")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        read_tokenizer(str(folder))
    said = str(error.value)
    assert f"model.path = {folder} changes texts: {PROBE!r} becomes 'And4+4?deff" in said
    assert "loaded as LlamaTokenizer" in said and '"PreTrainedTokenizerFast"' in said
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_tokenizer(str(folder)).decode(read_tokenizer(str(folder)).encode(PROBE)) == PROBE


def test_small_vocabulary_of_a_toy_task_is_allowed(tmp_path):
    write_digits(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = read_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("1+2")) == "1+2"
    with pytest.raises(DataError, match="no-such-folder has no usable tokenizer"):
        read_tokenizer(str(tmp_path / "no-such-folder"), key="algorithm.reference.path")


def test_tokenizer_that_cannot_split_names_is_refused(tmp_path):
    """Only those of the library tokenizers tell which texts are control tokens."""
    settings = {"tokenizer_class": "ByT5Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ConfigError, match="ByT5Tokenizer, which is not a fast one"):
        read_tokenizer(str(tmp_path))


def test_template_gets_its_variables(tmp_path):
    folder = str(write_tokenizer("qwen3", tmp_path / "a"))
    asked = [("user", "1+2=?")]
    plain = read_tokenizer(folder)
    quick = read_tokenizer(folder, chat_template_kwargs={"enable_thinking": False})
    added = plain.decode(chat_ids(asked, quick)).removeprefix(plain.decode(chat_ids(asked, plain)))
    assert added == "<think>\n\n</think>\n\n"
    by_hand = plain.apply_chat_template(
        [{"role": "user", "content": "1+2=?"}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=False,
    )
    assert chat_ids(asked, quick) == by_hand
    thinking = read_tokenizer(folder, chat_template_kwargs={"enable_thinking": True})
    assert chat_ids(asked, thinking) == chat_ids(asked, plain)


def test_variables_keep_their_values(tmp_path):
    """Text with quotes or braces must not become part of the template."""
    template = "\n{{ a ~ '/' ~ b ~ '/' ~ (c + 1) ~ '/' ~ (d is true) }}"
    folder = str(write_tokenizer("smollm2", tmp_path / "a", chat_template=template))
    values = {"a": "\"'{{ 1 }}\n%}\\é🙂", "b": 0.5, "c": 2, "d": True}
    tokenizer = read_tokenizer(folder, chat_template_kwargs=values)
    found = tokenizer.decode(chat_ids([("user", "x")], tokenizer))
    assert found == f"\n{values['a']}/0.5/3/True"


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_unknown_variable_is_refused(tmp_path, name):
    """A misspelled one would be ignored, and the model would think."""
    template = {} if name == "qwen3" else {"chat_template": None}
    folder = str(write_tokenizer(name, tmp_path / "a", **template))
    with pytest.raises(ConfigError, match=r"data.chat_template_kwargs.thinking: .* does not read"):
        read_tokenizer(folder, chat_template_kwargs={"thinking": False})
