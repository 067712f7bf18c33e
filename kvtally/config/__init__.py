"""Settings: what they are, where they are given, and what the store, the connector and the router make of them.

    setting (kinds of values) ─▶ table (every setting, once) ─▶ options and their help, docs/operations.md
                                   └─▶ load (file, environment, flags) ─▶ StoreConfig, ConnectorConfig, RouterConfig

`units` and `instances` say how people write sizes, addresses and engines, `yaml_file` reads files, `sizes` and
`directories` say what this machine has. Neighbours: `cli` (left); `store.server`, `router.app` and `vllm.connector`
(right).
"""

from kvtally.config.load import (
    DEFAULT_FILE,
    FILE_VARIABLE,
    LONGEST_SOCKET_PATH_BYTES,
    ConnectorConfig,
    Flags,
    RouterConfig,
    Settings,
    Shown,
    StoreConfig,
    check_network,
    load,
)
from kvtally.config.setting import Origin, unknown

__all__ = [
    "DEFAULT_FILE",
    "FILE_VARIABLE",
    "LONGEST_SOCKET_PATH_BYTES",
    "ConnectorConfig",
    "Flags",
    "Origin",
    "RouterConfig",
    "Settings",
    "Shown",
    "StoreConfig",
    "check_network",
    "load",
    "unknown",
]
