"""Measurements, each beside a limit taken in the same run. Nothing else in the product imports this package."""
