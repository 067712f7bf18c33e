"""The flavours by name: each is a small class that knows one way in which prefill hands over to decode."""

from __future__ import annotations

from kvtally.router.flavours.base import Flavour
from kvtally.router.flavours.kvtally import KVTally
from kvtally.router.flavours.lmcache import LMCache
from kvtally.router.flavours.mooncake import Mooncake
from kvtally.router.flavours.nixl import Nixl, NixlPush
from kvtally.router.flavours.plain import Plain

FLAVOURS: dict[str, Flavour] = {
    flavour.name: flavour for flavour in (KVTally(), Nixl(), NixlPush(), Mooncake(), LMCache(), Plain())
}
