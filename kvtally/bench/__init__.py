"""Measurements, each beside a limit or a peer of the same run. `cli.main` runs them; nothing else imports this package.

    store      tasks (its measuring process), store_report
    repeat     repeat_report        ┐
    prefetch   prefetch_report      ├ engine (vLLM's process)
    gpu        gpu_arms, gpu_copies, gpu_shapes, gpu_report
    route      route_parts (its fake engine, pass-through and load)

All use `command` (options, JSON or a page), `report` (rows and tables) and `daemon` (a store).
"""
