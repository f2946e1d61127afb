"""The manifest is canonical, and nothing that could mislead a reader is taken for one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmill_common.artifact import ArtifactFile, Device, DeviceSupport, Manifest
from bitmill_common.errors import DataLossError, FailedPreconditionError
from bitmill_common.manifest import content_digest, from_json, to_json
from bitmill_common.measurements import (
    CalibrationUse,
    Evaluation,
    LayerLoss,
    ModuleResult,
    PhaseCost,
    Sensitivity,
    Verification,
)
from bitmill_common.recipes import (
    ActivationOrder,
    AdaptiveSearch,
    Algorithm,
    Calibration,
    KvCacheScheme,
    ModuleRule,
    Packing,
    Recipe,
    Scheme,
    Treatment,
)
from support.manifests import make_manifest

URI = "s3://bucket/artifacts/a/1/manifest.json"

texts = st.text(max_size=20)
counts = st.integers(0, 2**64 - 1)
small_counts = st.integers(0, 2**32 - 1)
sizes = st.integers(0, 2**50)
numbers = st.floats(allow_nan=False, allow_infinity=False)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
segments = st.text(
    st.characters(exclude_characters="/\\", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=10
).filter(lambda segment: segment not in (".", ".."))
paths = st.lists(segments, min_size=1, max_size=3).map("/".join)
files = st.lists(st.builds(ArtifactFile, paths, sizes, digests), min_size=1, unique_by=lambda file: file.path).map(
    lambda found: tuple(sorted(found, key=lambda file: file.path))
)
group_sizes = st.integers(-1, 1024)
text_lists = st.lists(texts, max_size=3).map(tuple)
treatments = st.builds(Treatment, st.sampled_from(Scheme), st.sampled_from(Algorithm), group_sizes, st.booleans())
searches = st.builds(
    AdaptiveSearch,
    candidates=st.lists(treatments, max_size=3).map(tuple),
    max_size_bytes=st.none() | counts,
    max_perplexity_ratio=st.none() | numbers,
    num_samples=small_counts,
)
recipes = st.builds(
    Recipe,
    scheme=st.sampled_from(Scheme),
    group_size=group_sizes,
    symmetric=st.booleans(),
    ignore=text_lists,
    dampening_frac=numbers,
    seed=counts,
    algorithm=st.sampled_from(Algorithm),
    activation_order=st.sampled_from(ActivationOrder),
    rules=st.lists(st.builds(ModuleRule, texts, treatments), max_size=3).map(tuple),
    kv_cache=st.none() | st.sampled_from(KvCacheScheme),
    smoothing_strength=numbers,
    adaptive=st.none() | searches,
)
evaluations = st.builds(
    Evaluation,
    source_perplexity=numbers,
    artifact_perplexity=numbers,
    mean_kl_divergence=numbers,
    num_tokens=counts,
    p99_kl_divergence=numbers,
    top1_agreement=numbers,
    layer_losses=st.lists(st.builds(LayerLoss, texts, numbers), max_size=3).map(tuple),
)
modules = st.builds(
    ModuleResult, texts, st.sampled_from(Scheme), group_sizes, st.none() | numbers, st.none() | numbers, texts
)
sensitivities = st.builds(Sensitivity, text_lists, st.sampled_from(Scheme), group_sizes, numbers, counts, st.booleans())
manifests = st.builds(
    Manifest,
    name=texts,
    digest=st.just(""),
    files=files,
    source_uri=texts,
    source_digest=texts,
    source_size_bytes=counts,
    recipe=recipes,
    calibration=st.builds(Calibration, texts, small_counts, small_counts, st.sampled_from(Packing)),
    calibration_use=st.none() | st.builds(CalibrationUse, texts, counts, counts, counts, text_lists),
    format=texts,
    modules=st.lists(modules, max_size=3).map(tuple),
    sensitivities=st.lists(sensitivities, max_size=3).map(tuple),
    phase_costs=st.lists(st.builds(PhaseCost, texts, st.floats(0, 1e9), counts, counts), max_size=3).map(tuple),
    verification=st.none()
    | st.builds(Verification, texts, small_counts, texts, st.dictionaries(texts, texts, max_size=3), texts),
    devices=st.lists(st.builds(DeviceSupport, st.sampled_from(Device), small_counts), max_size=3).map(tuple),
    evaluation=evaluations,
    engine=texts,
    job_id=texts,
    create_time=st.datetimes(timezones=st.just(UTC)),
    versions=st.dictionaries(texts, texts, max_size=3),
    engine_options=st.none() | st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts, max_size=3),
).map(lambda manifest: replace(manifest, digest=content_digest(manifest.files)))


@given(manifests)
def test_a_manifest_survives_its_json(manifest: Manifest) -> None:
    data = to_json(manifest)
    assert from_json(data, URI) == manifest
    assert to_json(from_json(data, URI)) == data


@given(manifests)
def test_the_json_is_canonical(manifest: Manifest) -> None:
    """Sorted keys, UTF-8, one newline at the end."""
    data = to_json(manifest)
    document = json.loads(data)
    assert data == (json.dumps(document, ensure_ascii=False, indent=2, sort_keys=True) + "\n").encode()
    assert document["format_version"] == 1


@given(files)
def test_the_digest_is_that_of_the_set_of_files(some: tuple[ArtifactFile, ...]) -> None:
    """Their order does not matter; each of their fields does."""
    digest = content_digest(some)
    assert content_digest(reversed(some)) == digest
    first = some[0]
    for changed in (
        replace(first, path=first.path + "x"),
        replace(first, size_bytes=first.size_bytes + 1),
        replace(first, sha256=first.sha256[::-1] + "0"),
    ):
        assert content_digest([changed, *some[1:]]) != digest


def test_the_digest_of_known_files_stays_what_it_is() -> None:
    """It names artifacts in buckets, so it may never change."""
    assert make_manifest().digest == "sha256:1eee72fc48557295850f1b306ace6458aa873c73ec2d744d766cf49d09a38e46"


def test_a_time_of_another_zone_is_written_in_utc() -> None:
    local = datetime(2026, 1, 2, 3, 0, tzinfo=timezone(timedelta(hours=2)))
    document = json.loads(to_json(make_manifest(create_time=local)))
    assert document["create_time"] == "2026-01-02T01:00:00Z"


def test_a_newer_format_is_said_to_be_newer() -> None:
    """Whatever else it holds: this version cannot judge it."""
    with pytest.raises(FailedPreconditionError) as raised:
        from_json(b'{"format_version": 2}', URI)
    assert raised.value.reason == "MANIFEST_VERSION_UNSUPPORTED"
    assert raised.value.metadata == {"uri": URI, "format_version": "2", "supported_format_version": "1"}


def test_fields_of_a_later_bitmill_are_ignored() -> None:
    document = json.loads(to_json(make_manifest()))
    document["signature"] = {"later": True}
    document["recipe"]["later"] = 1
    assert from_json(json.dumps(document).encode(), URI) == make_manifest()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b'"text"',
        b"\xff\xfe",
        b'{"format_version": "1"}',
        b'{"format_version": 0}',
        b'{"format_version": true}',
        b"[" * 100_000,
    ],
)
def test_bytes_that_are_no_manifest_are_data_loss(data: bytes) -> None:
    with pytest.raises(DataLossError) as raised:
        from_json(data, URI)
    assert raised.value.reason == "MANIFEST_INVALID"
    assert raised.value.metadata == {"uri": URI}
    assert URI in raised.value.message


def without(*path: str) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change


def with_value(value: object, *path: str | int) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


LATER_FIELDS = ("format", "modules", "sensitivities", "phase_costs", "calibration_use")
FIELDS = [(key,) for key in json.loads(to_json(make_manifest())) if key not in LATER_FIELDS] + [
    ("source", "uri"),
    ("recipe", "scheme"),
    ("recipe", "seed"),
    ("calibration", "digest"),
    ("evaluation", "num_tokens"),
]


def test_a_manifest_of_the_first_release_is_read_as_it_was_made() -> None:
    """GPTQ in static order, concatenated samples, and nothing measured that was not measured then."""
    manifest = from_json((Path(__file__).parent / "data/manifest-0.1.json").read_bytes(), URI)
    assert manifest.recipe == Recipe(
        Scheme.W4A16,
        64,
        algorithm=Algorithm.GPTQ,
        activation_order=ActivationOrder.STATIC,
        ignore=("lm_head",),
        dampening_frac=0.01,
        seed=0,
    )
    assert manifest.calibration == Calibration("", 32, 512, Packing.CONCATENATE)
    assert manifest.calibration_use == CalibrationUse("sha256:" + "2" * 64)
    assert manifest.evaluation == Evaluation(20.5, 21.25, 0.03125, 4096)
    assert (manifest.format, manifest.modules, manifest.phase_costs) == ("compressed-tensors", (), ())
    assert manifest.verification is None
    assert from_json(to_json(manifest), URI) == manifest


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_a_manifest_without_a_field_is_invalid(path: tuple[str, ...]) -> None:
    refuse(without(*path))


@pytest.mark.parametrize("path", [*FIELDS, *((key,) for key in LATER_FIELDS)], ids=".".join)
def test_a_field_of_another_type_is_invalid(path: tuple[str, ...]) -> None:
    refuse(with_value(None, *path))


@pytest.mark.parametrize(
    "change",
    [
        with_value("sha256:" + "0" * 64, "digest"),
        with_value([], "files"),
        with_value(-1, "files", 0, "size_bytes"),
        with_value(2**64, "recipe", "seed"),
        with_value(-2, "recipe", "group_size"),
        with_value(2**31, "recipe", "group_size"),
        with_value("\ud800", "files", 0, "path"),
        with_value(2.0, "files", 0, "size_bytes"),
        with_value(True, "files", 0, "size_bytes"),
        with_value("ABC", "files", 0, "sha256"),
        with_value("A" * 64, "files", 0, "sha256"),
        with_value("W2A16", "recipe", "scheme"),
        with_value([1], "recipe", "ignore"),
        with_value("tpu", "devices", 0, "device"),
        with_value(1, "versions", "torch"),
        with_value("yesterday", "create_time"),
        with_value("2026-01-01T00:00:00", "create_time"),
        with_value(math.nan, "evaluation", "mean_kl_divergence"),
        with_value(math.inf, "evaluation", "source_perplexity"),
        with_value(10**400, "evaluation", "source_perplexity"),
        with_value("0001-01-01T00:00:00+14:00", "create_time"),
        with_value("9999-12-31T23:59:59-14:00", "create_time"),
        with_value("\ud800", "engine"),
        with_value({"\ud800": "1"}, "versions"),
        with_value(2**32, "devices", 0, "min_compute_capability"),
        with_value(2**32, "calibration", "num_samples"),
        with_value(2**32, "calibration", "max_sequence_length"),
        with_value("MAYBE", "recipe", "algorithm"),
        with_value("RANDOM", "recipe", "activation_order"),
        with_value([{"pattern": "x"}], "recipe", "rules"),
        with_value(["x"], "recipe", "rules"),
        with_value("FP4", "recipe", "kv_cache"),
        with_value("0.8", "recipe", "smoothing_strength"),
        with_value({}, "recipe", "adaptive"),
        with_value("STACK", "calibration", "packing"),
        with_value([1], "modules"),
        with_value([{"name": "a", "scheme": "W2A16", "group_size": 0, "remark": ""}], "modules"),
        with_value([{"phase": "SAVE", "duration_s": -1.0}], "phase_costs"),
        with_value({}, "calibration_use"),
        with_value({}, "verification"),
        with_value(None, "evaluation", "layer_losses"),
        with_value([], "engine_options"),
        with_value({"a": math.inf}, "engine_options"),
        with_value({"a": [10**400]}, "engine_options"),
        with_value(json.loads('{"a":' * 40 + "1" + "}" * 40), "engine_options"),
    ],
)
def test_a_value_that_cannot_be_is_invalid(change: Callable[[Any], None]) -> None:
    refuse(change)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/", "", "a\\b", "a\0b", "..", "."]
)
def test_a_file_outside_the_artifact_is_invalid(path: str) -> None:
    """Even when the digest fits."""
    stolen = [ArtifactFile(path, 2, "0" * 64)]

    def change(document: Any) -> None:
        document["files"] = [{"path": path, "size_bytes": 2, "sha256": "0" * 64}]
        document["digest"] = content_digest(stolen)

    refuse(change)
    with pytest.raises(ValueError, match="path"):
        to_json(replace(make_manifest(), files=tuple(stolen), digest=content_digest(stolen)))


def test_a_path_that_comes_twice_is_invalid() -> None:
    twice = [ArtifactFile("config.json", 2, "0" * 64), ArtifactFile("config.json", 3, "1" * 64)]

    def change(document: Any) -> None:
        document["files"] = [{"path": f.path, "size_bytes": f.size_bytes, "sha256": f.sha256} for f in twice]
        document["digest"] = content_digest(twice)

    refuse(change)


def test_sizes_that_no_message_can_sum_up_are_invalid() -> None:
    files = [ArtifactFile("a", 2**63, "0" * 64), ArtifactFile("b", 2**63, "0" * 64)]

    def change(document: Any) -> None:
        document["files"] = [{"path": f.path, "size_bytes": f.size_bytes, "sha256": f.sha256} for f in files]
        document["digest"] = content_digest(files)

    refuse(change)


def test_a_number_that_is_none_is_not_written() -> None:
    manifest = make_manifest()
    with pytest.raises(ValueError, match="finite"):
        to_json(replace(manifest, evaluation=replace(manifest.evaluation, mean_kl_divergence=math.nan)))


def refuse(change: Callable[[Any], None]) -> None:
    document = json.loads(to_json(make_manifest()))
    change(document)
    with pytest.raises(DataLossError) as raised:
        from_json(json.dumps(document).encode(), URI)
    assert raised.value.reason == "MANIFEST_INVALID"
