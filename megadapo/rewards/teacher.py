"""A teacher on a vLLM server: log-probs of the policy's responses, and checks before a run.

vLLM gives the log-prob of each prompt token (`prompt_logprobs`), so a prompt with its response is
sent as token ids. It takes them from the whole softmax at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from megadapo.data.batch import PackedBatch
from megadapo.errors import ConfigError, InfraError, MegadapoError
from megadapo.rewards.config import REQUEST_TIMEOUT_S
from megadapo.rewards.served import Client, NoAnswer, ServerAwayError

KEY = "algorithm.reference.server"
RETRIES = 9
"""Retries of a request in a run: with doubled pauses they wait for about 100 seconds."""
MAX_CONCURRENT = 16
IDS_PER_REQUEST = 4096
"""Token ids in one request for their text."""
BYTES_PER_TOKEN = 512
"""Bound on a token's part of the answer, with its text."""


class TeacherServer:
    """A client of one server."""

    def __init__(self, url: str, *, retries: int = RETRIES) -> None:
        self._url, self._retries = url.rstrip("/"), retries

    def logprobs(self, batch: PackedBatch) -> np.ndarray:
        """Return [T] float32 log-probs of the response tokens, NaN on prompts.

        Sequences without a loss are not sent and stay NaN.

        Raises:
            InfraError: the server does not answer, or not for every token.
        """
        found = np.full(len(batch.tokens), np.nan, dtype=np.float32)
        edges = batch.cu_seqlens.tolist()
        places = [
            (start, start + prompt, stop)
            for start, stop, prompt in zip(edges, edges[1:], batch.prompt_lengths, strict=False)
            if batch.loss_weights[start:stop].any()
        ]
        threads = ThreadPoolExecutor(MAX_CONCURRENT)
        try:
            tokens = [batch.tokens[start:stop].tolist() for start, _, stop in places]
            for (start, first, stop), values in zip(
                places, threads.map(self._of_sequence, tokens), strict=True
            ):
                found[first:stop] = values[first - start :]
        finally:
            # after a failure the others would wait for the server too
            threads.shutdown(cancel_futures=True)
        return found

    def check(
        self, decode: Callable[[list[int]], str], ids: Sequence[int], *, longest: int
    ) -> None:
        """Compare the server's tokens with the policy's, and its longest sequence.

        Args:
            decode: returns the text of the policy's tokens.
            ids: all tokens of the policy.
            longest: tokens of the run's longest sequence.

        Raises:
            ConfigError: they differ, a sequence is too long, or this is no vLLM server.
            InfraError: the server does not answer.
        """
        limit = self._post("/tokenize", {"prompt": "1"}).get("max_model_len")
        # the server always generates a token
        if isinstance(limit, int) and longest >= limit:
            raise ConfigError(
                f"{KEY}: the run's longest sequence of {longest} tokens and one more exceed the "
                f"server's max_model_len = {limit}"
            )
        for first in range(0, len(ids), IDS_PER_REQUEST):
            self._compare(decode, list(ids[first : first + IDS_PER_REQUEST]))

    def _compare(self, decode: Callable[[list[int]], str], ids: list[int]) -> None:
        expected = decode(ids)
        found = self._post("/detokenize", {"tokens": ids}).get("prompt")
        if found == expected:
            return
        if len(ids) > 1:
            middle = len(ids) // 2
            self._compare(decode, ids[:middle])
            self._compare(decode, ids[middle:])
            return
        raise ConfigError(
            f"{KEY} = {self._url} has not the tokenizer of model.path: token {ids[0]} is "
            f"{found!r} there and {expected!r} here; a teacher reads the policy's tokens"
        )

    def _of_sequence(self, tokens: list[int]) -> list[float]:
        """Return the log-prob of each token; NaN for the first."""
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self._post("/v1/completions", body, num_tokens=len(tokens), refused=InfraError)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            pairs = zip(tokens[1:], entries[1:], strict=True)
            values = [float(entry[str(token)]["logprob"]) for token, entry in pairs]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise InfraError(
                f"{KEY} = {self._url}: the answer has not one log-prob per token of the prompt "
                f"({type(error).__name__}: {error})"
            ) from None
        if not all(value <= 0.0 for value in values):
            raise InfraError(
                f"{KEY} = {self._url}: a log-prob is above 0 or NaN; start the server without "
                "--logprobs-mode"
            )
        return [float("nan"), *values]

    def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        num_tokens: int = 1,
        refused: type[MegadapoError] = ConfigError,
    ) -> dict[str, Any]:
        """Return the answer; raise `refused` if the server refuses the request."""
        client = Client(
            self._url + path,
            retries=self._retries,
            request_timeout_s=REQUEST_TIMEOUT_S,
            key_variable="OPENAI_API_KEY",
        )
        try:
            answer, _ = client.post(body, max_reply_bytes=num_tokens * BYTES_PER_TOKEN)
        except ServerAwayError as error:
            raise InfraError(f"{KEY}: {error}") from None
        except NoAnswer as error:
            raise refused(
                f"{KEY}: {error}: is it a vLLM server, and does OPENAI_API_KEY have its key?"
            ) from None
        return answer if isinstance(answer, dict) else {}
