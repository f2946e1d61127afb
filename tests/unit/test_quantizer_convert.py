"""Between protos and the domain nothing is lost, and what comes back is accepted as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from bitmill_common.recipes import ActivationOrder, Algorithm, Calibration, KvCacheScheme, Packing, Scheme
from bitmill_quantizer.convert_job import draft_of, spec_proto
from bitmill_quantizer.convert_recipe import calibration_draft, calibration_proto, recipe_draft, recipe_proto
from bitmill_quantizer.drafts import AdaptiveDraft, CandidateDraft, RecipeDraft, RuleDraft, SpecDraft
from bitmill_quantizer.recipe_rules import complete_recipe
from bitmill_quantizer.schemes import TRAITS
from bitmill_quantizer.specs import complete

NUM_SAMPLES = 64

D = TypeVar("D", RecipeDraft, RuleDraft)

patterns = st.sampled_from(["lm_head", r"re:.*self_attn\.(q|k|v)_proj", "re:.*down_proj", "model.layers.0.mlp.up_proj"])
algorithms = st.none() | st.sampled_from([each for each in Algorithm if each is not Algorithm.NONE])
group_sizes = st.none() | st.sampled_from([-1, 32, 64, 128])
symmetry = st.none() | st.booleans()
concrete = st.sampled_from([scheme for scheme in Scheme if scheme is not Scheme.ADAPTIVE])
budgets = st.one_of(
    st.builds(lambda size: {"max_size_bytes": size}, st.integers(1, 2**64 - 1)),
    st.builds(lambda ratio: {"max_perplexity_ratio": ratio}, st.floats(1, 10)),
)
candidates = st.lists(st.builds(CandidateDraft, concrete, group_sizes), max_size=4).map(tuple)
searches = st.builds(
    lambda found, budget, samples: AdaptiveDraft(candidates=found, num_samples=samples, **budget),
    candidates,
    budgets,
    st.none() | st.integers(1, NUM_SAMPLES),
)
recipes = st.builds(
    RecipeDraft,
    scheme=st.sampled_from(Scheme),
    group_size=group_sizes,
    symmetric=symmetry,
    ignore=st.lists(patterns, max_size=3).map(tuple),
    dampening_frac=st.none() | st.floats(0.001, 1),
    seed=st.none() | st.integers(0, 2**64 - 1),
    algorithm=algorithms,
    activation_order=st.none() | st.sampled_from([ActivationOrder.NONE, ActivationOrder.STATIC]),
    rules=st.lists(st.builds(RuleDraft, patterns, concrete, group_sizes, symmetry, algorithms), max_size=3).map(tuple),
    kv_cache=st.none() | st.sampled_from(KvCacheScheme),
    smoothing_strength=st.none() | st.floats(0, 1),
    adaptive=st.none() | searches,
)


def fitted(draft: RecipeDraft) -> RecipeDraft:
    """The draft without what its schemes do not take."""
    own = treated(draft)
    return replace(
        own,
        rules=tuple(treated(rule) for rule in draft.rules),
        smoothing_strength=draft.smoothing_strength if draft.scheme is Scheme.W8A8_INT8 else None,
        adaptive=(draft.adaptive or AdaptiveDraft(max_size_bytes=1)) if draft.scheme is Scheme.ADAPTIVE else None,
    )


def treated(draft: D) -> D:
    traits = TRAITS[draft.scheme]
    return replace(
        draft,
        group_size=draft.group_size if draft.group_size in traits.group_sizes else None,
        symmetric=draft.symmetric or not traits.may_be_asymmetric,
        algorithm=draft.algorithm if draft.algorithm in traits.algorithms else None,
    )


@given(recipes | recipes.map(fitted))
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
