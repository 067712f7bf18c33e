"""No prefill: instances compute prompts themselves, and say what they reused where they run our connector."""

from __future__ import annotations

from kvtally.router.flavours.kvtally import KVTally


class Plain(KVTally):
    """What decode is told without a hand-off; `open` and `close` are never called, as there is no prefill."""

    name = "plain"
