"""A request's body: read once, as far as the router needs it, and written anew for each leg.

Only the top level is decoded. Every value stays the bytes that the client sent (`Raw`), so the router cannot change
how the engine tokenizes it. Owns which fields clients may not set, and how a prefill leg differs from the request.

Nothing here builds more objects than `elements` allows, whatever a client sends: where a list or an object may be
large, msgspec skips its elements instead of returning them. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

import msgspec
from msgspec import Raw

from kvtally.core.routing import Print, Skip, prints_of
from kvtally.errors import RouteError
from kvtally.router import elements

Fields = dict[str, Raw]
Overlay = Mapping[str, object]  # None: the field is left out

# Addresses, block ids, salts and ranks. A client that sets them chooses instances, or reads what others cached.
RESERVED = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "cache_salt"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *("disagg_prefill_dp_rank", "routed_dp_rank", "data_parallel_rank"),
    }
)
IDS = "prompt_token_ids"  # beside the hand-off; vLLM takes a chat's tokens from there
CHAT_PATH = "/v1/chat/completions"
NESTED = "vllm_xargs"  # the engine treats members of this one like `kv_transfer_params`

# Prefill generates one token, and computes nothing but the prompt for it. vLLM refuses `min_tokens` above one token.
_ONE_TOKEN: Overlay = {
    "max_tokens": 1,
    "stream": False,
    "n": None,
    "best_of": None,
    "use_beam_search": None,
    "stream_options": None,
    "min_tokens": None,
    "min_completion_tokens": None,
    "logprobs": None,
    "top_logprobs": None,
    "logprob_token_ids": None,
    "echo": None,
    "return_token_ids": True,
}
# Fields with which a template or the engine changes the beginning of a prompt.
_ROOT_FIELDS = (
    *("model", "tools", "tool_choice", "documents", "reasoning_effort", "chat_template", "chat_template_kwargs"),
    *("add_special_tokens", "truncate_prompt_tokens", "truncation_side", "mm_processor_kwargs", "media_io_kwargs"),
    *("response_format", "suffix"),
)
# Fields that need the prompt's text: token ids would not do.
_TEXTUAL = ("echo", "return_prompt_text", "suffix")

SMALL_BYTES = 64 * 1024
MOST_PARTS = 4_096  # messages that are told apart; a prompt of more is one part
IDS_BYTES = 64 * 1024  # of a list of token ids, read at a time

_ABSENT = Raw()


# msgspec fills these from the front of a JSON array, or by a JSON object's names, and skips everything else unbuilt.
class _Two(msgspec.Struct, array_like=True):
    first: Raw = _ABSENT
    second: Raw = _ABSENT


_Many = msgspec.defstruct("_Many", [(f"_{n}", Raw, _ABSENT) for n in range(MOST_PARTS + 1)], array_like=True)
_Reserved = msgspec.defstruct("_Reserved", [(name, Raw, _ABSENT) for name in sorted(RESERVED)])

_object = msgspec.json.Decoder(Fields)
_array = msgspec.json.Decoder(list[Raw])
_two = msgspec.json.Decoder(_Two)
_many = msgspec.json.Decoder(_Many)
_reserved = msgspec.json.Decoder(_Reserved)
_numbers = msgspec.json.Decoder(list[int])


class Kind(Enum):
    """What a request's prompt is."""

    TEXT = auto()
    TOKENS = auto()
    MESSAGES = auto()
    BATCH = auto()
    OTHER = auto()


class Understood(NamedTuple):
    """Everything that the router reads from a body."""

    fields: Fields
    reserved: list[str]  # fields that the client may not set; they are no longer in `fields`
    kind: Kind = Kind.OTHER
    prints: Sequence[Print] = ()


def understand(data: bytes, *, path: str, salt: str, is_generating: bool) -> Understood:
    """Take a body apart. Raises RouteError KV-705 unless it is a JSON object without too many elements."""
    fields = read_fields(data)
    reserved = scrub(fields)
    if not is_generating:
        return Understood(fields, reserved)
    kind, parts = prompt_of(fields, is_chat=path == CHAT_PATH)
    return Understood(fields, reserved, kind, prints_of(root_of(path, salt, fields), parts))


def read_fields(data: bytes) -> Fields:
    """The members of a JSON object. Raises RouteError KV-705 for anything else, or for too many elements."""
    elements.check(data)
    try:
        return _object.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RouteError(
            f"the body is not a JSON object: {error}", remedy="Send one.", status=400, code="KV-705"
        ) from error


def scrub(fields: Fields) -> list[str]:
    """Take out the fields that clients may not set, and return their names. Raises RouteError for unreadable ones."""
    found = [name for name in fields if name in RESERVED]
    for name in found:
        del fields[name]
    nested_object = fields.get(NESTED, _ABSENT)
    if _starts(nested_object, b"{"):  # the engine refuses anything else itself
        told = _reserved.decode(nested_object)
        nested = [name for name in _reserved.type.__struct_fields__ if getattr(told, name) is not _ABSENT]
        if nested:
            members = read_fields(bytes(nested_object))
            for name in nested:
                del members[name]
            fields[NESTED] = Raw(msgspec.json.encode(members))
        found += [f"{NESTED}.{name}" for name in nested]
    return found


def prompt_of(fields: Fields, *, is_chat: bool) -> tuple[Kind, list[memoryview]]:
    """The kind of prompt, and its bytes in parts. The next turn of a conversation begins with the same parts.

    The engine reads `messages` for a chat and `prompt` for a completion, and ignores the other. So does this."""
    if is_chat:
        messages = fields.get("messages", _ABSENT)
        if not _starts(messages, b"["):
            return Kind.OTHER, [memoryview(messages)]
        return Kind.MESSAGES, _parts(messages)
    is_plain = _is_set(fields, "prompt")
    prompt = _only(fields.get("prompt" if is_plain else "prompt_embeds", _ABSENT))
    view = memoryview(prompt)
    if is_plain and _is_set(fields, "prompt_embeds"):
        return Kind.BATCH, [view]  # the engine answers both of them
    if _starts(prompt, b'"'):
        return (Kind.TEXT if is_plain else Kind.OTHER), [view[1:-1]]
    if not _starts(prompt, b"["):
        return Kind.OTHER, [view]
    ids = _ids(bytes(prompt))
    return (Kind.BATCH, [view]) if ids is None else (Kind.TOKENS, [memoryview(ids).cast("B")])


def _parts(messages: Raw) -> list[memoryview]:
    """Each message as one part. If there are very many, all of them are one part."""
    whole = memoryview(messages)
    if len(whole) <= SMALL_BYTES and bytes(whole).count(b",") < elements.FEW:  # the usual case, and faster
        return [memoryview(message) for message in _array.decode(messages)]
    found = msgspec.structs.astuple(_many.decode(messages))
    parts = [memoryview(message) for message in found if message is not _ABSENT]
    return parts if len(parts) <= MOST_PARTS else [whole]


def _ids(prompt: bytes) -> array[int] | None:
    """The token ids in a JSON array; None if it holds anything else.

    It is read a piece at a time: a list of a million Python integers takes five times as much memory as its text."""
    ids = array("I")
    start, end = 1, len(prompt) - 1
    while start < end:
        cut = prompt.find(b",", start + IDS_BYTES, end)
        cut = end if cut < 0 else cut
        try:
            ids.extend(_numbers.decode(b"[%b]" % prompt[start:cut]))
        except (msgspec.DecodeError, OverflowError, TypeError):  # texts, lists of ids, or nonsense
            return None
        start = cut + 1
    return ids


def _only(prompt: Raw) -> Raw:
    """Many clients send one prompt in a list of one, which is not a batch. Unwraps it; returns others as they are."""
    if _starts(prompt, b"[") and bytes(memoryview(prompt)[1:64]).lstrip()[:1] in (b'"', b"["):
        members = _two.decode(prompt)
        return members.first if members.second is _ABSENT else prompt
    return prompt


def _starts(value: Raw, first: bytes) -> bool:
    return bytes(memoryview(value)[:1]) == first


def root_of(path: str, salt: str, fields: Fields) -> bytes:
    """Everything that two requests must have in common to share a beginning of their prompts."""
    return b"\0".join([path.encode(), salt.encode(), *[fields.get(name, b"") for name in _ROOT_FIELDS]])


def skip_of(kind: Kind, fields: Fields, *, has_one_reader: bool) -> Skip | None:
    """Why prefill cannot help with this request, however long its prompt is."""
    if kind is Kind.BATCH:
        return Skip.BATCH
    if _is_set(fields, "prompt_logprobs") or (_is_set(fields, "echo") and _is_set(fields, "logprobs")):
        return Skip.PROMPT_LOGPROBS
    if has_one_reader and (_word(fields, "n") not in (b"1", b"null") or _is_set(fields, "use_beam_search")):
        return Skip.SEVERAL
    return None


def is_streamed(fields: Fields) -> bool:
    return _is_set(fields, "stream")


def prefill_overlay(fields: Fields) -> dict[str, object]:
    """The fields in which the prefill leg differs from the request."""
    overlay = dict(_ONE_TOKEN)
    if "max_completion_tokens" in fields:
        overlay["max_completion_tokens"] = 1
    return overlay


def handoff_overlay(kind: Kind, fields: Fields, ids: Raw | None, params: dict[str, object] | None) -> dict[str, object]:
    """The fields in which the decode leg differs from the request: the hand-off, and prefill's token ids.

    With the ids decode sees exactly the tokens that prefill saw. For a completion they replace the prompt; for a chat
    they go where vLLM looks for them; and where decode needs the text, they are left out."""
    overlay: dict[str, object] = {"kv_transfer_params": params}
    if ids is None or any(_is_set(fields, name) for name in _TEXTUAL):
        return overlay
    if kind is Kind.TEXT:
        overlay["prompt"] = ids
    elif kind is Kind.MESSAGES:
        overlay["kv_transfer_params"] = {**(params or {}), IDS: ids}
    return overlay


def encode(fields: Fields, overlay: Overlay) -> bytes:
    """Write the body of one leg."""
    members: dict[str, object] = {**fields, **overlay}
    return msgspec.json.encode({name: value for name, value in members.items() if value is not None})


def _is_set(fields: Fields, name: str) -> bool:
    return _word(fields, name) not in (b"null", b"false")


def _word(fields: Fields, name: str) -> bytes:
    """The first bytes of a value: enough to compare it with `null`, `false` or a digit, however long it is."""
    return bytes(memoryview(fields[name])[:6]) if name in fields else b"null"
