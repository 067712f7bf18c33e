"""The table of settings: each stands here once, with the words that `--help` and `docs/operations.md` print.

The spelling of a setting in the file (`store: {memory: 8GiB}`), in the environment (`KVTALLY_STORE__MEMORY`) and on the
command line (`--memory`) is derived from its name. How values are read and checked is `config`'s part.
"""

from __future__ import annotations

import msgspec

SHORTEST_TOKEN = 16
FLAVOURS = ("kvtally", "nixl", "nixl-push", "mooncake", "lmcache", "plain")  # of prefill and decode, as a router speaks


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `default` is in words: documentation must not depend on the machine it was made on."""

    section: str = "store"
    name: str
    field: str = ""  # of the section's config, where it is not the name
    description: str
    default: str
    example: str
    has_flag: bool = True

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"KVTALLY_{self.section}__{self.name}".upper()

    @property
    def help(self) -> str:
        return f"{self.description} Default: {self.default}."


SETTINGS: dict[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting(
            name="socket",
            description="Unix socket that engines on this node connect to.",
            default="$XDG_RUNTIME_DIR/kvtally/store.sock, else kvtally-UID/store.sock in the temporary directory",
            example="/run/kvtally/store.sock",
        ),
        Setting(
            name="memory",
            field="memory_bytes",
            description="Size of the host arena, the shared memory that holds KV bytes.",
            default="a quarter of RAM, or of the container's limit",
            example="8GiB",
        ),
        Setting(
            name="disk",
            description="Directory of the disk tier; what it holds survives a restart.",
            default="no disk tier",
            example="/var/lib/kvtally",
        ),
        Setting(
            name="disk_size",
            field="disk_bytes",
            description="Most bytes the disk tier may take.",
            default="10 times the memory, at most 80 % of the free space",
            example="200GiB",
        ),
        Setting(
            name="disk_read_limit",
            field="disk_read_bytes_s",
            description="Most bytes that the disk tier reads in a second, for a disk that others need too.",
            default="no limit",
            example="500MB",
        ),
        Setting(
            name="verify_reads",
            description="Have engines check every object's checksum after copying it out of the arena. "
            "Bytes that come up from a lower tier are always checked.",
            default="true",
            example="true",
        ),
        Setting(
            name="tcp",
            description="Also listen on this address, for tools and routers elsewhere (no KV bytes); needs a token.",
            default="no TCP",
            example="10.0.0.5:7400",
        ),
        Setting(
            name="token_file",
            field="token",
            description=f"File whose content is the secret that TCP peers and changing admin calls prove to know "
            f"({SHORTEST_TOKEN} characters or more).",
            default="none",
            example="/etc/kvtally/token",
        ),
        Setting(
            name="token",
            description="The secret itself; prefer token_file, which keeps it out of listings and backups.",
            default="none",
            example='"..."',
            has_flag=False,  # a command line is public on its machine
        ),
        Setting(
            name="tls_cert",
            description="Certificate chain (PEM) for TCP; with tls_key.",
            default="no TLS",
            example="/etc/kvtally/cert.pem",
        ),
        Setting(
            name="tls_key",
            description="Private key (PEM) for TCP; with tls_cert.",
            default="no TLS",
            example="/etc/kvtally/key.pem",
        ),
        Setting(
            name="admin",
            description="Loopback address of the admin HTTP server: /health, /metrics, /inspect.",
            default="no admin server",
            example="127.0.0.1:7401",
        ),
        Setting(
            section="connector",
            name="store",
            description="The store an engine uses: its unix socket.",
            default="store.socket",
            example="/run/kvtally/store.sock",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="autostart",
            description="Start a store where none answers. It outlives the engine.",
            default="true",
            example="false",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="wait_ms",
            description="Longest time a request waits for its lookup and staging, once the scheduler has come to it, "
            "before it is computed; also how long a save or load waits for the store's answer, if that is longer than "
            "2 s.",
            default="2000",
            example="500",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="prefetch",
            description="Look a request up, and stage what is found, when it arrives; off: when the scheduler comes to "
            "it.",
            default="true",
            example="off",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="always_load",
            description="Load what is found even where computing it is estimated to be faster.",
            default="false",
            example="true",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="on_unsupported",
            description="What to do in an engine that cannot be served correctly: refuse (stop its start) or serve "
            "(run it without reuse).",
            default="refuse",
            example="serve",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="allow_untested",
            description="Run in a vLLM version that was not tested.",
            default="false",
            example="true",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="model_identity",
            description="Name of the weights, where they cannot be identified by commit or content.",
            default="the commit, or a digest of the weight files",
            example="my-model-v3",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="on_reset",
            description="What an engine does when vLLM resets its caches (sleep, pause, reset_prefix_cache with "
            "reset_connector) because its weights may change: part (share nothing with others until its next start), "
            "keep (its weights never change: forget nothing) or forget (empty its namespace for all engines: they all "
            "get the same new weights).",
            default="part",
            example="keep",
            has_flag=False,
        ),
        Setting(
            section="router",
            name="listen",
            description="Address that clients connect to.",
            default="127.0.0.1:8080",
            example="0.0.0.0:8080",
        ),
        Setting(
            section="router",
            name="prefill",
            description="Prefill instances: `URL[,store=ADDRESS]`, a list in the file, repeated flags, separated by "
            "spaces in the environment. The address of an instance's store is a unix socket or tcp://host:port.",
            default="none: decode instances compute prompts themselves",
            example="http://10.0.0.7:8000,store=tcp://10.0.0.7:7400",
        ),
        Setting(
            section="router",
            name="decode",
            description="Decode instances, or, without prefill, all instances; written like those of prefill.",
            default="none; one is needed",
            example="http://10.0.0.8:8000,store=tcp://10.0.0.8:7400",
        ),
        Setting(
            section="router",
            name="flavour",
            description=f"How prefill hands over to decode: {', '.join(FLAVOURS)}.",
            default="kvtally with prefill instances, plain without",
            example="nixl",
        ),
        Setting(
            section="router",
            name="strict",
            description="Answer 502 where reuse was promised and is not proved, and 400 to clients that set what only "
            "the router may set.",
            default="false",
            example="true",
        ),
        Setting(
            section="router",
            name="prefill_from",
            field="prefill_from_tokens",
            description="Skip prefill where decode has fewer tokens than this to compute (estimated as a quarter of "
            "the bytes); 0: never skip.",
            default="64",
            example="256",
        ),
        Setting(
            section="router",
            name="receipt_wait",
            field="receipt_wait_ms",
            description="Longest time, in milliseconds, that the first byte waits for decode's half of the receipt.",
            default="1000",
            example="250",
        ),
        Setting(
            section="router",
            name="timeout",
            field="timeout_s",
            description="Longest time, in seconds, to wait for an engine's next byte, or for a client to take one.",
            default="300",
            example="60",
        ),
        Setting(
            section="router",
            name="max_body",
            field="max_body_bytes",
            description="Largest request body.",
            default="32MiB",
            example="8MiB",
        ),
        Setting(
            section="router",
            name="tenant_header",
            description="Header by which a trusted gateway names the tenant. Without it, or where it is absent, the "
            "API key does.",
            default="the API key",
            example="X-Tenant",
        ),
        Setting(
            section="router",
            name="salt_file",
            description="File with the key that makes cache salts of tenants; made where there is none. Routers that "
            "share instances need the same one.",
            default="$XDG_STATE_HOME/kvtally/salt, else ~/.local/state/kvtally/salt",
            example="/etc/kvtally/salt",
        ),
        Setting(
            section="router",
            name="store_ca",
            description="Certificate authority (PEM) of stores reached over TCP; makes those connections use TLS.",
            default="no TLS",
            example="/etc/kvtally/ca.pem",
        ),
    )
}
SECTIONS = tuple(dict.fromkeys(setting.section for setting in SETTINGS.values()))


def settings_table() -> str:
    """Every setting as a Markdown table, for docs/operations.md."""
    lines = ["| setting | flag | environment | default | what it is | example |", "|---|---|---|---|---|---|"]
    for setting in SETTINGS.values():
        flag = f"`{setting.flag}`" if setting.has_flag else "(none)"
        if setting.name == "verify_reads":
            flag = "`--no-verify-reads`"
        lines.append(
            f"| `{setting.key}` | {flag} | `{setting.variable}` | {setting.default} | {setting.description} "
            f"| `{setting.example}` |"
        )
    return "\n".join(lines)
