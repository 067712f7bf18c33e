"""Which vLLM is this, and may we run in it? The connector API changes, so versions that were not tested are refused."""

from __future__ import annotations

import re

import vllm

from kvtally.errors import IncompatibleError

TESTED = ("0.32",)


def require_supported(*, allow_untested: bool) -> str:
    """The running version, if it was tested or the user insists."""
    version = vllm.__version__
    match = re.match(r"\d+\.\d+", version)
    series = match.group() if match else version
    if series not in TESTED and not allow_untested:
        raise IncompatibleError(
            f"kvtally has not been tested with vLLM {version} (tested: {', '.join(TESTED)})",
            remedy='Install a tested version, or set "allow_untested": true in kv_connector_extra_config to try it.',
            code="KV-207",
        )
    return version
