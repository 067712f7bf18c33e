"""Pure logic: no I/O, no clock, no randomness of its own. Functions and small state machines that return data."""
