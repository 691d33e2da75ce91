"""Requests to a server of ours, and what is taken from its answers."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import httpx2

from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["Answer", "Asker", "Group"]


@attrs.frozen(kw_only=True)
class Answer:
    """One completion."""

    text: str
    tokens: int
    proposed: int
    accepted: int
    accept_rate: float | None
    """As the server says it; None where nothing was proposed."""
    decode_tokens_per_s: float | None
    """By the server's own clock: prompt, queue and HTTP left out."""
    enabled: bool
    """Whether it was decoded with the draft."""
    reason: str | None


@attrs.frozen(kw_only=True)
class Group:
    """Requests that were sent at a time."""

    answers: tuple[Answer, ...]
    seconds: float
    """From the first one's sending to the last one's end."""

    @property
    def tokens_per_s(self) -> float:
        """Generated ids of all of them, by the client's clock."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


class Asker:
    """Sends greedy completions to one server.

    Args:
        url: of the server, without a path.
        api_key: where it wants one.
        parallel: most requests at a time.
        local: whether it runs here, where no proxy stands in between.
        timeout_s: how long an answer may take.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        parallel: int = 1,
        local: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._url = url.rstrip("/")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        limits = httpx2.Limits(max_connections=parallel, max_keepalive_connections=parallel)
        self._client = httpx2.Client(headers=headers, limits=limits, timeout=timeout_s, trust_env=not local)
        self._pool = ThreadPoolExecutor(max_workers=parallel)

    def close(self) -> None:
        """Drop the connections."""
        self._pool.shutdown()
        self._client.close()

    def card(self) -> dict[str, Any]:
        """What the server says of its model.

        Raises:
            PosttrainllmError: it says something else.
        """
        body = self._json("GET", "/v1/models")
        try:
            return dict(body["data"][0])
        except (LookupError, TypeError, ValueError):
            raise PosttrainllmError(f"{self._url}/v1/models: expected a list of models") from None

    def ask(self, prompts: Sequence[Sequence[int]], count: int, *, speculative: bool | None) -> Group:
        """Send prompts at the same time and wait for all.

        Args:
            prompts: ids of each, as many as `parallel` at most.
            count: ids to generate for each.
            speculative: the field of the request; None leaves it out.

        Returns:
            The answers in the order of the prompts.

        Raises:
            PosttrainllmError: an answer is an error, or has other than `count` ids.
        """
        started = time.perf_counter()
        values = list(self._pool.map(lambda prompt: self.complete(prompt, count, speculative=speculative), prompts))
        seconds = time.perf_counter() - started
        answers = tuple(map(self._answer, values))
        for answer in answers:
            if answer.tokens != count:
                raise PosttrainllmError(f"{self._url}: got an answer of {answer.tokens} tokens, expected {count}")
        return Group(answers=answers, seconds=seconds)

    def complete(self, prompt: Sequence[int], count: int, *, speculative: bool | None = None) -> Any:
        """Send one prompt and wait for the whole answer.

        Args:
            prompt: ids.
            count: ids to generate; the end of a text is an id like any other.
            speculative: the field of the request; None leaves it out.

        Returns:
            The answer, as JSON holds it.

        Raises:
            PosttrainllmError: it is an error.
        """
        return self._json("POST", "/v1/completions", _body(prompt, count, speculative))

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._client.request(method, self._url + path, json=body)
            value = response.json()
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise PosttrainllmError(f"{self._url}{path}: {error or type(error).__name__}") from None
        except ValueError:
            raise PosttrainllmError(f"{self._url}{path}: got status {response.status_code} and no JSON") from None
        if response.status_code != httpx2.codes.OK:
            message = value.get("error") if isinstance(value, dict) else None
            message = message.get("message") if isinstance(message, dict) else message
            raise PosttrainllmError(f"{self._url}{path}: got status {response.status_code}, expected 200: {message}")
        return value

    def _answer(self, value: Any) -> Answer:
        try:
            usage, state, timings = value["usage"], value["speculative"], value["timings"]
            return Answer(
                text=str(value["choices"][0]["text"]),
                tokens=int(usage["completion_tokens"]),
                proposed=int(usage["draft_proposed"]),
                accepted=int(usage["draft_accepted"]),
                accept_rate=usage["accept_rate"],
                decode_tokens_per_s=timings["decode_tokens_per_s"],
                enabled=bool(state["enabled"]),
                reason=state["reason"],
            )
        except (LookupError, TypeError, ValueError) as error:
            raise PosttrainllmError(
                f"{self._url}: got no answer of `posttrainllm serve`: {type(error).__name__}: {error}"
            ) from None


def _body(prompt: Sequence[int], count: int, speculative: bool | None) -> dict[str, Any]:
    body = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return body if speculative is None else {**body, "speculative": speculative}
