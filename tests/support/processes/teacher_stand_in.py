"""A small HTTP server that answers a teacher's requests in vLLM's form."""

from tests.support.processes.fake_server import FakeServer, Reply

LIMIT = 64


def logprob(tokens: list[int], place: int) -> float:
    """Depends on everything before a token, as a model's does."""
    return -float(sum(tokens[: place + 1])) / 100.0


class TeacherStandIn(FakeServer):
    """A server with one character per token; `damage` changes its entries."""

    def __init__(self) -> None:
        super().__init__()
        self.num_busy, self.first = 0, "a"
        self.damage = lambda entries: entries

    def answer(self, path: str, body: dict) -> Reply:
        if path == "/tokenize":
            return 200, {"tokens": [1], "count": 1, "max_model_len": LIMIT}
        if path == "/detokenize":
            return 200, {"prompt": "".join(chr(ord(self.first) + n) for n in body["tokens"])}
        if path != "/v1/completions":
            return 404, {}
        if self.num_busy:
            self.num_busy -= 1
            return 503, {}
        tokens = body["prompt"]
        assert body["prompt_logprobs"] == 0 and body["max_tokens"] == 1
        entries = [None] + [
            {str(token): {"logprob": logprob(tokens, place), "rank": 1, "decoded_token": "x"}}
            for place, token in enumerate(tokens)
            if place
        ]
        return 200, {"choices": [{"index": 0, "prompt_logprobs": self.damage(entries)}]}
