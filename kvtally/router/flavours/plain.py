"""No prefill: instances compute prompts themselves. With our connector they say what they reused."""

from __future__ import annotations

from kvtally.router.flavours.kvtally import KVTally


class Plain(KVTally):
    """Decode is told its ticket. `open` and `close` are never called, since there is no prefill."""

    name = "plain"
