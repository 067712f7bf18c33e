"""Copies between an engine's memory and arena slots. One module per kind of memory, each with the same two functions:

    save(memory, runs, pieces, seed) -> checksum of what was written into the slot
    load(pieces, memory, runs, seed) -> checksum of what landed in the engine

`memory` is one rank's buffer, `runs` say which of its bytes belong to the object (`core.geometry`), `pieces` are the
slot's views in their order. With `seed` None nothing is hashed and the answer is None. Both raise ValueError for runs
that do not fit their memory or slot: those are our own bugs, never a store's fault.
"""
