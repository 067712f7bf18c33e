"""What engines and routers answer over HTTP, decoded. Anything else than expected is a `TransportError`.

Used by `run` and by `doctor`, which ask the same servers different questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvtally.core.answers import margin
from kvtally.errors import TransportError
from kvtally.verify.http import Response, Server
from kvtally.verify.judge import Answer


class Instance(msgspec.Struct):
    instance: str  # host:port, and a path perhaps
    roles: list[str]
    store: str = ""  # its address


class Store(msgspec.Struct):
    address: str = ""  # by which other stores reach it, as it told the router; empty: they cannot


class Instances(msgspec.Struct):
    """What is read of the router's /instances."""

    instances: list[Instance]
    stores: dict[str, Store | str] = {}  # by the addresses that the instances have; text: from an older router

    @property
    def reached_by(self) -> dict[str, str]:
        """The address by which others reach a store, for each that told the router; empty if they cannot."""
        return {store: row.address for store, row in self.stores.items() if isinstance(row, Store)}

    def having(self, role: str) -> list[str]:
        return [f"http://{row.instance}" for row in self.instances if role in row.roles]


class Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct):
    data: list[Model]


class Tokenized(msgspec.Struct):
    tokens: list[int]


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    text: str = ""
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []


T = TypeVar("T")


def decode(server: Server, response: Response, kind: type[T]) -> T:
    if response.status != 200:
        raise TransportError(
            f"{server.url} said no: {failure(response)}",
            remedy="Check the model's name, the key and the engine's log.",
        )
    try:
        return msgspec.json.decode(response.body, type=kind)
    except msgspec.DecodeError as error:
        raise TransportError(
            f"{server.url} answered something else than a vLLM engine or a kvtally router would: {error}",
            remedy="Check the address.",
        ) from error


def failure(response: Response) -> str:
    text = " ".join(response.body.decode(errors="replace").split())
    return f"status {response.status}, {text[:500]}"


def samples(engine: Server) -> Iterator[tuple[str, dict[str, str], float]]:
    response = engine.call("/metrics")
    if response.status != 200:
        raise TransportError(f"{engine.url}/metrics: {failure(response)}", remedy="Give an engine's address: --direct.")
    try:
        for family in text_string_to_metric_families(response.body.decode()):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except ValueError as error:
        raise TransportError(
            f"{engine.url}/metrics cannot be read: {error}", remedy="Give an engine's address: --direct."
        ) from error


def read_answer(server: Server, response: Response) -> Answer:
    """Of a response, whole or streamed. Raises TransportError where it is neither."""
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line[6:] for line in response.body.splitlines() if line.startswith(b"data: ")]
        if not events or events.pop() != b"[DONE]":
            raise TransportError("the stream broke off", remedy="Look at the router's log.")
    else:
        events = [response.body]
    tokens: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    text = ""
    for event in events:
        for choice in decode(server, response._replace(body=event), _Completion).choices:
            text += choice.text
            found = choice.logprobs or _Logprobs()
            tokens += [_token(server, token) for token in found.tokens]
            logprobs += [value if value is not None else 0.0 for value in found.token_logprobs]
            margins += [margin((top or {}).values()) for top in found.top_logprobs]
    if not len(tokens) == len(logprobs) == len(margins) > 0:
        raise TransportError("the answer has no logprobs", remedy="Start the engines with --max-logprobs 2 or more.")
    return Answer(tokens=tokens, logprobs=logprobs, margins=margins, text=text)


def _token(server: Server, name: str) -> int:
    number = name.removeprefix("token_id:")
    if not (number.isascii() and number.isdecimal()):
        raise TransportError(
            f"{server.url} names tokens by their text, not by their number",
            remedy="Let return_tokens_as_token_ids pass.",
        )
    return int(number)
