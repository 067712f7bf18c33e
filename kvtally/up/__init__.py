"""`kvtally up`: a store, engines and a router on this machine, from one file. `cli.up` is its command.

file (YAML → Deployment) ─▶ plan (Deployment → processes; pure) ─▶ host (can it run here?) ─▶ supervise ─▶ guard
"""
