"""A request's body: read once, as far as the router must know it, and written anew for each leg.

Only the top level is decoded; every value stays the bytes that the client sent (`Raw`), so nothing that changes
tokenization can be changed by the way. Owns which fields clients may not set, and how a prefill leg differs from the
request. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import Enum, auto

import msgspec
from msgspec import Raw

from kvtally.core.routing import Skip
from kvtally.errors import RouteError

Fields = dict[str, Raw]
Overlay = Mapping[str, object]  # None: the field is left out

# Addresses, block ids, salts and ranks: whoever sets these chooses instances, or reads what others cached.
RESERVED = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "cache_salt"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *("disagg_prefill_dp_rank", "routed_dp_rank", "data_parallel_rank"),
    }
)
IDS = "prompt_token_ids"  # beside the hand-off: where vLLM looks for what a chat's prompt was
NESTED = "vllm_xargs"  # the engine lays the members of this one beside its own `kv_transfer_params`

# One token, at once, and nothing but the prompt computed for it. `min_tokens` would be refused with one token.
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
# What a template or the engine may put at, or cut from, a prompt's beginning.
_ROOT_FIELDS = (
    *("model", "tools", "tool_choice", "documents", "reasoning_effort", "chat_template", "chat_template_kwargs"),
    *("add_special_tokens", "truncate_prompt_tokens", "truncation_side", "mm_processor_kwargs", "media_io_kwargs"),
    *("response_format", "suffix"),
)
# Answers with the prompt's text in them, or a prompt made of two texts: ids would not do.
_TEXTUAL = ("echo", "return_prompt_text", "suffix")

_object = msgspec.json.Decoder(Fields)
_array = msgspec.json.Decoder(list[Raw])
_numbers = msgspec.json.Decoder(list[int])


class Kind(Enum):
    """What a request's prompt is."""

    TEXT = auto()
    TOKENS = auto()
    MESSAGES = auto()
    BATCH = auto()
    OTHER = auto()


def read_fields(data: bytes) -> Fields:
    """The members of a JSON object. Raises RouteError KV-705 for anything else."""
    try:
        return _object.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RouteError(
            f"the body is not a JSON object: {error}", remedy="Send one.", status=400, code="KV-705"
        ) from error


def scrub(fields: Fields) -> list[str]:
    """Take out what clients may not set; the names of what was there. Raises RouteError where that cannot be known."""
    found = [name for name in fields if name in RESERVED]
    for name in found:
        del fields[name]
    nested_object = bytes(fields.get(NESTED, b""))
    if nested_object.startswith(b"{"):  # else the engine will say that it should be one
        members = read_fields(nested_object)  # names that are not UTF-8 would be good enough for Python's own parser
        nested = [name for name in members if name in RESERVED]
        if nested:
            for name in nested:
                del members[name]
            fields[NESTED] = Raw(msgspec.json.encode(members))
        found += [f"{NESTED}.{name}" for name in nested]
    return found


def prompt_of(fields: Fields) -> tuple[Kind, list[bytes]]:
    """What the prompt is, and its bytes in parts, so that a conversation's next turn begins with the same parts."""
    messages = fields.get("messages")
    if messages is not None:
        try:
            return Kind.MESSAGES, [bytes(message) for message in _array.decode(messages)]
        except msgspec.DecodeError:
            return Kind.OTHER, [bytes(messages)]
    is_plain = _is_set(fields, "prompt")
    prompt = _only(bytes(fields.get("prompt" if is_plain else "prompt_embeds", b"")))
    if is_plain and _is_set(fields, "prompt_embeds"):
        return Kind.BATCH, [prompt]  # the engine answers both
    if prompt.startswith(b'"'):
        return (Kind.TEXT if is_plain else Kind.OTHER), [prompt[1:-1]]
    if not prompt.startswith(b"["):
        return Kind.OTHER, [prompt]
    try:
        return Kind.TOKENS, [array("I", _numbers.decode(prompt)).tobytes()]
    except (msgspec.DecodeError, OverflowError):  # texts, lists of tokens, or something that the engine refuses
        return Kind.BATCH, [prompt]


def _only(prompt: bytes) -> bytes:
    """The prompt in a list of one, as many clients send it, which is no batch; anything else as it is."""
    if prompt.startswith(b"[") and prompt[1:].lstrip()[:1] in (b'"', b"["):
        members = _array.decode(prompt)
        return bytes(members[0]) if len(members) == 1 else prompt
    return prompt


def root_of(path: str, salt: str, fields: Fields) -> bytes:
    """What two prompts must have in common for either to be of use to the other."""
    return b"\0".join(
        [path.encode(), salt.encode(), *(bytes(fields[name]) if name in fields else b"" for name in _ROOT_FIELDS)]
    )


def skip_of(kind: Kind, fields: Fields, *, has_one_reader: bool) -> Skip | None:
    """Why prefill cannot help with this request, whatever its prompt is."""
    if kind is Kind.BATCH:
        return Skip.BATCH
    if _is_set(fields, "prompt_logprobs") or (_is_set(fields, "echo") and _is_set(fields, "logprobs")):
        return Skip.PROMPT_LOGPROBS
    if has_one_reader and (bytes(fields.get("n", b"1")) not in (b"1", b"null") or _is_set(fields, "use_beam_search")):
        return Skip.SEVERAL
    return None


def is_streamed(fields: Fields) -> bool:
    return _is_set(fields, "stream")


def prefill_overlay(fields: Fields) -> dict[str, object]:
    """What the prefill leg says differently."""
    overlay = dict(_ONE_TOKEN)
    if "max_completion_tokens" in fields:
        overlay["max_completion_tokens"] = 1
    return overlay


def handoff_overlay(kind: Kind, fields: Fields, ids: Raw | None, params: dict[str, object] | None) -> dict[str, object]:
    """What decode is told, and, where prefill said which tokens it saw (`ids`), what makes decode see the very same:
    the prompt itself, or, for messages, the place where vLLM looks for them; unless the text itself is needed."""
    overlay: dict[str, object] = {"kv_transfer_params": params}
    if ids is None or any(_is_set(fields, name) for name in _TEXTUAL):
        return overlay
    if kind is Kind.TEXT:
        overlay["prompt"] = ids
    elif kind is Kind.MESSAGES:
        overlay["kv_transfer_params"] = {**(params or {}), IDS: ids}
    return overlay


def encode(fields: Fields, overlay: Overlay) -> bytes:
    """The body of one leg."""
    members: dict[str, object] = {**fields, **overlay}
    return msgspec.json.encode({name: value for name, value in members.items() if value is not None})


def _is_set(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, b"null")) not in (b"null", b"false")
