"""The first training prompt as the model reads it, which a dry run shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megadapo.config import RunConfig
from megadapo.config.data_checks import is_hub_dataset
from megadapo.config.preflight import model_folder
from megadapo.data.prompts import Prompt, render
from megadapo.data.rows import Row
from megadapo.data.sources import is_built_in, read_rows
from megadapo.errors import DataError
from megadapo.tokens.chat import control_name
from megadapo.tokens.stops import stop_ids
from megadapo.tokens.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_IDS = 512
"""Number of token ids that are shown."""


def first_prompt(config: RunConfig) -> list[str]:
    """Return lines about the first prompt: columns, text, tokens, gold answer and stop tokens."""
    key, one = next(iter(config.data.train_sources.items()))
    if not is_built_in(one.source) and is_hub_dataset(one.source):
        return [f"no prompt is shown: {key} = {one.source} is on the Hub"]
    folder = model_folder(config.model)
    if folder is None or not _has_tokenizer(folder):
        return [f"no prompt is shown: model.path = {config.model.path} has no tokenizer here"]
    row = next(read_rows(one.source, config.data.columns))
    gold = config.reward.check_gold(row.ground_truth, row.data_source)
    prompt = Prompt(row.place, row.messages, gold, row.data_source)
    tokenizer = read_tokenizer(str(folder), chat_template_kwargs=config.data.chat_template_kwargs)
    return list(_lines(prompt, row, tokenizer))


def _lines(prompt: Prompt, row: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    ids = render(prompt, tokenizer)
    names = row.names
    pattern = f" by the pattern {names.pattern}" if names.pattern else ""
    yield f"{row.place}: the prompt is column {names.prompt}"
    yield f"the gold answer is column {names.ground_truth}{pattern}: {prompt.ground_truth!r:.200}"
    yield f"the data_source is {prompt.data_source!r}"
    text = cast(str, tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    template = "by the chat template" if tokenizer.chat_template else "without a chat template"
    yield f"the prompt has {len(ids)} tokens, {template}:"
    yield text
    more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
    yield f"token ids: {' '.join(map(str, ids[:MAX_IDS]))}{more}"
    if name := control_name(prompt.messages, tokenizer):
        yield f"{name} in the prompt is plain text; only a chat template writes control tokens"
    ends = [f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in stop_ids(tokenizer)]
    yield f"a response ends at {', '.join(ends) or 'rollout.max_response_tokens alone'}"


def _has_tokenizer(folder: Path) -> bool:
    """Return whether a folder's tokenizer has a vocabulary; the check imports nothing heavy."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return True
    try:
        return "model" in json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from error
