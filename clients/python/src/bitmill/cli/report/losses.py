"""The parts of a report that tell what an artifact lost: key numbers, loss by layer, its place among its siblings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bitmill.artifact.v1.artifact_pb2 import Artifact, Evaluation
from bitmill.artifact.v1.measurement_pb2 import ModuleResult
from bitmill.cli.report import axes, charts, words
from bitmill.cli.report.charts import Labelled
from bitmill.cli.report.markup import Html, element, folded, joined, table

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def tiles(artifact: Artifact) -> Html:
    """The numbers that one looks for first."""
    return element(
        "div",
        *(
            element(
                "div",
                element("p", what, class_="what"),
                element("p", value, class_="value"),
                element("p", note, class_="note"),
                class_="tile",
            )
            for what, value, note in _key_numbers(artifact)
        ),
        class_="tiles",
    )


def _key_numbers(artifact: Artifact) -> Iterator[tuple[str, str, str]]:
    before, after, evaluation = artifact.source_size_bytes, artifact.size_bytes, artifact.evaluation
    ratio = f", {before / after:.2f} times smaller" if before and after else ""
    yield "size", words.size(after), f"from {words.size(before)}{ratio}"
    if not evaluation.num_tokens:
        return
    source, perplexity = evaluation.source_perplexity, evaluation.artifact_perplexity
    change = f", {100 * (perplexity / source - 1):+.2f} %" if source else ""
    yield "perplexity", f"{perplexity:.3f}", f"from {source:.3f}{change}"
    mean, tail = words.number(evaluation.mean_kl_divergence), words.number(evaluation.p99_kl_divergence)
    yield "mean KL divergence", f"{mean} nats", "KL(source || artifact) by token"
    if _has_tail(evaluation):
        yield "99th percentile of KL", f"{tail} nats", "1 token in 100 is above it"
        yield "top-1 agreement", f"{100 * evaluation.top1_agreement:.2f} %", "same likeliest next token"
    yield "measured on", f"{evaluation.num_tokens:,} tokens", "held out from calibration"


def _has_tail(evaluation: Evaluation) -> bool:
    """Whether it was measured: manifests of older servers have zeros."""
    return evaluation.top1_agreement > 0 or evaluation.p99_kl_divergence > 0


def by_layer(artifact: Artifact) -> Iterator[Html]:
    """Errors of the decoder layers' outputs, and what GPTQ told of each Linear layer."""
    errors = [(loss.layer, loss.relative_error) for loss in artifact.evaluation.layer_losses]
    weights = _by_kind(artifact.modules)
    if not errors and not weights:
        return
    yield element("h2", "Loss by layer")
    if errors:
        yield from _layer_errors(errors)
    if weights:
        yield from _weight_losses(weights)


def _layer_errors(errors: Sequence[tuple[str, float]]) -> Iterator[Html]:
    title = "Relative error of each decoder layer's output, logarithmic"
    vertical = axes.logarithmic("relative squared error", (error for _, error in errors))
    caption = (
        "Squared error of each decoder layer's output against the source's, relative to the output's own square, on "
        "held-out text. Errors of the layers before are in it."
    )
    plot = charts.by_layer(errors, "of the output's square", charts.WIDE, title, vertical)
    yield element("figure", plot, element("figcaption", caption))
    rows = [(layer, words.number(error)) for layer, error in errors]
    yield folded("These numbers as a table", table(title, ["layer", "relative error"], rows, numeric=[1]))


def _weight_losses(kinds: dict[str, list[tuple[str, float]]]) -> Iterator[Html]:
    yield element("h3", "GPTQ's loss by kind of layer")
    yield element(
        "p",
        "Squared error of each layer's output on the calibration data, as GPTQ tells it, in the order of the decoder "
        "layers. All plots share one logarithmic scale; the numbers are in the table of layers.",
        class_="note",
    )
    vertical = axes.logarithmic("loss", (loss for kind in kinds.values() for _, loss in kind))
    yield element(
        "div",
        *(
            element(
                "figure",
                element("figcaption", kind),
                charts.by_layer(losses, "", charts.PANEL, f"GPTQ's loss of {kind}, logarithmic", vertical),
            )
            for kind, losses in kinds.items()
        ),
        class_="panels",
    )


def _by_kind(modules: Sequence[ModuleResult]) -> dict[str, list[tuple[str, float]]]:
    """Names and losses by what follows the decoder layer's number in a name, for example "mlp.up_proj"."""
    kinds: dict[str, list[tuple[str, float]]] = {}
    for module in modules:
        parts = module.name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        if module.HasField("loss") and number is not None:
            kinds.setdefault(".".join(parts[number + 1 :]), []).append((module.name, module.loss))
    return kinds


def _is_comparable(artifact: Artifact) -> bool:
    return artifact.evaluation.num_tokens > 0 and math.isfinite(artifact.evaluation.mean_kl_divergence)


def siblings(artifact: Artifact, others: Sequence[Artifact]) -> Iterator[Html]:
    """Its size against its divergence among the artifacts of the same source."""
    yield element("h2", "Among its siblings")
    family = sorted(filter(_is_comparable, [artifact, *others]), key=lambda each: each.size_bytes)
    if not _is_comparable(artifact) or len(family) == 1:
        yield element("p", "No other artifact of this source with an evaluation is known to the server.")
        return
    best = _best(family)
    unit, name = next((size, name) for size, name in _UNITS if family[-1].size_bytes >= size or size == 1)
    spread = (family[-1].size_bytes - family[0].size_bytes) * 0.08
    horizontal = axes.linear(f"size, {name}", family[0].size_bytes - spread, family[-1].size_bytes + spread, unit)
    vertical = axes.logarithmic("mean KL divergence, nats", (each.evaluation.mean_kl_divergence for each in family))
    marks = [
        Labelled(
            each.size_bytes,
            each.evaluation.mean_kl_divergence,
            f"{number}. {each.name}: {_recipe(each)}, {words.size(each.size_bytes)}, {_divergence(each)} nats",
            text=f"{number} {_recipe(each)}",
            is_subject=each is artifact,
            is_best=number in best,
        )
        for number, each in enumerate(family, start=1)
    ]
    title = "Size against mean KL divergence of the artifacts of this source"
    caption = (
        "Lower left is better. The diamond is this artifact; filled dots on the dashed line are those that no smaller "
        "one surpasses. Numbers are those of the table; g64 stands for one scale per 64 input channels."
    )
    plot = charts.scatter(charts.WIDE, horizontal, vertical, marks, title)
    yield element("figure", plot, element("figcaption", caption))
    if len({each.evaluation.num_tokens for each in family}) > 1:
        yield element("p", "They were evaluated on different numbers of tokens, so their divergences compare roughly.")
    rows = [_sibling_row(number, each, is_subject=each is artifact) for number, each in enumerate(family, start=1)]
    yield table("Artifacts of this source by size", _SIBLING_COLUMNS, rows, numeric=[0, 3, 4, 5, 6], long=[1])


_SIBLING_COLUMNS = ["no.", "artifact", "scheme", "size", "mean KL, nats", "perplexity", "tokens"]


def _sibling_row(number: int, each: Artifact, *, is_subject: bool) -> list[str]:
    return [
        str(number),
        joined(
            [
                element("strong", f"{each.name} (this one)") if is_subject else element("span", each.name),
                element("div", each.uri, class_="note"),
            ]
        ),
        _recipe(each),
        words.size(each.size_bytes),
        _divergence(each),
        f"{each.evaluation.artifact_perplexity:.3f}",
        f"{each.evaluation.num_tokens:,}",
    ]


def _best(family: Sequence[Artifact]) -> set[int]:
    """Numbers of those than which no other is smaller and closer to the source; `family` is sorted by size."""
    best: set[int] = set()
    least = float("inf")
    for number, each in enumerate(family, start=1):
        if each.evaluation.mean_kl_divergence < least:
            best.add(number)
            least = each.evaluation.mean_kl_divergence
    return best


def _recipe(artifact: Artifact) -> str:
    return words.grid(artifact.recipe.scheme, artifact.recipe.group_size)


def _divergence(artifact: Artifact) -> str:
    return words.number(artifact.evaluation.mean_kl_divergence)
