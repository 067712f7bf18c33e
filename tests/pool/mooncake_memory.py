"""A process that gives a Mooncake cluster memory: python mooncake_memory.py MASTER BYTES."""

import sys
import threading

from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"failed: {code}", flush=True)
threading.Event().wait()
