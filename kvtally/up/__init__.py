"""`kvtally up`: stores, engines and a router, from one file, on this machine or on several. `cli.up` is its command.

document (YAML, as written) ─▶ file (a Deployment: one machine's part) ─▶ plan (its processes; pure)
                                                     ─▶ host (can it run here?) ─▶ supervise ─▶ guard
"""
