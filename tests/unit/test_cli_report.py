"""What the page of `bitmill artifacts report` holds: every number, nothing of the outside, no markup of strangers."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from bitmill.artifact.v1.artifact_pb2 import Artifact, Evaluation
from bitmill.artifact.v1.measurement_pb2 import LayerLoss, ModuleResult, Verification
from bitmill.artifact.v1.recipe_pb2 import KvCacheScheme, Recipe, Scheme
from bitmill.cli.report import axes, render
from support.report_artifacts import KINDS, adaptive_artifact, measured_artifact, sibling

HOSTILE = """</title></style></td><script>alert("1")</script><img src=x onerror='alert(1)'>&amp;\u202e"""
VOID = {"meta"}


class Page(HTMLParser):
    """A page read as a browser would, with every element closed in the order in which it was opened."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open
        self.text = "\n".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)


def read(*artifacts: Artifact, known: tuple[Artifact, ...] = ()) -> Page:
    return Page(render(artifacts, known))


def test_every_number_of_an_artifact_is_on_its_page() -> None:
    """What was measured, what it cost, what it was made with and by."""
    artifact = measured_artifact()
    text = read(artifact).text
    for value in (
        artifact.uri, artifact.digest, artifact.source_uri, artifact.source_digest, artifact.job_id,
        "112.3 MB", "269.1 MB", "2.40 times smaller", "14.021", "13.713", "+2.25 %", "0.03125 nats", "0.4375 nats",
        "91.23 %", "4,097 tokens", "cpu, cuda (compute capability 7.5)", "max_model_len 512\n", "compressed-tensors",
        "2026-12-01 18:30:00 UTC", "llmcompressor 0.14.0", "2.13.0+cpu", "0.32.1",
        "one scale per 64 input channels", "symmetric grid", "GPTQ", "0.015 of the Hessian", "lm_head",
        "re:.*down_proj → W8A16 per channel", "256 of at most 1,024 tokens", "each document a sample", "231,417", "251",
        artifact.calibration_digest, "model.layers.1.mlp.experts.5",
        "0.62 s", "1 min 33 s", "21.7 s", "1 min 55 s", "3.2 GB", "1.2 GB", "2.3 GB",
        "its Hessian did not invert with less damping", "0.15", "on cpu; 8 tokens", " is Paris.\nIt is",
        "model.safetensors", "cd" * 32,
    ):  # fmt: skip
        assert value in text, value
    for loss in artifact.evaluation.layer_losses:
        assert f"{loss.relative_error:.4g}" in text
        assert loss.layer in text
    for module in artifact.modules:
        assert f"{module.loss:.4g}" in text
        assert module.name in text
    for kind in KINDS:
        assert kind in text.splitlines()  # the name of a plot


def test_what_was_chosen_of_which_sensitivities_is_shown() -> None:
    """With the budget that decided, and every measured value."""
    artifact = adaptive_artifact()
    text = read(artifact).text
    assert "least loss within 120.0 MB" in text
    assert "W4A16 g128, W4A16 g32, W8A16 per channel, UNQUANTIZED" in text
    for each in artifact.sensitivities:
        mark = "▸ " if each.chosen else ""
        assert f"{mark}{each.kl_divergence:.4g} · {each.size_bytes / 1e6:.1f} MB" in text.splitlines()
        assert ", ".join(each.modules) in text


def test_siblings_are_the_artifacts_of_the_same_source() -> None:
    """Those of another source and those without an evaluation are none; the artifact itself is marked once."""
    artifact = measured_artifact()
    known = (
        sibling(1, 90_000_000, 0.3),
        artifact,  # the list has it too
        sibling(2, 150_000_000, 0.0021),
        sibling(3, 150_000_001, 0.5, source_digest="sha256:other"),
        sibling(4, 270_000_000, 0.0),
        Artifact(name="smol-5", digest="sha256:5", source_digest=artifact.source_digest),
    )
    page = read(artifact, known=known)
    for name in ("smol-1", "smol-2", "smol-4", "0.3", "0.0021", "13.715", "3 W8A8_INT8", "2 W4A16 g64"):
        assert name in page.text.splitlines(), name
    assert page.text.count("(this one)") == 1
    assert "smol-3" not in page.text
    assert "smol-5" not in page.text
    assert [value for name, value in page.attributes if name == "class"].count("subject") == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_have_no_place_in_a_plot_are_in_the_text_alone(number: float) -> None:
    """Not at its lower end, where the best ones are."""
    artifact = measured_artifact()
    finite = read(artifact, known=(sibling(1, 90_000_000, 0.3),))
    artifact.evaluation.layer_losses[0].relative_error = number
    page = read(artifact, known=(sibling(1, 90_000_000, 0.3), sibling(2, 80_000_000, number)))
    assert f"{number:.4g}" in page.text.splitlines()
    assert page.names.count("circle") == finite.names.count("circle") - 1
    artifact.evaluation.mean_kl_divergence = number
    assert "No other artifact" in read(artifact, known=(sibling(1, 90_000_000, 0.3),)).text


def test_evaluations_that_hardly_compare_are_said_to() -> None:
    """Fewer tokens are other tokens."""
    other = sibling(1, 90_000_000, 0.3)
    assert "compare roughly" not in read(measured_artifact(), known=(other,)).text
    other.evaluation.num_tokens = 512
    assert "compare roughly" in read(measured_artifact(), known=(other,)).text


def test_of_several_artifacts_each_is_told_of() -> None:
    """One after the other, among the same siblings."""
    other = sibling(1, 90_000_000, 0.3, name="other")
    page = read(measured_artifact(), other, known=(measured_artifact(), other))
    assert page.names.count("article") == 2
    assert page.text.count("(this one)") == 2


@pytest.mark.parametrize(
    ("artifact", "said"),
    [
        (Artifact(name="m", evaluation=Evaluation()), "No other artifact of this source"),
        (Artifact(name="m"), "The recipe needed no data."),
        (Artifact(name="m"), "Not loaded by a serving engine"),
        (Artifact(name="m", verification=Verification(skipped="no CUDA device")), "Skipped: no CUDA device"),
        (Artifact(name="m", modules=[ModuleResult(name="head")]), "Every layer was treated as the recipe says."),
        (Artifact(name="m", recipe=Recipe(kv_cache=KvCacheScheme.KV_CACHE_SCHEME_FP8)), "FP8, calibrated scales"),
        (Artifact(name="m", recipe=Recipe(smoothing_strength=0.8)), "strength 0.8"),
        (Artifact(name="m", recipe=Recipe(scheme=Scheme.SCHEME_W8A16, group_size=-1)), "one scale per output channel"),
    ],
)
def test_what_an_artifact_lacks_is_said_or_left_out(artifact: Artifact, said: str) -> None:
    """Artifacts of older servers and of recipes without data have fewer measurements."""
    page = read(artifact)
    assert said in page.text
    assert "99th percentile" not in page.text


@pytest.mark.parametrize("scheme", [number for number in Scheme.values() if number])
def test_every_scheme_is_put_into_words(scheme: int) -> None:
    """A person reads what is stored how."""
    page = read(Artifact(name="m", recipe=Recipe(scheme=scheme)))
    assert re.search(r"weights|each layer's scheme", page.text)


def test_a_page_refers_to_nothing_outside_itself() -> None:
    """No address to fetch, no script, and a policy that lets a browser load nothing."""
    page = render([measured_artifact(), adaptive_artifact()], [sibling(1, 90_000_000, 0.3)])
    assert not re.search(r"https?://|url\(|@import", page)
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "a", "object"} & set(parsed.names)
    assert not {"src", "href", "srcset"} & {name for name, _ in parsed.attributes}
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in parsed.attributes


def test_no_text_of_an_artifact_becomes_markup() -> None:
    """Names, addresses and remarks come from strangers; they are read back as they were."""
    clean = measured_artifact(2, modules=[ModuleResult(name="x")])
    clean.evaluation.layer_losses.append(LayerLoss(layer="x", relative_error=1))
    hostile = Artifact()
    hostile.CopyFrom(clean)
    for field in ("name", "digest", "uri", "source_uri", "format", "engine", "job_id", "calibration_digest"):
        setattr(hostile, field, HOSTILE)
    hostile.calibration.uri = HOSTILE
    hostile.recipe.ignore[0] = HOSTILE
    hostile.recipe.rules[0].pattern = HOSTILE
    hostile.modules[-1].name = hostile.modules[-1].remark = HOSTILE
    hostile.evaluation.layer_losses[-1].layer = HOSTILE
    hostile.verification.text = hostile.verification.device = hostile.phase_costs[0].phase = HOSTILE
    hostile.files[0].path = HOSTILE
    hostile.versions[HOSTILE] = HOSTILE
    clean.versions["x"] = "x"
    clean.modules[-1].remark = "x"
    known = sibling(1, 90_000_000, 0.3, name=HOSTILE, uri=HOSTILE)
    page, expected = read(hostile, known=(known,)), read(clean, known=(sibling(1, 90_000_000, 0.3),))
    assert page.names == expected.names
    assert page.text.count(HOSTILE) > 15
    assert {name for name, _ in page.attributes} == {name for name, _ in expected.attributes}


def test_plots_of_large_models_stay_within_their_frame() -> None:
    """Eighty layers, twenty siblings, long names: every mark and every text has its place in the plot."""
    known = tuple(sibling(n, 80_000_000 + n**3 * 9_000, 0.5 / 1.6**n, name="long-name-" * 9) for n in range(20))
    page = read(adaptive_artifact(80), known=known)
    frames = [value.split() for name, value in page.attributes if name == "viewbox" and value]
    assert len(frames) == 2 + len(KINDS)
    numbers = {name: [float(value or 0) for key, value in page.attributes if key == name] for name in ("cx", "cy", "x")}
    assert min(numbers["cx"] + numbers["cy"] + numbers["x"]) >= 0
    assert max(numbers["cx"] + numbers["x"]) <= 920
    assert max(numbers["cy"]) <= 320


class TestAxes:
    def test_linear_marks_are_round_and_inside(self) -> None:
        axis = axes.linear("size, MB", 83e6, 276e6, unit=1e6)
        assert [text for _, text in axis.ticks] == ["100", "150", "200", "250"]
        assert all(0 <= place <= 1 for place, _ in axis.ticks)

    @pytest.mark.parametrize(("low", "high"), [(5.0, 5.0), (0.0, 0.0), (-1e-9, 1e-9), (1e12, 1.0000001e12)])
    def test_a_linear_axis_of_next_to_nothing_has_marks(self, low: float, high: float) -> None:
        axis = axes.linear("x", low, high)
        assert 1 <= len(axis.ticks) <= 8
        assert 0 <= axis.place(low) <= 1

    @pytest.mark.parametrize(
        ("values", "texts"),
        [
            ([0.001, 2.0], ["0.001", "0.01", "0.1", "1"]),
            ([1e-7, 1e-5], ["10⁻⁷", "10⁻⁶", "10⁻⁵"]),
            ([0.012, 0.09], ["0.01", "0.02", "0.05", "0.1"]),
            ([3e-5, 3.4e-5], ["3·10⁻⁵", "4·10⁻⁵"]),
            ([0.0, 0.01, 1.0], ["0", "0.01", "0.1", "1"]),
            ([0.0], ["0"]),
        ],
    )
    def test_logarithmic_marks(self, values: list[float], texts: list[str]) -> None:
        """Powers of ten where there are some, round parts between them where not; zero lies on the end."""
        axis = axes.logarithmic("loss", values)
        assert [text for _, text in axis.ticks] == texts
        assert all(0 <= place <= 1 for place, _ in axis.ticks)
        places = [axis.place(value) for value in sorted(values)]
        assert all(0 <= low < high <= 1 for low, high in pairwise(places))

    @pytest.mark.parametrize("values", [[1e-30, 1e30], [0.0311], [5e-324, 1.7e308], [2.0, 2.0]])
    def test_extreme_values_have_a_few_marks(self, values: list[float]) -> None:
        assert 1 <= len(axes.logarithmic("loss", values).ticks) <= 13

    @pytest.mark.parametrize(("count", "last"), [(1, "0"), (12, "11"), (30, "25"), (80, "70"), (126, "120")])
    def test_layers_are_numbered_from_zero(self, count: int, last: str) -> None:
        axis = axes.positions("decoder layer", count)
        assert axis.ticks[0][1] == "0"
        assert len(axis.ticks) <= 12
        assert int(axis.ticks[-1][1]) >= int(last) - 2
