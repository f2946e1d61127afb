"""The parts of a report that tell how an artifact was made: recipe, calibration, layers, costs, proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bitmill.artifact.v1.artifact_pb2 import Artifact
from bitmill.artifact.v1.measurement_pb2 import ModuleResult, PhaseCost, Sensitivity
from bitmill.cli.artifact_facts import devices_text
from bitmill.cli.report import words
from bitmill.cli.report.markup import Html, element, facts, folded, table

_OPEN_ROWS = 40
"""Tables of more rows are folded."""


def origin(artifact: Artifact) -> Html:
    """What it is and where it comes from."""
    return facts(
        [
            ("artifact", artifact.uri),
            ("digest", artifact.digest),
            ("format", artifact.format),
            ("source", artifact.source_uri),
            ("source digest", artifact.source_digest),
            ("served on", devices_text(artifact.devices)),
            ("served with", ", ".join(words.options(artifact.engine_options))),
            ("engine", " ".join([artifact.engine, artifact.versions.get(artifact.engine, "")]).strip()),
            ("job", artifact.job_id),
            ("created", words.moment(artifact.create_time)),
        ]
    )


def recipe(artifact: Artifact) -> Iterator[Html]:
    """How the weights were rounded."""
    yield element("h2", "Recipe")
    yield facts(words.recipe_facts(artifact.recipe))


def calibration(artifact: Artifact) -> Iterator[Html]:
    """The text that the model saw while it was quantized."""
    yield element("h2", "Calibration")
    if not artifact.HasField("calibration_use"):
        yield element("p", "The recipe needed no data.")
        return
    asked, used = artifact.calibration, artifact.calibration_use
    yield facts(
        [
            ("text", asked.uri or "Python's own documentation, docstrings and source"),
            ("samples", f"{used.num_samples:,} of at most {asked.max_sequence_length:,} tokens"),
            ("packing", words.packing(asked.packing)),
            ("tokens", f"{used.num_tokens:,}"),
            ("documents", f"{used.num_documents:,}"),
            ("digest", artifact.calibration_digest),
            ("saw no token", ", ".join(used.uncalibrated_modules)),
        ]
    )


def modules(artifact: Artifact) -> Iterator[Html]:
    """What became of each layer; first those that were not treated as the recipe says."""
    if not artifact.modules:
        return
    yield element("h2", "Layers")
    counts = Counter(words.grid(module.scheme, module.group_size) for module in artifact.modules)
    counted = [(name, f"{count:,}") for name, count in counts.most_common()]
    yield table("Layers by scheme", ["scheme", "layers"], counted, numeric=[1])
    remarkable = [module for module in artifact.modules if module.remark or module.HasField("dampening_frac")]
    if remarkable:
        yield _module_table("Layers that were treated otherwise than the recipe says", remarkable)
    else:
        yield element("p", "Every layer was treated as the recipe says.")
    caption = f"All {len(artifact.modules):,} layers"
    yield folded(caption, _module_table(caption, artifact.modules), is_open=len(artifact.modules) <= _OPEN_ROWS)


def _module_table(caption: str, modules: Sequence[ModuleResult]) -> Html:
    columns = ["layer", "scheme", "GPTQ loss", "damping", "remark"]
    rows = [
        (
            module.name,
            words.grid(module.scheme, module.group_size),
            words.number(module.loss) if module.HasField("loss") else "",
            words.number(module.dampening_frac) if module.HasField("dampening_frac") else "",
            module.remark,
        )
        for module in modules
    ]
    used = [index for index, name in enumerate(columns) if name in columns[:2] or any(row[index] for row in rows)]
    kept = [[row[index] for index in used] for row in rows]
    numeric = [place for place, index in enumerate(used) if index in (2, 3)]
    long = [place for place, index in enumerate(used) if index in (0, 4)]
    return table(caption, [columns[index] for index in used], kept, numeric, long)


def sensitivities(artifact: Artifact) -> Iterator[Html]:
    """What the adaptive search measured for each choice, and what it chose."""
    if not artifact.sensitivities:
        return
    yield element("h2", "Adaptive choice")
    yield element(
        "p",
        "Mean KL divergence in nats of the whole model, and size, when only these layers are rounded so. ",
        element("span", "▸", class_="chosen"),
        " marks what was chosen.",
    )
    candidates = list(dict.fromkeys(map(_candidate, artifact.sensitivities)))
    groups: dict[tuple[str, ...], dict[str, Sensitivity]] = {}
    for each in artifact.sensitivities:
        groups.setdefault(tuple(each.modules), {})[_candidate(each)] = each
    rows = [
        [", ".join(names), *(_measured(by_candidate.get(candidate)) for candidate in candidates)]
        for names, by_candidate in groups.items()
    ]
    chosen = Counter(_candidate(each) for each in artifact.sensitivities if each.chosen)
    counted = [(candidate, f"{chosen[candidate]:,}") for candidate in candidates]
    yield table("Groups of layers by what was chosen", ["candidate", "groups"], counted, numeric=[1])
    caption = f"All {len(rows):,} groups of layers"
    yield folded(
        caption,
        table(caption, ["layers", *candidates], rows, numeric=range(1, len(candidates) + 1), long=[0]),
        is_open=len(rows) <= _OPEN_ROWS,
    )


def _candidate(each: Sensitivity) -> str:
    return words.grid(each.candidate.scheme, each.candidate.group_size)


def _measured(each: Sensitivity | None) -> str:
    if each is None:
        return ""
    value = f"{words.number(each.kl_divergence)} · {words.size(each.size_bytes)}"
    return element("span", f"▸ {value}", class_="chosen") if each.chosen else value


def costs(artifact: Artifact) -> Iterator[Html]:
    """What each phase of the job took."""
    if not artifact.phase_costs:
        return
    yield element("h2", "Cost")
    total = sum(words.seconds(cost.duration) for cost in artifact.phase_costs)
    rows = [_cost_row(cost, total) for cost in artifact.phase_costs]
    yield table(
        f"Wall-clock time by phase, {words.duration(total)} in all, and the engine's peak memory",
        ["phase", "time", "part of the whole", "memory", "GPU memory"],
        rows,
        numeric=[1, 3, 4],
    )


def _cost_row(cost: PhaseCost, total: float) -> list[str]:
    taken = words.seconds(cost.duration)
    part = 100 * taken / total if total else 0.0
    bar = element("span", class_="bar", style=f"width: {part:.1f}%")
    return [
        cost.phase.lower(),
        words.duration(taken),
        element("span", bar, class_="track", role="img", aria_label=f"{part:.0f} percent"),
        words.size(cost.peak_memory_bytes) if cost.peak_memory_bytes else "",
        words.size(cost.peak_device_memory_bytes) if cost.peak_device_memory_bytes else "",
    ]


def verification(artifact: Artifact) -> Iterator[Html]:
    """Whether the serving engine loads it."""
    yield element("h2", "Verification")
    if not artifact.HasField("verification"):
        yield element("p", "Not loaded by a serving engine: the server was not told how to.")
        return
    proof = artifact.verification
    if proof.skipped:
        yield element("p", f"Skipped: {proof.skipped}")
    else:
        text = f"Loaded by the serving engine on {proof.device}; {proof.num_tokens:,} tokens generated, greedily:"
        yield element("p", text)
        yield facts([("generated", proof.text)])
    yield _versions("Versions that verified it", proof.versions)


def provenance(artifact: Artifact) -> Iterator[Html]:
    """Versions and files."""
    yield element("h2", "Versions and files")
    yield _versions("Versions that made it", artifact.versions)
    if artifact.files:
        caption = f"Files: {len(artifact.files):,}"
        rows = [(file.path, words.size(file.size_bytes), file.sha256) for file in artifact.files]
        yield folded(caption, table(caption, ["file", "size", "SHA-256"], rows, numeric=[1], long=[0, 2]))


def _versions(caption: str, versions: Mapping[str, str]) -> Html:
    return table(caption, ["package", "version"], sorted(versions.items())) if versions else Html()
