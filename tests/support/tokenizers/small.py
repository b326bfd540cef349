"""Small tokenizers built as those of five public models are, for the rules of `megadapo.tokens`.

Each has the steps, control tokens and template of its model, as far as they matter here, and a
vocabulary of single bytes or characters. One more has a Unigram model.
`TOKENIZERS` may have the models' own.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as steps
from tokenizers.processors import TemplateProcessing

TEMPLATES = Path(__file__).parent / "templates"
TOKENIZERS = Path(os.environ.get("MEGADAPO_TOKENIZERS", "build/tokenizers"))
"""Folder with a folder for each model's own tokenizer, which `make test-tokenizers` fills."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGES = [("a", "n"), ("d", "e"), ("t", "h"), ("th", "i"), ("i", "n"), ("o", "l"), ("1", "2")]


@dataclass(frozen=True)
class Kind:
    """Steps and tokens of one model's tokenizer."""

    model_type: str
    eos: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None
    adds_bos: bool = False
    normalized: bool = False
    """Whether the tokens that are not special are looked for in the normalised text."""
    stops: tuple[str, ...] = ()
    """Tokens in generation_config.json."""
    normalizer: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    """Further keys of tokenizer_config.json."""


KINDS = {
    "qwen3": Kind(
        "qwen3",
        eos="<|im_end|>",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=(
            *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<tool_response>"),
            *("</tool_response>", "<think>", "</think>"),
        ),
        stops=("<|im_end|>", "<|endoftext|>"),
        normalizer=normalizers.NFC(),
        config={"tokenizer_class": "Qwen2Tokenizer"},
    ),
    "llama3_1": Kind(
        "llama",
        eos="<|eot_id|>",
        special=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>"),
            *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ),
        bos="<|begin_of_text|>",
        adds_bos=True,
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        config={"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True},
    ),
    "deepseek_v3": Kind(
        "deepseek_v3",
        eos="<｜end▁of▁sentence｜>",
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<|EOT|>"),
        plain=(
            *(
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜tool▁outputs▁begin｜>",
                "<｜tool▁outputs▁end｜>",
            ),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁calls▁begin｜>"),
        ),
        bos="<｜begin▁of▁sentence｜>",
        normalized=True,
        config={"tokenizer_class": "LlamaTokenizerFast", "legacy": True},
    ),
    "gemma3": Kind(
        "gemma3_text",
        eos="<eos>",
        special=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        plain=(
            *("<unused0>", "\n", "\n\n", "\t", "▁▁", "▁▁▁", "<table>", "</table>", "<h1>"),
            "[multimodal]",
        ),
        bos="<bos>",
        adds_bos=True,
        stops=("<eos>", "<end_of_turn>"),
        normalizer=normalizers.Replace(" ", "▁"),
        config={"tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>", "pad_token": "<pad>"},
    ),
    "smollm2": Kind(
        "llama",
        eos="<|im_end|>",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"),
        # it is never added before a text
        bos="<|im_start|>",
        config={"tokenizer_class": "PreTrainedTokenizerFast"},
    ),
    # its vocabulary has the names of control tokens as pieces, which the model finds in any text
    "unigram": Kind(
        "llama",
        eos="</s>",
        special=("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        plain=("[tool]",),
        bos="<s>",
        adds_bos=True,
        stops=("</s>",),
        normalizer=normalizers.Replace(" ", "▁"),
        config={"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"},
    ),
}
OWN = tuple(name for name in KINDS if name != "unigram")
"""Kinds of public models, whose own tokenizers can be tested too."""


def write_tokenizer(name: str, folder: Path, **changes: object) -> Path:
    """Write the files of a small tokenizer; `changes`: of tokenizer_config.json."""
    kind = KINDS[name]
    build = {"gemma3": _gemma, "unigram": _unigram}.get(name, _byte_level)
    tokenizer = build(kind)
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in kind.special])
    tokenizer.add_tokens([AddedToken(one, normalized=kind.normalized) for one in kind.plain])
    if kind.adds_bos and kind.bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{kind.bos} $A", special_tokens=[(kind.bos, tokenizer.token_to_id(kind.bos))]
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    stops = [tokenizer.token_to_id(stop) for stop in kind.stops]
    files: dict[str, object] = {
        "tokenizer_config.json": {
            "bos_token": kind.bos,
            "eos_token": kind.eos,
            "chat_template": template,
            **kind.config,
            **changes,
        },
        "config.json": {"model_type": kind.model_type, "eos_token_id": stops[:1] or None},
        "generation_config.json": {"eos_token_id": stops[0] if len(stops) == 1 else stops},
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    if not stops:
        (folder / "generation_config.json").unlink()
    return folder


def _byte_level(kind: Kind) -> Tokenizer:
    letters = sorted(steps.ByteLevel.alphabet())
    vocabulary = [*letters, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate(vocabulary)}, MERGES))
    if kind.normalizer is not None:
        tokenizer.normalizer = kind.normalizer
    tokenizer.pre_tokenizer = steps.Sequence(
        [
            steps.Split(Regex(WORDS), "isolated"),
            steps.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gemma(kind: Kind) -> Tokenizer:
    """Return a tokenizer with characters, bytes for other characters, and its added tokens."""
    merges = [*MERGES, ("\n", "\n"), ("▁", "▁"), ("▁▁", "▁")]
    letters = [chr(code) for code in range(33, 127)] + ["▁"]
    vocabulary = [*kind.special, *kind.plain, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += [*letters, *("".join(pair) for pair in MERGES)]
    model = models.BPE(
        {one: i for i, one in enumerate(dict.fromkeys(vocabulary))},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = kind.normalizer
    tokenizer.pre_tokenizer = steps.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _unigram(kind: Kind) -> Tokenizer:
    """Return a tokenizer whose vocabulary has its added tokens, characters and bytes."""
    names = [*kind.special, *kind.plain]
    rest = [*(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), "▁", "an"]
    scores = [*((name, 0.0) for name in names), *((one, -2.0) for one in rest)]
    unknown = names.index("<unk>")
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=unknown, byte_fallback=True))
    tokenizer.normalizer = kind.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer
