"""`kvtally verify`: is the reuse that a router reports real? `cli.verify` is its command.

    probes (what is asked; pure) ─▶ run (asks, by `http`, `reading`) ─▶ judge (what it proves; pure) ◀─ reasons (words)

Never imports the router: it sees the router as a client does.
"""
