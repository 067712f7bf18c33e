"""The table of settings: each stands here once, with its default, its bounds, and the words that `--help` and
`docs/operations.md` print."""

from __future__ import annotations

from kvtally.config.setting import (
    Address,
    Choice,
    Header,
    Instances,
    Number,
    PathOf,
    Peers,
    RemoteUrl,
    Setting,
    Size,
    SocketPath,
    Switch,
    Text,
)
from kvtally.wire.limits import KIB, MIB

SHORTEST_TOKEN = 16
FLAVOURS = ("kvtally", "nixl", "nixl-push", "mooncake", "lmcache", "plain")  # how prefill hands over to decode

SETTINGS: dict[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting(
            name="socket",
            description="Unix socket that engines on this node connect to.",
            kind=SocketPath(),
            default="$XDG_RUNTIME_DIR/kvtally/store.sock, else kvtally-UID/store.sock in the temporary directory",
            example="/run/kvtally/store.sock",
        ),
        Setting(
            name="memory",
            field="memory_bytes",
            description="Size of the host arena, the shared memory that holds KV bytes.",
            kind=Size(),
            default="a quarter of RAM, or of the container's limit",
            example="8GiB",
        ),
        Setting(
            name="disk",
            description="Directory of the disk tier. Its content survives a restart.",
            kind=PathOf(metavar="DIR"),
            default="no disk tier",
            example="/var/lib/kvtally",
        ),
        Setting(
            name="disk_size",
            field="disk_bytes",
            description="Largest size of the disk tier.",
            kind=Size(),
            default="10 times the memory, at most 80 % of the free space",
            example="200GiB",
        ),
        Setting(
            name="disk_read_limit",
            field="disk_read_bytes_s",
            description="Most bytes per second that the disk tier reads, for a disk that is shared with others.",
            kind=Size(least_bytes=64 * KIB),
            default="no limit",
            example="500MB",
        ),
        Setting(
            name="verify_reads",
            description="Engines check every object's checksum after copying it out of the arena. Bytes from a lower "
            "tier are always checked.",
            kind=Switch(default=True),
            example="true",
        ),
        Setting(
            name="tcp",
            description="Also listen on this address, for tools, routers and stores on other machines. Needs a token.",
            kind=Address(),
            default="no TCP",
            example="10.0.0.5:7400",
        ),
        Setting(
            name="token_file",
            field="token",
            description="File with the secret that TCP peers, and admin calls that change something, must know "
            f"({SHORTEST_TOKEN} characters or more).",
            kind=PathOf(must_be_readable=True),
            example="/etc/kvtally/token",
        ),
        Setting(
            name="token",
            description="The secret itself. Prefer token_file, which keeps it out of listings and backups.",
            kind=Text(),
            example='"..."',
            is_secret=True,
            has_flag=False,  # a command line is public on its machine
        ),
        Setting(
            name="tls_cert",
            description="Certificate chain (PEM) for TCP; with tls_key.",
            kind=PathOf(must_be_readable=True),
            default="no TLS",
            example="/etc/kvtally/cert.pem",
        ),
        Setting(
            name="tls_key",
            description="Private key (PEM) for TCP; with tls_cert.",
            kind=PathOf(must_be_readable=True),
            default="no TLS",
            example="/etc/kvtally/key.pem",
        ),
        Setting(
            name="peers",
            description="Stores of other machines that this one may pull KV from and that may pull from it: addresses, "
            "networks or host names, without ports. A list in the file, a repeated flag, separated by spaces in the "
            "environment. Needs tcp.",
            kind=Peers(),
            default="none: nothing is shared between machines",
            example="10.0.0.0/24",
        ),
        Setting(
            name="advertise",
            description="Address by which peers reach this store's TCP port.",
            kind=Address(),
            default="tcp; must be given if tcp is 0.0.0.0 or [::]",
            example="10.0.0.5:7400",
        ),
        Setting(
            name="bulk",
            description="Address that peers pull KV bytes from. Its host must be reached by the same name as that of "
            "tcp.",
            kind=Address(),
            default="the host of tcp, and the next port",
            example="10.0.0.5:7401",
        ),
        Setting(
            name="bulk_tls",
            description="Encrypt KV bytes between stores, if tls_cert is given. Turn it off, on all of them, only "
            "where the network is private or encrypts by itself: KV bytes are as confidential as the prompts.",
            kind=Switch(default=True),
            example="false",
        ),
        Setting(
            name="peers_ca",
            description="Certificate authority (PEM) of the peers' certificates. Connections to peers then use TLS; "
            "given with tls_cert.",
            kind=PathOf(must_be_readable=True),
            default="no TLS",
            example="/etc/kvtally/ca.pem",
        ),
        Setting(
            name="transport",
            description="How KV bytes travel between stores: tcp, or nixl (RDMA; all stores need it, and "
            "kvtally[nixl]). With nixl-tcp, NIXL may do without RDMA, which is slower than tcp.",
            kind=Choice(metavar="NAME", default="tcp", among=("tcp", "nixl", "nixl-tcp")),
            example="nixl",
        ),
        Setting(
            name="remote",
            description="Pool that several stores share: valkey://, redis://, valkeys:// and rediss:// (TLS), s3://, "
            "gs://, az:// or mooncake://. See docs/pool.md.",
            kind=RemoteUrl(),
            default="no pool",
            example="valkey://10.0.0.9:6379",
        ),
        Setting(
            name="remote_user",
            description="User of the pool (Valkey's ACL), or its access key (S3).",
            kind=Text(metavar="NAME"),
            default="none; S3 uses the environment or the machine's role",
            example="kvtally",
        ),
        Setting(
            name="remote_password_file",
            description="File with the pool's password or secret key. It is read again for new connections.",
            kind=PathOf(must_be_readable=True),
            example="/etc/kvtally/pool-password",
        ),
        Setting(
            name="remote_key_file",
            description="File with one or two keys, each 64 hexadecimal digits on a line, that only its owner can "
            "read. Everything in the pool is then encrypted and authenticated: the first key seals, both open.",
            kind=PathOf(must_be_readable=True),
            default="no encryption",
            example="/etc/kvtally/pool-key",
        ),
        Setting(
            name="remote_write_limit",
            field="remote_write_bytes_s",
            description="Most bytes per second that this store writes to the pool.",
            kind=Size(least_bytes=64 * KIB),
            default="no limit",
            example="500MB",
        ),
        Setting(
            name="admin",
            description="Loopback address of the admin HTTP server: /health, /metrics, /inspect.",
            kind=Address(must_be_loopback=True),
            default="no admin server",
            example="127.0.0.1:7401",
        ),
        Setting(
            section="connector",
            name="store",
            description="Unix socket of the store that the engine uses.",
            kind=SocketPath(),
            default="store.socket",
            example="/run/kvtally/store.sock",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="autostart",
            description="Start a store if none answers. It outlives the engine.",
            kind=Switch(default=True),
            example="false",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="wait_ms",
            description="Longest time, in milliseconds, that a request waits for lookup and staging once the "
            "scheduler has reached it; after that it is computed. If longer than 2 s, also how long a save or load "
            "waits for the store.",
            kind=Number(default=2_000, most=600_000),
            example="500",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="prefetch",
            description="Look up a request, and stage what is found, when it arrives. Off: when the scheduler "
            "reaches it.",
            kind=Switch(default=True),
            example="off",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="always_load",
            description="Load what is found even if computing it would probably be faster.",
            kind=Switch(default=False),
            example="true",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="on_unsupported",
            description="What to do if the engine cannot be served correctly: refuse (it does not start) or serve "
            "(it runs without reuse).",
            kind=Choice(default="refuse", among=("refuse", "serve")),
            example="serve",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="allow_untested",
            description="Run with a vLLM version that was not tested.",
            kind=Switch(default=False),
            example="true",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="model_identity",
            description="Name of the weights, if neither commit nor content identifies them.",
            kind=Text(),
            default="the commit, or a digest of the weight files",
            example="my-model-v3",
            has_flag=False,
        ),
        Setting(
            section="connector",
            name="on_reset",
            description="What an engine does when vLLM resets its caches (sleep, pause, reset_prefix_cache with "
            "reset_connector) because its weights may change: part (share nothing with others until its next start), "
            "keep (its weights never change: forget nothing) or forget (empty its namespace for all engines: they "
            "all get the same new weights).",
            kind=Choice(default="part", among=("part", "keep", "forget")),
            example="keep",
            has_flag=False,
        ),
        Setting(
            section="router",
            name="listen",
            description="Address that clients connect to.",
            kind=Address(default="127.0.0.1:8080"),
            example="0.0.0.0:8080",
        ),
        Setting(
            section="router",
            name="prefill",
            description="Prefill instances, each `URL[,store=ADDRESS]`: a list in the file, a repeated flag, "
            "separated by spaces in the environment. The address of an instance's store is a unix socket or "
            "tcp://host:port.",
            kind=Instances(),
            default="none: decode instances compute prompts themselves",
            example="http://10.0.0.7:8000,store=tcp://10.0.0.7:7400",
        ),
        Setting(
            section="router",
            name="decode",
            description="Decode instances, written like prefill instances. Without prefill: all instances.",
            kind=Instances(),
            default="none; one is needed",
            example="http://10.0.0.8:8000,store=tcp://10.0.0.8:7400",
        ),
        Setting(
            section="router",
            name="flavour",
            description=f"How prefill hands over to decode: {', '.join(FLAVOURS)}.",
            kind=Text(metavar="NAME"),
            default="kvtally with prefill instances, plain without",
            example="nixl",
        ),
        Setting(
            section="router",
            name="strict",
            description="Answer 502 if reuse was promised but not proved, and 400 if a client sets something that "
            "only the router may set.",
            kind=Switch(default=False),
            example="true",
        ),
        Setting(
            section="router",
            name="prefill_from",
            field="prefill_from_tokens",
            description="Skip prefill if decode has fewer tokens than this to compute (estimated as a quarter of the "
            "bytes). 0: never skip.",
            kind=Number(metavar="TOKENS", default=64, most=1 << 30),
            example="256",
        ),
        Setting(
            section="router",
            name="receipt_wait",
            field="receipt_wait_ms",
            description="Longest time, in milliseconds, that the first byte of a response waits for decode's half of "
            "the receipt.",
            kind=Number(metavar="MS", default=1_000, most=60_000),
            example="250",
        ),
        Setting(
            section="router",
            name="timeout",
            field="timeout_s",
            description="Longest time, in seconds, to wait for an engine's next byte, or for a client to accept one.",
            kind=Number(metavar="SECONDS", default=300, least=1, most=86_400),
            example="60",
        ),
        Setting(
            section="router",
            name="max_body",
            field="max_body_bytes",
            description="Largest request body.",
            kind=Size(default=32 * MIB, least_bytes=KIB),
            example="8MiB",
        ),
        Setting(
            section="router",
            name="tenant_header",
            description="Header in which a trusted gateway names the tenant. If it is not set, or absent from a "
            "request, the API key names the tenant.",
            kind=Header(),
            default="the API key",
            example="X-Tenant",
        ),
        Setting(
            section="router",
            name="salt_file",
            description="File with the key from which tenants' cache salts are made. Created if it does not exist. "
            "Routers that share instances need the same one.",
            kind=PathOf(),
            default="$XDG_STATE_HOME/kvtally/salt, else ~/.local/state/kvtally/salt",
            example="/etc/kvtally/salt",
        ),
        Setting(
            section="router",
            name="store_ca",
            description="Certificate authority (PEM) of stores reached over TCP. Those connections then use TLS.",
            kind=PathOf(must_be_readable=True),
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
        flag = setting.flag.replace("--", "--no-", 1) if setting.kind.default is True else setting.flag
        lines.append(
            f"| `{setting.key}` | {f'`{flag}`' if setting.has_flag else '(none)'} | `{setting.variable}` "
            f"| {setting.default_words} | {setting.description} | `{setting.example}` |"
        )
    return "\n".join(lines)
