"""Pure logic: no I/O, no clock, no randomness of its own. Decisions are functions and small state machines that return data."""
