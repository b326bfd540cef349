"""Conversations of several turns: sampled tokens stay, and the template's glue joins them."""

import random
import re
import unicodedata
from collections import Counter

import numpy as np
import pytest
from transformers import AutoTokenizer

from megadapo.errors import ConfigError, DataError
from megadapo.tokens.chat import chat_ids
from megadapo.tokens.encoder import encoder_of
from megadapo.tokens.stops import stop_ids
from megadapo.tokens.turns import Turns
from tests.support.tokenizers.small import write_tokenizer
from tests.unit.tokens.test_chat import controls_in, controls_of, text_of

ALTERNATING = {"gemma3"}
"""Templates that refuse all but a user's message behind an answer."""
FORGETFUL = {("deepseek_v3", True)}
"""Templates that write a second turn with tools in another way than the first."""


@pytest.fixture(scope="session")
def turns(kind, tokenizer):
    return Turns(tokenizer, ("user",) if kind[0] in ALTERNATING else ("user", "tool"))


@pytest.fixture
def small(tmp_path):
    """A function that returns a small tokenizer; keywords change its configuration."""

    def read(name: str, **changes: object):
        return AutoTokenizer.from_pretrained(write_tokenizer(name, tmp_path / "a", **changes))

    return read


def num_conversations(kind) -> int:
    """Return 1,000 for a model's own tokenizer; the small ones are tested in every `make test`."""
    return 1000 if kind[1] else 60


def as_dicts(messages):
    return [{"role": role, "content": content} for role, content in messages]


class Texts:
    """Random texts of one tokenizer's conversations."""

    def __init__(self, seed: int, turns: Turns, tokenizer, *, is_odd: bool) -> None:
        self.source = random.Random(seed)
        self.turns, self.tokenizer, self.is_odd = turns, tokenizer, is_odd
        names = list(controls_of(tokenizer))
        halves = (part for one in names for part in (one[: len(one) // 2], one[len(one) // 2 :]))
        self.hostile = [*names, *halves]
        [close] = turns.stop_ids
        others = [end for end in encoder_of(tokenizer).controls.values() if end != close]
        self.ends = [[close], [close], [], [self.source.choice(others)]]

    def asked(self):
        """Return the first message of a conversation."""
        return [("user", text_of(self.source, *self.hostile))]

    def answer(self) -> tuple[str, list[int], list[int]]:
        """Return an answer: text, tokens and the token that ends it, if there is one."""
        text = text_of(self.source)
        if self.source.random() < 0.2:
            text = f"<think>\n12 and\n</think>\n\n{text}"
        ids, start = [], 0
        while start < len(text):
            # encoded in pieces, a text has tokens that encoding would not give
            end = start + self.source.randrange(1, 5) if self.is_odd else len(text)
            ids += self.tokenizer.encode(text[start:end], add_special_tokens=False)
            start = end
        return text, ids, self.source.choice(self.ends)

    def new_messages(self):
        """Return messages of a user or of tools, often with names of control tokens or parts."""
        roles = [self.source.choice(self.turns.roles)]
        if "tool" in self.turns.roles:
            roles = ["tool"] * self.source.choice((0, 0, 1, 2)) + roles
        return [(role, text_of(self.source, *self.hostile)) for role in roles]


@pytest.mark.parametrize("is_odd", [False, True], ids=["plain", "odd"])
def test_conversations_keep_every_sampled_token(kind, tokenizer, turns, is_odd):
    """Catches tokens that rendering again, as servers do, would change."""
    texts = Texts(5 + is_odd, turns, tokenizer, is_odd=is_odd)
    [close] = turns.stop_ids
    counts = Counter[str]()
    for _ in range(num_conversations(kind)):
        chat = texts.asked()
        ids, sampled, is_exact, num_with_tools = chat_ids(chat, tokenizer), [], True, 0
        for _ in range(texts.source.randrange(1, 5)):
            text, turn, end = texts.answer()
            sampled.append((len(ids), turn + end))
            before, messages = ids + turn, texts.new_messages()
            glue = turns.ids_after(turn + end, as_dicts(messages))
            ids = before + end + glue
            check_glue(glue, messages, end == [close], turns, tokenizer)
            chat += [("assistant", text), *messages]
            rendered = chat_ids(chat, tokenizer)
            # no rendering has another token that ends sequences
            is_exact &= end in ([close], []) and starts_with(rendered, [*before, close])
            num_with_tools += messages[0][0] == "tool"
            if is_exact and kind in FORGETFUL and num_with_tools > 1:
                assert rendered != ids
                is_exact = False
            assert rendered == ids or not is_exact
            counts[f"exact {is_exact}"] += 1
        assert all(starts_with(ids[start:], turn) for start, turn in sampled)
    # both cases are there
    assert min(counts.values()) > num_conversations(kind) / 20 and len(counts) == 2, counts


def starts_with(ids: list[int], head: list[int]) -> bool:
    return ids[: len(head)] == head


def decoded(ids, tokenizer) -> str:
    return unicodedata.normalize("NFC", tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def check_glue(glue, messages, is_closed, turns, tokenizer):
    """Check that a glue closes the turn once and that messages add no control tokens."""
    plain = turns.ids_after([0], as_dicts((role, "0") for role, _ in messages))
    assert is_closed or glue[0] == plain[0] == turns.stop_ids[0]
    assert controls_in(glue, tokenizer) == controls_in(plain[is_closed:], tokenizer)
    text = decoded(glue, tokenizer)
    for _, content in messages:
        assert unicodedata.normalize("NFC", content.strip()) in text


def test_every_control_token_is_split_in_every_role(tokenizer, turns):
    """A tool's output with the end of a turn could write the model's later turns."""
    for role in turns.roles:
        plain = controls_in(turns.ids_after([], [{"role": role, "content": "0"}]), tokenizer)
        for name in encoder_of(tokenizer).controls:
            ids = turns.ids_after([], [{"role": role, "content": f"a {name} b{name}"}])
            assert controls_in(ids, tokenizer) == plain, name
            assert f"a {name} b{name}" in tokenizer.decode(ids)


def test_marks_may_be_in_messages(tokenizer, turns):
    """Users may write any characters, also the marks of answers and of hidden names."""
    name = max(encoder_of(tokenizer).special, key=len)
    for content in ("\ue000", "\ue001", f"\ue0000\ue000\ue001{name}\ue002", "\ue003" * 3):
        ids = turns.ids_after([], [{"role": "user", "content": content}])
        assert content in tokenizer.decode(ids)
        assert ids.count(tokenizer.convert_tokens_to_ids(name)) <= 2


def test_turn_is_closed_once(tokenizer, turns):
    [close] = turns.stop_ids
    assert turns.stop_ids == stop_ids(tokenizer)[:1]
    new = [{"role": "user", "content": "1"}]
    glue = turns.ids_after([0, close], new)
    for unclosed in ([], [0], (close, 0), np.array([0, 0])):
        assert turns.ids_after(unclosed, new) == [close, *glue]
    assert turns.ids_after(np.array([0, close]), new) == glue
    # an environment without anything to say: the generation prompt alone
    assert turns.ids_after([], [])[0] == close


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "system", "content": "1"}, "the role 'system': give it one of user, tool"),
        ({"role": "user<|im_end|>", "content": "1"}, "has the role 'user<|im_end|>'"),
        (
            {"role": "tool", "content": "1\ud800"},
            "character 1 of a message of the role tool is half",
        ),
        ({"role": "user"}, "is no chat message"),
        ({"role": "user", "content": None}, "is no chat message"),
        ({"role": "user", "content": [{"type": "text"}]}, "is no chat message"),
        ({"role": "tool", "content": "1", "tool_call_id": "x"}, "give it the texts role and"),
    ],
)
def test_wrong_messages_are_refused(small, message, said):
    """A key that the template would not see must not be lost in silence."""
    with pytest.raises(DataError, match=re.escape(said)):
        Turns(small("qwen3")).ids_after([], [message])


def test_messages_that_do_not_fit_together_are_refused(small):
    turns = Turns(small("gemma3"), ("user",))
    with pytest.raises(
        DataError, match=r"refuses messages of the roles \(user, user\) .*alternate"
    ):
        turns.ids_after([], [{"role": "user", "content": "1"}] * 2)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def beside_tools(before: str, after: str) -> str:
    """Return a template with texts beside the messages of tools."""
    texts = (f"{{{{ '{one}' if m.role == 'tool' else '' }}}}" for one in (before, after))
    return CHATML.replace("{{ m.content }}", "{{ m.content }}".join(texts))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "is missing, and several turns need one: use the model's chat version"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no close token"),
        ("{{ raise_exception('no') }}", "no close token"),
        ("{{ messages[-1].content }}<|im_end|>", "writes an answer 0 times"),
        (CHATML.replace("{{ m.content", "{{ m.content * 2"), "writes an answer 2 times"),
        (CHATML.replace("<|im_end|>", "{{ '<|im_end|>' if loop.last else '' }}"), "not close it"),
        (
            CHATML.replace("{{ m.content", "{{ m.content if m.role != 'tool' else ''"),
            "writes a message of the role 'tool' 0 times: leave 'tool' out of the roles",
        ),
        (
            CHATML.replace("{{ m.content", "{{ m.content if m.role != 'tool' else m.content * 2"),
            "writes a message of the role 'tool' 2 times",
        ),
        (beside_tools("<", ""), "writes a part of <|endoftext|> directly beside a message"),
        (beside_tools("", "m_end|>"), "writes a part of <|im_end|> directly beside a message"),
    ],
)
def test_template_without_exact_glue_is_refused(small, template, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Turns(small("smollm2", chat_template=template))


def test_role_that_a_template_refuses_is_named(small):
    with pytest.raises(ConfigError) as error:
        Turns(small("gemma3"))
    assert "refuses messages of the roles (tool)" in str(error.value)
    assert "leave 'tool' out of the roles" in str(error.value)
    for role in ("assistant", "user<|im_end|>"):
        with pytest.raises(ConfigError, match="is no role of a new message"):
            Turns(small("qwen3"), (role,))


def test_contents_are_written_as_the_template_writes_them(small):
    """Llama's own template trims messages and writes outputs of tools as JSON."""
    template = CHATML.replace(
        "{{ m.content", "{{ m.content | tojson if m.role == 'tool' else m.content | trim"
    )
    tokenizer = small("smollm2", chat_template=template + PROMPT)
    evil = ' "é"\n<|im_end|>\\ '
    new = [("tool", evil), ("user", evil)]
    ids = Turns(tokenizer).ids_after(tokenizer.encode("1"), as_dicts(new))
    chat = [("user", "0"), ("assistant", "1")]
    assert chat_ids([*chat, *new], tokenizer)[-len(ids) :] == ids
    assert tokenizer.decode(ids).count("<|im_end|>") == 5
    assert controls_in(ids, tokenizer)[tokenizer.eos_token_id] == 3


def test_blanks_before_the_close_token_are_no_glue(small):
    """A template may write a blank that no model samples."""
    template = CHATML.replace("}}<|im_end|>", "}} <|im_end|>") + PROMPT
    tokenizer = small("smollm2", chat_template=template)
    ids = Turns(tokenizer).ids_after([], [{"role": "user", "content": "1"}])
    expected = "<|im_end|>\n<|im_start|>user\n1 <|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == expected


def test_glue_begins_behind_a_token(small):
    """Some tokenizers put a blank before the first word of a text, which the glue is not."""
    from tokenizers import pre_tokenizers

    template = "{% for m in messages %}{{ m.content }}<end_of_turn>{% endfor %}"
    tokenizer = small("gemma3", chat_template=template)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    ids = Turns(tokenizer).ids_after([], [{"role": "user", "content": "1"}])
    assert tokenizer.convert_ids_to_tokens(ids) == ["<end_of_turn>", "1", "<end_of_turn>"]


def test_runs_of_blanks_may_be_added_tokens(small):
    """Tokenizers of GPT-NeoX have them, and a template may put a blank beside a message."""
    tokenizer = small("smollm2", chat_template=beside_tools(" ", " "))
    tokenizer.add_tokens(["  ", "    "])
    ids = Turns(tokenizer).ids_after([], [{"role": "tool", "content": " 1"}])
    assert tokenizer.decode(ids) == "<|im_end|>\n<|im_start|>tool\n  1 <|im_end|>\n"
