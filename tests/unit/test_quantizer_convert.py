"""Between protos and the domain nothing is lost, and what comes back is accepted as it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bitmill_common.recipes import Calibration, Packing, Scheme
from bitmill_quantizer.recipes.drafts import AdaptiveDraft, RecipeDraft, SpecDraft
from bitmill_quantizer.recipes.recipe_rules import complete_recipe
from bitmill_quantizer.recipes.schemes import TRAITS
from bitmill_quantizer.recipes.specs import complete
from bitmill_quantizer.servicers.convert_job import draft_of, spec_proto
from bitmill_quantizer.servicers.convert_recipe import calibration_draft, calibration_proto, recipe_draft, recipe_proto
from support.recipes import NUM_SAMPLES, recipes


@given(recipes)
def test_a_complete_recipe_survives_its_proto(draft: RecipeDraft) -> None:
    """A caller may send back what the server told; whatever is wrong is a violation, and never an exception."""
    recipe, violations = complete_recipe(draft, NUM_SAMPLES)
    assert (recipe is None) == bool(violations)
    if recipe is not None:
        assert complete_recipe(recipe_draft(recipe_proto(recipe)), NUM_SAMPLES) == (recipe, [])


@given(st.sampled_from(Scheme), st.sampled_from(Packing))
def test_a_spec_that_names_a_scheme_alone_survives_its_proto(scheme: Scheme, packing: Packing) -> None:
    search = AdaptiveDraft(max_size_bytes=1) if scheme is Scheme.ADAPTIVE else None
    spec, violations = complete(SpecDraft("file:///m", "m", RecipeDraft(scheme, adaptive=search)))
    assert violations == []
    assert spec is not None
    assert complete(draft_of(spec_proto(spec))) == (spec, [])
    assert TRAITS[scheme].algorithms[0] is spec.recipe.algorithm
    calibration = Calibration("file:///x.txt", 3, 16, packing)
    assert calibration_draft(calibration_proto(calibration)).packing is packing
