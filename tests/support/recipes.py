"""Drafts of recipes for property tests: half of them fitted to their schemes, so that most are complete."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from bitmill_common.recipes import ActivationOrder, Algorithm, KvCacheScheme, Scheme
from bitmill_quantizer.recipes.drafts import AdaptiveDraft, CandidateDraft, RecipeDraft, RuleDraft
from bitmill_quantizer.recipes.schemes import TRAITS

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
any_recipes = st.builds(
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


recipes = any_recipes | any_recipes.map(fitted)
