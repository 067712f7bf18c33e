"""The router's parts that need no server: bodies, headers, tenants, verdicts in words, settings, the log."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvtally.config import RouterConfig, load, table
from kvtally.config.instances import Instance, parse_instance
from kvtally.core.receipts import Half, Receipt, Role, Verdict
from kvtally.core.routing import Skip
from kvtally.errors import ConfigError, RouteError
from kvtally.router import body as bodies
from kvtally.router import headers as header
from kvtally.router.body import Kind
from kvtally.router.book import MOST_REASONS, Book, Record
from kvtally.router.flavours import FLAVOURS
from kvtally.router.judging import match, source_of, word
from kvtally.router.metrics import METRICS
from kvtally.router.requestlog import MOST_LINES, RequestLog
from kvtally.router.tenants import Tenants, load_secret

ROOT = Path(__file__).parents[2]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


class TestBodies:
    @given(st.dictionaries(st.text(max_size=8), json_values, max_size=6))
    def test_what_is_not_changed_stays_as_it_was(self, tree: dict[str, object]) -> None:
        fields = bodies.read_fields(json.dumps(tree).encode())
        kept = {name: value for name, value in tree.items() if name not in bodies.RESERVED}
        bodies.scrub(fields)
        assert json.loads(bodies.encode(fields, {})) == kept

    def test_numbers_and_texts_keep_their_very_bytes(self) -> None:
        data = b'{"temperature":0.10000000000000000001,"prompt":"\\u00e9\\ud83d\\ude00"}'
        assert bodies.encode(bodies.read_fields(data), {}) == data

    def test_a_name_in_disguise_is_found(self) -> None:
        fields = bodies.read_fields(b'{"kv\\u005ftransfer_params": {}, "cache_salt": "a", "cache_salt": "b"}')
        assert sorted(bodies.scrub(fields)) == ["cache_salt", "kv_transfer_params"]
        assert fields == {}

    def test_nested_names_are_found_or_refused(self) -> None:
        """Python's parser takes half a pair, written in UTF-8, for a name; ours does not, and must not look away."""
        fields = bodies.read_fields(b'{"vllm_xargs": \n {"a": 1, "cache_salt": "s"}}')
        assert bodies.scrub(fields) == ["vllm_xargs.cache_salt"]
        assert bodies.encode(fields, {}) == b'{"vllm_xargs":{"a":1}}'
        odd = b'{"vllm_xargs": {"\xed\xa0\x80": 1, "cache_salt": "s"}}'
        assert json.loads(odd)["vllm_xargs"]["cache_salt"] == "s"
        with pytest.raises(RouteError) as caught:
            bodies.scrub(bodies.read_fields(odd))
        assert caught.value.status == 400
        assert bodies.scrub(bodies.read_fields(b'{"vllm_xargs": ["cache_salt"]}')) == []

    @pytest.mark.parametrize("data", [b"", b"1", b"[1]", b'{"a":', b"\xff", b'{"a": NaN}', b'{"a":' + b"[" * 100_000])
    def test_anything_else_is_refused(self, data: bytes) -> None:
        with pytest.raises(RouteError) as caught:
            bodies.read_fields(data)
        assert (caught.value.code, caught.value.status) == ("KV-705", 400)

    @pytest.mark.parametrize(
        ("tree", "kind", "parts"),
        [
            ({"prompt": "text"}, Kind.TEXT, [b"text"]),
            ({"prompt": [1, 2]}, Kind.TOKENS, [b"\1\0\0\0\2\0\0\0"]),
            ({"prompt": ["one"]}, Kind.TEXT, [b"one"]),
            ({"prompt": [[1, 2]]}, Kind.TOKENS, [b"\1\0\0\0\2\0\0\0"]),
            ({"prompt": [["odd"]]}, Kind.BATCH, [b'["odd"]']),
            ({"prompt": ["a", "b"]}, Kind.BATCH, [b'["a","b"]']),
            ({"prompt": "a", "prompt_embeds": "AAAA"}, Kind.BATCH, [b'"a"']),
            ({"prompt": [[1], [2]]}, Kind.BATCH, [b"[[1],[2]]"]),
            ({"prompt": [1 << 40]}, Kind.BATCH, [b"[1099511627776]"]),
            ({"prompt": None, "prompt_embeds": "AAAA"}, Kind.OTHER, [b"AAAA"]),
            ({"messages": [{"a": 1}, {"b": 2}]}, Kind.MESSAGES, [b'{"a":1}', b'{"b":2}']),
            ({"messages": "odd"}, Kind.OTHER, [b'"odd"']),
            ({}, Kind.OTHER, [b""]),
        ],
    )
    def test_prompts_are_told_apart(self, tree: dict[str, object], kind: Kind, parts: list[bytes]) -> None:
        fields = bodies.read_fields(msgspec.json.encode(tree))
        assert bodies.prompt_of(fields, is_chat="messages" in tree) == (kind, parts)

    @pytest.mark.parametrize(
        ("tree", "one_reader", "skip"),
        [
            ({"n": 2}, True, Skip.SEVERAL),
            ({"n": 2}, False, None),
            ({"n": None}, True, None),
            ({"use_beam_search": True}, True, Skip.SEVERAL),
            ({"prompt_logprobs": 0}, False, Skip.PROMPT_LOGPROBS),
            ({"echo": True}, False, None),
            ({"echo": True, "logprobs": None}, False, None),
            ({"echo": True, "logprobs": 0}, False, Skip.PROMPT_LOGPROBS),
        ],
    )
    def test_what_prefill_cannot_help_with(self, tree: dict[str, object], one_reader: bool, skip: Skip | None) -> None:
        fields = bodies.read_fields(msgspec.json.encode(tree))
        assert bodies.skip_of(Kind.TEXT, fields, has_one_reader=one_reader) is skip

    def test_other_tenants_models_and_tools_share_nothing(self) -> None:
        trees: list[dict[str, object]] = [
            {},
            {"model": "a"},
            {"model": "b"},
            {"tools": [1]},
            {"model": "a", "tools": [1]},
        ]
        roots = {
            bodies.root_of(path, salt, bodies.read_fields(msgspec.json.encode(tree)))
            for path in ("/a", "/b")
            for salt in ("s", "t")
            for tree in trees
        }
        assert len(roots) == 4 * len(trees)


class TestHeaders:
    def test_only_what_may_pass_passes(self) -> None:
        given_headers = CIMultiDict(
            [
                ("Host", "x"),
                ("Authorization", "k"),
                ("Connection", "Private"),
                ("Connection", "close"),
                ("PRIVATE", "1"),
                ("Accept-Encoding", "br"),
                ("X-KVTally-Verdict", "proved"),
                ("X-Tenant", "t"),
                ("Cookie", "a"),
                ("Cookie", "b"),
            ]
        )
        passed = header.for_engine(given_headers, ticket="t1", tenant_header="x-tenant")
        assert dict(passed.items()) == {
            "Authorization": "k",
            "Cookie": "b",
            "X-Request-Id": "t1",
            "Accept-Encoding": "identity",
        }
        assert passed.getall("Cookie") == ["a", "b"]
        assert header.choosing(given_headers) == ["X-KVTally-Verdict"]


class TestTenants:
    def test_salts_depend_on_the_key_the_tenant_and_how_it_was_named(self) -> None:
        tenants, other = Tenants("a secret of enough length", header="X-Tenant"), Tenants("another secret, as long")
        cases = [
            tenants.salt(CIMultiDict({"Authorization": "Bearer a"})),
            tenants.salt(CIMultiDict({"authorization": "Bearer b"})),
            tenants.salt(CIMultiDict({"x-api-key": "Bearer"})),
            tenants.salt(CIMultiDict()),
            tenants.salt(CIMultiDict({"x-tenant": "Bearer a"})),
            other.salt(CIMultiDict({"Authorization": "Bearer a"})),
        ]
        assert len(set(cases)) == len(cases)
        assert tenants.salt(CIMultiDict({"AUTHORIZATION": "Bearer a"})) == cases[0]
        assert all(16 <= len(salt) <= 1024 for salt in cases)

    def test_the_key_file_is_made_once_and_only_its_owner_reads_it(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "salt"
        secret = load_secret(path)
        assert load_secret(path) == secret
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(path.parent.iterdir()) == [path]

    def test_a_key_that_is_too_short_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "salt").write_text("short\n")
        with pytest.raises(ConfigError, match="too few"):
            load_secret(tmp_path / "salt")

    def test_without_a_place_for_it_the_process_has_its_own(self, caplog: pytest.LogCaptureFixture) -> None:
        path = Path("/proc/nowhere/salt")
        assert load_secret(path) != load_secret(path)
        assert "cannot be made" in caplog.text


class TestWords:
    def test_verdicts_in_words(self) -> None:
        half = Half(role=Role.DECODE, prompt_tokens=10, computed_tokens=10, reason="Check Sum\r\n!")
        recomputed = match(Receipt(ticket="t", prefill=Half(role=Role.PREFILL, saved_tokens=9), decode=half))
        assert (recomputed.verdict, recomputed.words) == (Verdict.RECOMPUTED, "recomputed:check_sum")
        assert match(Receipt(ticket="t", decode=half), note="prefill_down").words == "recomputed:prefill_down"
        assert match(Receipt(ticket="t"), why_missing="store_unreachable").reason == "store_unreachable"
        assert match(Receipt(ticket="t")).words == "missing"

    @given(st.text())
    def test_any_reason_becomes_a_word(self, text: str) -> None:
        assert word(text)
        assert word(text).isascii()
        assert not set(word(text)) & set('\r\n "{}:')

    def test_sources(self) -> None:
        assert source_of(None) == "unknown"
        assert source_of(Half(role=Role.DECODE)) == "none"
        assert source_of(Half(role=Role.DECODE, tokens_gpu=2, tokens_disk=3)) == "gpu:2,disk:3"

    def test_a_prefill_that_saved_nothing_knows_best_why(self) -> None:
        decode = Half(role=Role.DECODE, reason="absent")
        nothing = Half(role=Role.PREFILL, saved_tokens=0, reason="refused")
        something = Half(role=Role.PREFILL, saved_tokens=5, reason="arena_full")
        assert Receipt(ticket="t", prefill=nothing, decode=decode).reason == "refused"
        assert Receipt(ticket="t", prefill=something, decode=decode).reason == "absent"
        assert Receipt(ticket="t").reason == ""

    def test_the_reasons_that_are_counted_are_bounded(self) -> None:
        book = Book(lambda _: None)
        for number in range(3 * MOST_REASONS):
            half = Half(role=Role.DECODE, reason=f"reason-{number}")
            book.judged(match(Receipt(ticket="t", decode=half)))
        assert len(book.verdicts) == MOST_REASONS + 1
        assert book.verdicts["recomputed:other"] == 2 * MOST_REASONS

    def test_the_book_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtally.router.book.BOOK_RECEIPTS", 3)
        book = Book(lambda _: None)
        for number in range(5):
            book.keep(Record(ticket=str(number), at_s=0.0, path="/"))
        assert [record.ticket for record in book.last(9)] == ["4", "3", "2"]
        assert book.find("1") is None


class TestSettings:
    def test_every_setting_fills_a_field(self) -> None:
        mine = [setting for setting in table.SETTINGS.values() if setting.section == "router"]
        assert {setting.field or setting.name for setting in mine} == set(RouterConfig.__struct_fields__) - {"token"}

    def test_flavours_are_those_that_there_are(self) -> None:
        assert tuple(FLAVOURS) == table.FLAVOURS

    def test_instances_are_read_from_flags_file_and_environment(self, tmp_path: Path) -> None:
        (tmp_path / "f.yaml").write_text(
            "router:\n  prefill:\n    - http://a:1\n    - http://b:2/x/,store=tcp://b:7400\n  decode: http://c:3\n"
        )
        config = load(file=str(tmp_path / "f.yaml"), environ={"KVTALLY_STORE__SOCKET": "/s.sock"}).router()
        assert [instance.url for instance in config.prefill] == ["http://a:1", "http://b:2/x"]
        assert [instance.store for instance in config.prefill] == ["/s.sock", "tcp://b:7400"]
        assert (config.decode[0].name, config.flavour) == ("c:3", "kvtally")
        environ = {"KVTALLY_ROUTER__DECODE": "http://a:1 http://b:2", "XDG_STATE_HOME": "/state"}
        config = load(environ=environ, flags={"router.decode": "http://d:4"}).router()
        assert ([instance.name for instance in config.decode], config.flavour) == (["d:4"], "plain")
        assert config.salt_file == "/state/kvtally/salt"

    @pytest.mark.parametrize(
        ("flags", "told"),
        [
            ({"router.decode": "a:1"}, "http://HOST:PORT"),
            ({"router.decode": "http://a:1,stor=x"}, "store=ADDRESS"),
            ({"router.decode": "http://a:1 http://a:1"}, "twice"),
            ({"router.decode": "http://user:secret@a:1"}, "more than"),
            ({"router.decode": "http://a:99999"}, "0-65535"),
            ({"router.flavour": "nixle", "router.prefill": "http://a:1"}, "Did you mean nixl"),
            ({"router.flavour": "nixl"}, "needs prefill"),
            ({"router.flavour": "plain", "router.prefill": "http://a:1"}, "has no prefill"),
            ({"router.flavour": "nixl", "router.prefill": "http://a:1", "router.strict": True}, "strict"),
            ({"router.max_body": "10B"}, "smallest"),
            ({"router.listen": "nowhere"}, "host and a port"),
            ({"router.timeout": "soon"}, "whole number"),
        ],
    )
    def test_what_is_wrong_is_named(self, flags: dict[str, str | bool | None], told: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load(flags=flags, environ={}).router()
        assert told in str(caught.value)

    def test_an_instance_s_bootstrap_is_beside_it(self) -> None:
        assert parse_instance("http://[::1]:8000", default_store="s") == Instance(
            url="http://[::1]:8000", store="s", bootstrap="http://[::1]:8998"
        )

    @pytest.mark.parametrize(
        ("written", "shown"),
        [
            ("http://a:1/", "http://a:1,store=/s.sock"),
            ("http://a:1/x,store=tcp://b:7400", "http://a:1/x,store=tcp://b:7400"),
            ("https://[::1]:5,bootstrap=http://c:9", "https://[::1]:5,store=/s.sock,bootstrap=http://c:9"),
        ],
    )
    def test_an_instance_is_shown_with_the_store_it_is_read_from(self, written: str, shown: str) -> None:
        given = load(flags={"router.decode": written, "store.socket": "/s.sock"}, environ={})
        assert {row.key: row.value for row in given.shown()}["router.decode"] == shown
        assert parse_instance(shown, default_store="other") == parse_instance(written, default_store="/s.sock")

    def test_the_token_is_not_shown(self) -> None:
        assert "secret" not in repr(RouterConfig(token="a secret of enough length"))

    def test_metrics_are_documented(self) -> None:
        text = (ROOT / "docs" / "router.md").read_text(encoding="utf-8")
        assert [entry.exported_name for entry in METRICS if f"`{entry.exported_name}`" not in text] == []


class TestRequestLog:
    def test_lines_are_written_and_the_last_ones_too(self, tmp_path: Path) -> None:
        async def write() -> None:
            with (tmp_path / "log").open("wb") as file, RequestLog(file.fileno()) as log:
                for number in range(100):
                    log.write(b"%d\n" % number)

        asyncio.run(write())
        assert (tmp_path / "log").read_bytes() == b"".join(b"%d\n" % number for number in range(100))

    def test_a_reader_that_does_not_read_costs_lines_not_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtally.router.requestlog.LAST_WORDS_S", 0.05)
        reader, writer = os.pipe()

        async def write() -> int:
            with RequestLog(writer) as log:
                for _ in range(2):  # one batch fills the pipe, so that the thread is stuck
                    for _ in range(MOST_LINES + 10):
                        log.write(b"x" * 100 + b"\n")
                return log.lost

        assert asyncio.run(write()) >= 10
        os.close(reader)
