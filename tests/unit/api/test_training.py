"""Wire formats of rows: what is set for a link, and what a plan fills in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.training import CommunicationSpec, InterNodeSpec, LinkCodecs, RowCodecs
from dlrm_api.wire import CODECS, DIRECTIONS

codecs = st.sampled_from([*CODECS])
choices = st.sampled_from([*CODECS, "auto"])
links = st.builds(LinkCodecs, forward=codecs, backward=codecs)
specs = st.builds(
    CommunicationSpec,
    forward=choices,
    backward=choices,
    inter_node=st.builds(InterNodeSpec, forward=st.none() | choices, backward=st.none() | choices),
)


@given(specs, st.none() | links, st.none() | links)
def test_a_plans_formats_replace_all_choices(
    spec: CommunicationSpec, inside: LinkCodecs | None, between: LinkCodecs | None
) -> None:
    found = spec.with_codecs(RowCodecs(intra_node=inside, inter_node=between))

    assert not found.is_open
    if inside is not None:
        assert found.codecs("intra_node") == (inside.forward, inside.backward)
    if between is not None:
        assert found.codecs("inter_node") == (between.forward, between.backward)


@given(specs)
def test_links_between_nodes_have_the_formats_of_all_links_unless_they_are_set(spec: CommunicationSpec) -> None:
    for direction in DIRECTIONS:
        own = getattr(spec.inter_node, direction)

        assert spec.choice("intra_node", direction) == getattr(spec, direction)
        assert spec.choice("inter_node", direction) == (own or getattr(spec, direction))
