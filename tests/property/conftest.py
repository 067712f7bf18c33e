"""Hypothesis profiles: `default` keeps the whole suite to seconds; KVTALLY_HYPOTHESIS=thorough looks longer.

A thousand examples is about what fits under the time limit that pytest sets for one test on a busy machine.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadlines per example: the machines that run this are shared, and time is checked where it matters, in `bench`.
settings.register_profile("default", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1_000)
settings.load_profile(os.environ.get("KVTALLY_HYPOTHESIS", "default"))
