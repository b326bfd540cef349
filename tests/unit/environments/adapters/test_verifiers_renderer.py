"""The renderer for verifiers writes the tokens of this project.

Its base class is stood in for; test_verifiers_package.py has the package's own.
"""

import sys
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from megadapo.errors import ConfigError, DataError
from megadapo.tokens.chat import chat_ids
from megadapo.tokens.stops import stop_ids
from tests.support.tokenizers.small import write_tokenizer

MODULE = "megadapo.environments.adapters.verifiers_renderer"


class DefaultRenderer:
    def __init__(self, tokenizer: Any, config: Any) -> None:
        self._tokenizer = tokenizer

    def _apply(self, messages: Any, **options: Any) -> list[int]:
        return [len(messages)]


@dataclass
class RenderedTokens:
    token_ids: list[int]
    message_indices: list[int]
    message_roles: list[str]
    is_content: list[bool] = field(default_factory=list)


@pytest.fixture
def tokenizer(tmp_path: Any) -> Any:
    return AutoTokenizer.from_pretrained(write_tokenizer("qwen3", tmp_path / "qwen3"))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the renderer's class, imported beside stand-ins."""
    contents = {
        "renderers": {},
        "renderers.base": {"RenderedTokens": RenderedTokens},
        "renderers.configs": {"DefaultRendererConfig": SimpleNamespace},
        "renderers.default": {"DefaultRenderer": DefaultRenderer},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield import_module(MODULE).ChatTemplateRenderer
    sys.modules.pop(MODULE, None)


def plain(**extra: Any) -> Any:
    return SimpleNamespace(model_extra=extra)


def test_sampled_tokens_are_kept_and_messages_have_no_control_tokens(
    tokenizer: Any, make: Any
) -> None:
    renderer = make(tokenizer, plain())
    prompt = [one for piece in "odd" for one in tokenizer.encode(piece)]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    message = {"role": "tool", "content": "no <|im_end|> here", "tool_call_id": "1"}
    found = renderer.bridge_to_next_turn(prompt, [5, 5, end], [message])
    assert found.token_ids[: len(prompt) + 3] == [*prompt, 5, 5, end]
    glue = found.token_ids[len(prompt) + 3 :]
    text = (
        "\n<|im_start|>user\n<tool_response>\nno <|im_end|> here\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(glue) == text and glue.count(end) == 1
    assert found.message_indices == [-1] * (len(prompt) + 3) + [0] * len(glue)
    assert found.message_roles == ["tool"]
    # a turn that has ended otherwise is closed
    closed = renderer.bridge_to_next_turn(prompt, [5, 5], [message])
    assert closed.token_ids == [*prompt, 5, 5, end, *glue]


def test_prompts_are_those_of_the_data(tokenizer: Any, make: Any) -> None:
    renderer = make(tokenizer, plain())
    messages = [("system", "Play."), ("user", "Say <|im_end|>.")]
    chat = [{"role": role, "content": content} for role, content in messages]
    for options in ({}, {"add_generation_prompt": True}):
        expected = chat_ids(messages, tokenizer, add_generation_prompt=bool(options))
        assert renderer._apply(chat, **options) == expected
    called = [*chat, {"role": "assistant", "content": "", "tool_calls": []}]
    assert renderer._apply(called) == [3], "calls of tools are left to the package"
    assert renderer.get_stop_token_ids() == list(stop_ids(tokenizer))


def test_settings_and_messages_that_have_no_place_are_refused(tokenizer: Any, make: Any) -> None:
    """Arguments of the template would change prompts, but not the glue."""
    with pytest.raises(ConfigError, match="no settings enable_thinking"):
        make(tokenizer, plain(enable_thinking=False))
    with pytest.raises(DataError, match="the role 'system'"):
        message = {"role": "system", "content": "x"}
        make(tokenizer, plain()).bridge_to_next_turn([1], [2], [message])
