"""The one definition of the protocol between a store and its clients: messages, frames, limits."""
