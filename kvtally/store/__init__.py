"""The store: one daemon per node that holds KV bytes for every engine on it."""
