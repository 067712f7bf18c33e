"""Test doubles that ship with the product: tiers and devices in memory, with faults drawn from a seed.

For tests, the simulator and `kvtally demo` (a synthetic engine); nothing else in the product imports it.
"""
