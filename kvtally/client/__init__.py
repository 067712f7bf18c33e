"""What an engine or a tool uses to talk to a store.

StoreClient (`store_client`) ─▶ Link (`link`): calls, deadlines, reconnecting ─▶ Connection (`transport`): one socket
   └─▶ Lease, ReadSlot, Put (`handles`): what replies become
"""

from kvtally.client.handles import Lease, Put, ReadSlot, SharedLease
from kvtally.client.link import Call, Miss
from kvtally.client.store_client import TIMEOUT_S, StoreClient, question

__all__ = ["TIMEOUT_S", "Call", "Lease", "Miss", "Put", "ReadSlot", "SharedLease", "StoreClient", "question"]
