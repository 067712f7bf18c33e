"""Test doubles that ship with the product: tiers and devices in memory, with faults drawn from a seed.

For tests and the simulator; nothing else in the product imports it.
"""
