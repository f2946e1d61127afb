"""The whole page of a report: one HTML file that refers to nothing outside itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from bitmill.artifact.v1.artifact_pb2 import Artifact
from bitmill.cli.report import losses, sections, words
from bitmill.cli.report.markup import Html, element, joined

# A page that may load and run nothing, whatever an artifact's name or remark holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(artifacts: Sequence[Artifact], known: Sequence[Artifact]) -> str:
    """The page about `artifacts`, one after the other; their siblings are those of `known` that have their source."""
    title = ", ".join(dict.fromkeys(artifact.name for artifact in artifacts))
    style = resources.files("bitmill.cli.report").joinpath("style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"{title} · bitmill report"),
        element("style", Html(style)),
    )
    body = element("body", element("main", *(_article(artifact, known) for artifact in artifacts)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _article(artifact: Artifact, known: Sequence[Artifact]) -> Html:
    source, digest = artifact.source_digest, artifact.digest
    others = [each for each in known if source and each.source_digest == source and each.digest != digest]
    return element(
        "article",
        element("h1", artifact.name),
        element("p", words.headline(artifact.recipe), class_="note"),
        losses.tiles(artifact),
        sections.origin(artifact),
        joined(losses.siblings(artifact, others)),
        joined(losses.by_layer(artifact)),
        joined(sections.recipe(artifact)),
        joined(sections.sensitivities(artifact)),
        joined(sections.modules(artifact)),
        joined(sections.calibration(artifact)),
        joined(sections.verification(artifact)),
        joined(sections.costs(artifact)),
        joined(sections.provenance(artifact)),
    )
