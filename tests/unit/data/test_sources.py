"""Sources of rows: missing or damaged sources without a clear error."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megadapo.data import sources
from megadapo.data.arithmetic import generate
from megadapo.data.config import DataConfig
from megadapo.data.sources import read_rows, whole_rows
from megadapo.errors import ConfigError, DataError
from tests.support.processes.running import run_python
from tests.support.rows import write_parquet

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def num_rows(source: object) -> int:
    return sum(1 for _ in read_rows(str(source)))


def test_folder_gives_rows_of_all_files_in_order(tmp_path) -> None:
    problems = generate("train", 30, seed=0)
    (tmp_path / "part").mkdir()
    write_parquet(tmp_path / "part" / "b.parquet", problems[10:20])
    write_parquet(tmp_path / "a.parquet", problems[:10])
    lines = [json.dumps(problem.row()) for problem in problems[20:]]
    (tmp_path / "z.jsonl").write_text("\n\n".join(lines) + "\n  \n")
    (tmp_path / "README.md").write_text("not data")
    rows = list(read_rows(str(tmp_path)))
    assert [r.columns["prompt"][0]["content"] for r in rows] == [p.text for p in problems]
    assert rows[12].place == f"{tmp_path}/part/b.parquet, row 2"
    assert rows[21].place == f"{tmp_path}/z.jsonl, line 3"


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train.jsonl", "test.jsonl"), "train, test"),
        (("train.jsonl", "val.jsonl"), "train, validation"),
        (("Train-00000-of-00001.jsonl", "dev-00000-of-00001.jsonl"), "train, validation"),
        (("a_train.jsonl", "a_eval.jsonl"), "train, eval"),
        (("train/a.jsonl", "test/b.jsonl"), "train, test"),
        (("latest_train.jsonl", "train_contest.jsonl"), None),
    ],
)
def test_folder_with_several_splits_is_rejected(
    tmp_path, names: tuple[str, ...], splits: str | None
) -> None:
    """Otherwise a run trains on the data that it is evaluated on."""
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "data" / name).write_text('{"prompt": "q", "answer": "1"}\n')
    problem = pytest.raises(DataError, match=f"has the splits {splits}; name the file or folder")
    with problem if splits else nullcontext():
        assert len(list(read_rows(str(tmp_path / "data")))) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.parquet", "there is no file or folder missing.parquet"),
        ("data/missing.jsonl", "there is no file or folder data/missing.jsonl"),
        ("here/gsm8k/missing.jsonl", "there is no file or folder here/gsm8k/missing.jsonl"),
        ("./org/name", "there is no file or folder ./org/name"),
        ("/nowhere/at/all", "there is no file or folder /nowhere/at/all"),
        ("not a source", "there is no file or folder not a source"),
        ("", "there is no file or folder|has no"),
    ],
)
def test_missing_source(tmp_path, monkeypatch, source: str, message: str) -> None:
    """A file in a folder of this machine is never looked for on the Hub, which would wait."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        num_rows(source)


def test_csv_rows_are_texts_under_the_names_of_the_first_line(tmp_path) -> None:
    source = tmp_path / "a.csv"
    source.write_text('\ufeffquestion,answer\n"1,5 + 1\n= ?","2,5"\n2 + 2 = ?,4\n', "utf-8")
    rows = [(row.messages, row.ground_truth) for row in read_rows(str(source))]
    assert rows == [((("user", "1,5 + 1\n= ?"),), "2,5"), ((("user", "2 + 2 = ?"),), "4")]
    for wrong, message in (
        ("question,answer\n1,2,3\n", "row 0: more values than the first line has"),
        ('question,answer\n"1,2\n', "cannot be read as CSV: unexpected end of data"),
    ):
        source.write_text(wrong)
        with pytest.raises(DataError, match=message):
            list(read_rows(str(source)))


def test_other_file_types_are_rejected(tmp_path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n")
    with pytest.raises(DataError, match=r"neither a .parquet, a .jsonl nor a .csv file"):
        num_rows(tmp_path / "a.tsv")
    with pytest.raises(DataError, match=r"has no .parquet, .jsonl or .csv file"):
        num_rows(tmp_path)


def test_damaged_parquet(tmp_path) -> None:
    write_parquet(tmp_path / "a.parquet", generate("train", 100, seed=0))
    whole = (tmp_path / "a.parquet").read_bytes()
    middle = bytearray(whole)
    middle[20:200] = b"\xff" * 180
    for damaged in (b"", b"PAR1", whole[:-20], whole[100:], bytes(middle)):
        (tmp_path / "a.parquet").write_bytes(damaged)
        for read in (num_rows, lambda file: [*whole_rows(str(file))]):
            with pytest.raises(DataError, match=r"a\.parquet cannot be read as parquet"):
                read(tmp_path / "a.parquet")


def test_missing_columns(tmp_path) -> None:
    pq.write_table(pa.table({"question": ["1+1"], "prompt": ["x"]}), tmp_path / "a.parquet")
    looked = "looked for reward_model.ground_truth, ground_truth, answer or solution, but there are"
    with pytest.raises(DataError, match=f"{looked} question, prompt; name it with data.columns"):
        num_rows(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "line",
    [b"{", b"not json", b"\xff\xfe", b'{"a": 1} {"b": 2}', b"[" * 100_000, b"[1]", b"null", b'"x"'],
)
def test_damaged_line(tmp_path, line: bytes) -> None:
    good = json.dumps(generate("train", 1, seed=0)[0].row()).encode()
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not"):
        num_rows(tmp_path / "a.jsonl")


def test_endless_line_is_not_read_whole(tmp_path, monkeypatch) -> None:
    """A file of zeros would fill the memory of the driver."""
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    good = json.dumps(generate("train", 1, seed=0)[0].row()).encode()
    assert len(good) < 999
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + b"0" * 5000)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: longer than"):
        num_rows(tmp_path / "a.jsonl")


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's protocol that downloads a dataset."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/org/sums/revision/"):
            names = [{"rfilename": name} for name in self.files]
            self._reply(json.dumps({"id": "org/sums", "sha": COMMIT, "siblings": names}).encode())
        elif self.path.startswith("/api/datasets/org/sums/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": digest(body)}
                for name, body in self.files.items()
            ]
            self._reply(json.dumps(entries).encode())
        elif self.path.split("/resolve/")[0] == "/datasets/org/sums":
            self._reply(self.files[self.path.split("/resolve/")[1].split("/", 1)[1]])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{digest(body)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub(tmp_path) -> Iterator[str]:
    """A Hub on loopback with one dataset, org/sums: two folders of one parquet file each."""
    files = {"README.md": b"# sums"}
    for num, name in ((3, "small/sums.parquet"), (5, "large/sums.parquet")):
        write_parquet(tmp_path / "file.parquet", generate("train", num, seed=0))
        files[name] = (tmp_path / "file.parquet").read_bytes()
    handler = type("HubWithFiles", (Hub,), {"files": files})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def read_from_hub(endpoint: str, cache: Path, *sources: str, **environment: str) -> list[str]:
    """Read in a fresh process: huggingface_hub reads its settings once, when it is imported."""
    program = (
        "import sys\n"
        "from megadapo.data.sources import read_rows\n"
        "from megadapo.errors import MegadapoError\n"
        "for source in sys.argv[1:]:\n"
        "    try:\n        print(sum(1 for _ in read_rows(source)))\n"
        "    except MegadapoError as error:\n"
        "        print(type(error).__name__, repr(str(error)))\n"
    )
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "*"}
    return run_python(program, *sources, **environment).stdout.splitlines()


def test_hub_dataset_folder_and_file(hub: str, tmp_path) -> None:
    sources = ("org/sums", "org/sums/large", f"org/sums@{COMMIT}/small/sums.parquet")
    *numbers, missing, unknown = read_from_hub(
        hub, tmp_path / "cache", *sources, "org/sums/medium", "org/other"
    )
    assert numbers == ["8", "5", "3"]
    assert "has no file or folder medium" in missing
    assert "org/other is no local file or folder, and the Hub dataset org/other" in unknown
    assert unknown.startswith("DataError")


def test_only_an_unreachable_hub_is_worth_another_start(hub: str, tmp_path) -> None:
    cache = tmp_path / "cache"
    (refused,) = read_from_hub("http://127.0.0.1:9", cache, "org/sums")
    assert "org/sums is no local file or folder, and the Hub dataset org/sums" in refused
    (offline,) = read_from_hub(hub, cache, "org/sums", HF_HUB_OFFLINE="1")
    assert [text.split()[0] for text in (refused, offline)] == ["InfraError", "DataError"]


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"train": " "}, "data.train"),
        ({"held_out": ""}, "data.held_out"),
        ({"held_out": {}}, "data.held_out is an empty table"),
        ({"held_out": {"aime24": "a", "aime25": " "}}, "data.held_out.aime25 is empty"),
        ({"held_out": {"a/b": "a"}}, "data.held_out: 'a/b' cannot be a name"),
        ({"train": {}}, "data.train is an empty table"),
        ({"train": {"math": "a", "code": {"source": ""}}}, "data.train.code is empty"),
        ({"train": {"math": {"source": "a", "weight": -1.0}}}, "data.train.math.weight = -1 must"),
        ({"train": {"math": {"source": "a", "weight": 0.0}}}, "data.train.math.weight = 0 must"),
        ({"max_prompt_tokens": 0}, "data.max_prompt_tokens"),
    ],
)
def test_wrong_config_value_names_its_key(wrong: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        DataConfig(**({"train": "arithmetic:train:8"} | wrong))
