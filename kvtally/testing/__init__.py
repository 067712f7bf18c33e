"""Test doubles that ship with the product: tiers, devices, engines and whole nodes, with faults drawn from a seed.

Only tests, the demos and the benches import it.
"""
