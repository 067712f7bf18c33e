"""Namespaces: one digest for one description, another for any other, and a diff that names what is different."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.namespace import (
    Difference,
    GroupKind,
    GroupSpec,
    Namespace,
    canonical,
    chunk_tokens,
    decode,
    difference,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "namespace.json"

counts = st.integers(1, 5)
words = st.sampled_from(["", "a", "b", "a.b", "[0]", "(absent)", 'é"\\\n', "\0"])
details = st.dictionaries(words, words, max_size=3)


@st.composite
def group_specs(draw: st.DrawFn, stages: int) -> GroupSpec:
    kind = draw(st.sampled_from(GroupKind))
    return GroupSpec(
        kind=kind,
        block_tokens=draw(counts),
        page_bytes=tuple(tuple(draw(st.lists(counts, max_size=3))) for _ in range(stages)),
        window_tokens=draw(counts) if kind is GroupKind.SLIDING else 0,
        detail=draw(details),
    )


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    stages = draw(st.integers(1, 3))
    return Namespace(
        model=draw(words),
        groups=tuple(draw(st.lists(group_specs(stages), min_size=1, max_size=3))),
        chunk_tokens=draw(counts),
        alignment_tokens=draw(counts),
        tensor_parallel=draw(counts),
        pipeline_parallel=stages,
        layout=draw(words),
        backend=draw(words),
        quantisation=draw(words),
        checksum=draw(words),
        format_version=draw(counts),
        detail=draw(details),
    )


def reordered(detail: dict[str, str]) -> dict[str, str]:
    return dict(reversed(detail.items()))


@given(namespaces())
def test_the_order_of_maps_does_not_matter(namespace: Namespace) -> None:
    groups = tuple(msgspec.structs.replace(spec, detail=reordered(spec.detail)) for spec in namespace.groups)
    twin = msgspec.structs.replace(namespace, groups=groups, detail=reordered(namespace.detail))
    assert canonical(twin) == canonical(namespace)
    assert twin.digest == namespace.digest
    assert difference(namespace, twin) == []


@given(namespaces())
def test_a_description_reads_back_as_what_it_describes(namespace: Namespace) -> None:
    copy = decode(canonical(namespace))
    assert copy == namespace
    assert copy.digest == namespace.digest


@given(namespaces(), namespaces())
def test_digest_diff_and_equality_agree(one: Namespace, other: Namespace) -> None:
    same = one == other
    assert (one.digest == other.digest) == same
    assert (difference(one, other) == []) == same
    assert [(d.field, d.theirs, d.ours) for d in difference(one, other)] == [
        (d.field, d.ours, d.theirs) for d in difference(other, one)
    ]


BASE = Namespace(
    model="commit-1",
    groups=(
        GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((64, 64), (64,)), detail={"dtype": "bfloat16"}),
        GroupSpec(kind=GroupKind.SLIDING, block_tokens=16, page_bytes=((32,), ()), window_tokens=512),
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=256, page_bytes=((), (71_680,))),
    ),
    chunk_tokens=256,
    alignment_tokens=256,
    tensor_parallel=2,
    pipeline_parallel=2,
)


def with_group(index: int, **changes: object) -> Namespace:
    groups = list(BASE.groups)
    groups[index] = msgspec.structs.replace(groups[index], **changes)
    return msgspec.structs.replace(BASE, groups=tuple(groups))


# Each field of both records, changed alone: the path that the diff must name, and no other.
SINGLE_CHANGES: dict[str, Namespace] = {
    "model": msgspec.structs.replace(BASE, model="commit-2"),
    "chunk_tokens": msgspec.structs.replace(BASE, chunk_tokens=512),
    "alignment_tokens": msgspec.structs.replace(BASE, alignment_tokens=16),
    "tensor_parallel": msgspec.structs.replace(BASE, tensor_parallel=4),
    "layout": msgspec.structs.replace(BASE, layout="LBHNC"),
    "backend": msgspec.structs.replace(BASE, backend="flash"),
    "quantisation": msgspec.structs.replace(BASE, quantisation="fp8"),
    "checksum": msgspec.structs.replace(BASE, checksum="other"),
    "format_version": msgspec.structs.replace(BASE, format_version=99),
    "detail.sinks": msgspec.structs.replace(BASE, detail={"sinks": "4"}),
    "groups[1].kind": with_group(1, kind=GroupKind.FULL),
    "groups[0].block_tokens": with_group(0, block_tokens=32),
    "groups[0].page_bytes[1][0]": with_group(0, page_bytes=((64, 64), (65,))),
    "groups[2].page_bytes[1][1]": with_group(2, page_bytes=((), (71_680, 71_680))),
    "groups[1].window_tokens": with_group(1, window_tokens=513),
    "groups[0].detail.dtype": with_group(0, detail={"dtype": "float16"}),
}


@pytest.mark.parametrize("path", SINGLE_CHANGES)
def test_every_field_changes_the_digest_and_is_named(path: str) -> None:
    changed = SINGLE_CHANGES[path]
    assert changed.digest != BASE.digest
    assert [d.field for d in difference(BASE, changed)] == [path]


def test_no_field_is_left_out_of_the_table_above() -> None:
    """`pipeline_parallel` cannot change alone: each group lists its pages for every stage."""
    words = [re.findall(r"[a-z_]+", path) for path in SINGLE_CHANGES]
    assert set(Namespace.__struct_fields__) == {path[0] for path in words} | {"pipeline_parallel"}
    assert set(GroupSpec.__struct_fields__) == {path[1] for path in words if path[0] == "groups"}


def test_a_stage_more_is_named_with_its_pages() -> None:
    groups = tuple(msgspec.structs.replace(spec, page_bytes=(*spec.page_bytes, (8,))) for spec in BASE.groups)
    changed = msgspec.structs.replace(BASE, pipeline_parallel=3, groups=groups)
    assert [d.field for d in difference(BASE, changed)] == [
        "groups[0].page_bytes[2][0]",
        "groups[1].page_bytes[2][0]",
        "groups[2].page_bytes[2][0]",
        "pipeline_parallel",
    ]


def test_a_diff_shows_both_sides() -> None:
    assert difference(BASE, SINGLE_CHANGES["layout"]) == [Difference("layout", "", "LBHNC")]
    assert difference(BASE, SINGLE_CHANGES["detail.sinks"]) == [Difference("detail.sinks", "(absent)", "4")]
    assert difference(BASE, msgspec.structs.replace(BASE, detail={"x": "(absent)"})) == [
        Difference("detail.x", "(absent)", "(absent)")
    ]


@pytest.mark.parametrize(
    "build",
    [
        lambda: with_group(1, window_tokens=0),  # would need no object for any hit: a promise without bytes
        lambda: with_group(0, block_tokens=0),
        lambda: with_group(0, page_bytes=((64, 0), (64,))),
        lambda: with_group(0, page_bytes=((64, 64),)),
        lambda: msgspec.structs.replace(BASE, groups=()),
        lambda: msgspec.structs.replace(BASE, tensor_parallel=0),
        lambda: msgspec.structs.replace(BASE, pipeline_parallel=-1),
        lambda: msgspec.structs.replace(BASE, alignment_tokens=0),
        lambda: msgspec.structs.replace(BASE, chunk_tokens=0),
    ],
)
def test_impossible_values_are_refused(build: Callable[[], Namespace]) -> None:
    with pytest.raises(ValueError, match=r"at least|window"):
        build()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"block_tokens":256', b'"block_tokens":0'),
        (b'"window_tokens":512', b'"window_tokens":0'),
        (b'"tensor_parallel":2', b'"tensor_parallel":0'),
        (b'"pipeline_parallel":2', b'"pipeline_parallel":3'),
        (b'"recurrent"', b'"unheard-of"'),
        (b'"model":', b'"modell":'),
        (b"{", b"["),
    ],
)
def test_a_description_from_a_peer_is_checked(old: bytes, new: bytes) -> None:
    description = canonical(BASE)
    assert old in description
    with pytest.raises(msgspec.DecodeError):
        decode(description.replace(old, new, 1))


@given(namespaces(), st.integers(1, 40), st.data())
def test_object_bytes_by_counting_pages(namespace: Namespace, span: int, data: st.DataObject) -> None:
    group = data.draw(st.integers(0, len(namespace.groups) - 1))
    rank = data.draw(st.integers(0, namespace.ranks - 1))
    spec = namespace.groups[group]
    stages = [stage for stage in range(namespace.pipeline_parallel) for _ in range(namespace.tensor_parallel)]
    lowest = min(span - spec.window_tokens + 1, span - 1) if spec.kind is GroupKind.SLIDING else 0
    blocks = {token // spec.block_tokens for token in range(span) if token >= lowest}
    if spec.kind is GroupKind.RECURRENT:
        blocks = {0}
    expected = sum(page for _ in blocks for page in spec.page_bytes[stages[rank]])
    assert namespace.object_bytes(group, rank, span) == expected


@given(st.integers(1, 3_000))
def test_chunks_are_the_smallest_multiple_of_the_alignment_that_reaches_256(alignment: int) -> None:
    multiples = range(alignment, 4_000, alignment)
    assert chunk_tokens(alignment) == next(size for size in multiples if size >= 256)


def test_the_digest_has_not_changed() -> None:
    """If this fails, no engine finds what was stored before: raise `FORMAT_VERSION` and write the file anew."""
    assert golden_values() == json.loads(GOLDEN.read_text())


def golden_values() -> dict[str, str]:
    return {"description": canonical(BASE).decode(), "digest": BASE.digest.hex()}


if __name__ == "__main__":
    print(json.dumps(golden_values(), indent=1))
