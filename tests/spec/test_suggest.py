import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.spec.job import SECTIONS
from rayway.spec.section import all_fields
from rayway.spec.suggest import SYNONYMS, nearest, unknown_key

FIELDS = all_fields()


def test_every_synonym_leads_to_a_field_and_is_none_itself() -> None:
    assert set(SYNONYMS.values()) <= set(FIELDS)
    assert not SYNONYMS.keys() & {field.rpartition(".")[2] for field in FIELDS}


@given(key=st.text(max_size=20), place=st.sampled_from(["", *SECTIONS]))
def test_whatever_the_key_the_repair_names_real_fields(key: str, place: str) -> None:
    text, right = unknown_key(key, place=place, fields=FIELDS)
    assert set(right) <= set(FIELDS)
    assert all(field in text for field in right)


@given(field=st.sampled_from([f for f in FIELDS if len(f.rpartition(".")[2]) > 4]), data=st.data())
def test_a_field_with_one_letter_missing_is_found_again(field: str, data: st.DataObject) -> None:
    place, _, name = field.rpartition(".")
    cut = data.draw(st.integers(1, len(name) - 1))
    _, right = unknown_key(name[:cut] + name[cut + 1 :], place=place, fields=FIELDS)
    assert right == [field]


@pytest.mark.parametrize("field", [f for f in FIELDS if "." in f])
def test_a_field_at_the_top_level_is_sent_to_its_section(field: str) -> None:
    name = field.rpartition(".")[2]
    if name not in FIELDS:
        assert field in unknown_key(name, place="", fields=FIELDS)[1]


def test_nearest_gives_the_nearest_first() -> None:
    assert nearest("buid", ["guild", "build", "x"]) == ["build", "guild"]
