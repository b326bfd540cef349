"""`megadapo doctor --template` says what a chat template would change."""

import json
from dataclasses import asdict, astuple

import pytest

from megadapo.cli import main, run_command
from megadapo.doctor.template import diagnose_template
from megadapo.errors import ConfigError
from tests.support.tokenizers.small import KINDS, write_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def diagnosed(tmp_path):
    """A function that returns the diagnosis of a small tokenizer."""

    def diagnose(name: str, **changes: object):
        return diagnose_template(str(write_tokenizer(name, tmp_path / "a", **changes)))

    return diagnose


def rows(table) -> dict[str, tuple[str, ...]]:
    return {first: tuple(rest) for first, *rest in map(astuple, table)}


@pytest.mark.parametrize("name", KINDS)
def test_small_tokenizers_are_healthy(diagnosed, name):
    """Gemma's template has no messages of tools; the Unigram one closes turns with no end."""
    found = diagnosed(name)
    warned = {"gemma3": "leave 'tool' out", "unigram": "closes turns with <|im_end|>, which is"}
    assert found.errors == [] and len(found.warnings) == (name in warned)
    assert warned.get(name, "") in "".join(found.warnings)
    ours = [one for one in found.facts["smuggled"] if one.way.startswith("megadapo")]
    assert len(ours) == (1 if name == "gemma3" else 2)
    assert all(one.special == one.others == 0 and one.examples == () for one in ours)
    naive = next(one for one in found.facts["smuggled"] if one.way == "apply_chat_template, user")
    assert naive.special > 0 and naive.examples
    assert {one.first for one in found.facts["glue"] if one.messages == "user"} == {"exact"}


def test_changed_turns_are_shown(diagnosed):
    qwen = rows(diagnosed("qwen3").facts["answers"])
    assert qwen["plain text, 'a b'"] == ("kept", "kept", r"becomes '<think>\n\n</think>\n\na b'")
    thought = next(row for name, row in qwen.items() if name.startswith("with a thought"))
    assert thought == ("becomes 'b'", "kept", "kept")
    assert qwen["'and then', sampled letter by letter"][:2] == ("other tokens",) * 2
    assert qwen["tool_calls, content empty"] == ("left out",) * 3
    gemma = rows(diagnosed("gemma3").facts["answers"])
    assert gemma[r"blanks at its ends, ' a\n'"] == ("becomes 'a'", "refused", "becomes 'a'")
    head = rows(
        diagnosed("smollm2", chat_template=CHATML[:-12] + "bot\n{% endif %}").facts["answers"]
    )
    assert head["plain text, 'a b'"][:2] == ("begins otherwise",) * 2


CALLS = "{% for c in m.tool_calls %}calc {{ c.function.arguments ARGUMENTS }}{% endfor %}"


@pytest.mark.parametrize(
    ("filters", "end", "result"),
    [
        ("| tojson", "<|im_end|>", "spelled anew"),
        ("| tojson | replace(' ', '')", "<|im_end|>", "kept"),
        # text plus a table is an error in Python, so the template gets the text
        ("+ ''", "<|im_end|>", "kept"),
        ("+ ''", "", "not closed"),
    ],
)
def test_tool_calls_of_servers_are_compared(diagnosed, filters, end, result):
    """A server reads the model's call, and the template writes it in its own way."""
    call = f"{{{{ m.content }}}}{CALLS.replace('ARGUMENTS', filters)}"
    end = f"{{{{ '{end}' if m.tool_calls else '<|im_end|>' }}}}"
    template = CHATML.replace("{{ m.content }}<|im_end|>", call + end)
    answers = rows(diagnosed("smollm2", chat_template=template).facts["answers"])
    assert answers["tool_calls, content empty"] == (result,) * 3


def test_second_turn_with_tools_may_differ(diagnosed):
    """DeepSeek's own template opens the list of outputs in the first turn alone."""
    first = "{{ '[' if m.role == 'tool' and loop.index0 == 2 else '' }}"
    template = CHATML.replace("{{ m.content", first + "{{ m.content")
    found = diagnosed("smollm2", chat_template=template)
    assert found.errors == []
    assert "(tool), (tool, tool), (tool, user) in another way" in found.warnings[0]
    assert {name: row[:2] for name, row in rows(found.facts["glue"]).items()} == {
        "user": ("exact", "exact"),
        **dict.fromkeys(("tool", "tool, tool", "tool, user"), ("exact", "differs")),
    }


def test_glue_that_depends_on_the_question_is_an_error(diagnosed):
    """No glue of such a template is right for all conversations."""
    template = CHATML + "{{ 'x' if messages[0].content == '0' else '' }}"
    found = diagnosed("smollm2", chat_template=template)
    assert "the glue of (user) is not the template's" in found.errors[0]


def test_ends_of_turns_are_compared(diagnosed, tmp_path):
    """A server of a base model never stops at the end of a turn."""
    folder = write_tokenizer("qwen3", tmp_path / "b", eos_token="<|endoftext|>")
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    found = diagnose_template(str(folder))
    assert "closes turns with <|im_end|>, which is neither" in found.warnings[0]
    close, eos, of_model, ours = found.facts["ends"].values()
    assert "<|im_end|>" in close and "<|endoftext|>" in eos and of_model == "none"
    assert ours == f"{close}, {eos}"
    assert diagnosed("qwen3").warnings == []


def test_exit_codes_and_json(tmp_path, capsys):
    """Exit code 1 tells a script that no environment of several turns can use the template."""
    folder = str(write_tokenizer("qwen3", tmp_path / "a"))
    assert main(["doctor", "--template", folder]) == 0
    said = capsys.readouterr().out
    assert "no problem" in said and "before user" in said and "</think>" in said
    assert main(["doctor", "--template", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["glue"][0]["first"] == "exact"
    bare = str(write_tokenizer("qwen3", tmp_path / "b", chat_template=None))
    assert main(["doctor", "--template", bare]) == 1
    said = capsys.readouterr().out
    assert said.count("is missing, and several turns need one") == 1 and "before user" not in said
    assert main(["doctor", "--template", str(tmp_path / "no-such")]) == 3
    with pytest.raises(ConfigError, match="leave out --node, --cluster and --folder"):
        run_command(["doctor", "--template", folder, "--node"])


def test_recipe_sets_the_variables_of_its_models_template(tmp_path, capsys):
    """Catches a diagnosis of Qwen3 with thoughts for a run without them."""
    folder = write_tokenizer("qwen3", tmp_path / "a")
    recipe = tmp_path / "recipe.toml"

    def diagnosed(variables):
        text = f'chat_template_kwargs = {variables}\n[model]\npath = "{folder}"\n'
        recipe.write_text(
            f'[data]\ntrain = "none.jsonl"\n{text}[run]\nfolder = "run"\nnum_steps = 1\n'
        )
        code = main(["doctor", "--template", str(recipe), "--json"])
        said = capsys.readouterr()
        return code, (json.loads(said.out) if code == 0 else said.err)

    code, found = diagnosed("{enable_thinking = false}")
    [plain] = [one for one in found["answers"] if one["answer"].startswith("plain text")]
    assert code == 0 and plain["before_user"] == "begins otherwise"
    assert diagnosed("{}")[1]["answers"] == json.loads(
        json.dumps([asdict(one) for one in diagnose_template(str(folder)).facts["answers"]])
    )
    code, said = diagnosed("{enable_thoughts = false}")
    assert code == 2 and "data.chat_template_kwargs.enable_thoughts" in said


def test_escape_sequences_are_not_printed(tmp_path, capsys):
    """A template from the Hub could write to the terminal."""
    template = CHATML.replace("<|im_start|>", "<|im_start|>\x1b[31m")
    folder = str(write_tokenizer("smollm2", tmp_path / "a", chat_template=template))
    assert main(["doctor", "--template", folder]) == 0
    said = capsys.readouterr().out
    assert "\x1b[31m" not in said and "[31m" in said
