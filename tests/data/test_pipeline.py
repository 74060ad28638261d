"""How units become tasks: nothing is lost, nothing comes too late, no rank can block another."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.data.index import Index, build_index
from rayway.data.pipeline import Group, merged_groups
from rayway.data.plan import Plan, plan_order
from rayway.data.recipe import Order, ReaderRecipe
from rayway.data.stream import Unit


@pytest.fixture(scope="session")
def index(uneven: Path) -> Index:
    return build_index(str(uneven))


orders = st.fixed_dictionaries(
    {
        "global_batch": st.integers(2, 30),
        "seed": st.integers(0, 9),
        "cover": st.sampled_from(["drop", "all"]),
        "lanes": st.integers(1, 12),
        "window": st.integers(1, 3),
        "places": st.integers(1, 2),
    }
)


def order_of(index: Index, shape: dict[str, Any], *, world: int, start: int, steps: int) -> Order:
    places = shape.pop("places")
    plan = plan_order([index] * places, weights=[1.0] * places, **shape)
    return Order(
        plan=plan, recipe=ReaderRecipe(), start=start, stop=start + steps, world_size=world
    )


def groups_of(order: Order, rows: float) -> list[Group]:
    return list(merged_groups(order, lambda: rows))


@settings(max_examples=60, deadline=None)
@given(shape=orders, world=st.integers(1, 5), start=st.integers(0, 40), rows=st.integers(1, 200))
def test_groups_hold_each_ranks_units_in_its_order(
    index: Index, shape: dict[str, Any], world: int, start: int, rows: int
) -> None:
    order = order_of(index, shape, world=world, start=start, steps=25)
    groups = groups_of(order, rows)
    for rank in range(world):
        mine = [unit for group in groups if group.rank == rank for unit in group.units]
        assert mine == list(order.plan.units(rank, world, order.start, order.stop))
    for group in groups:
        assert len(group.units) == 1 or sum(unit.rows for unit in group.units) <= rows
    assert [g.needed_at for g in groups] == sorted(g.needed_at for g in groups)


@settings(max_examples=60, deadline=None)
@given(shape=orders, world=st.integers(1, 5), start=st.integers(0, 40))
def test_no_step_before_needs_a_unit_of_a_group(
    index: Index, shape: dict[str, Any], world: int, start: int
) -> None:
    order = order_of(index, shape, world=world, start=start, steps=6)
    plan = order.plan
    for group in groups_of(order, 60):
        for step in range(start, group.needed_at):
            wanted = set(plan.ids(step, group.rank, world).tolist())
            for unit in group.units:
                if unit.epoch == step // plan.streams[unit.stream].steps:
                    assert wanted.isdisjoint(ids_of(plan, unit))


def ids_of(plan: Plan, unit: Unit) -> set[int]:
    return set(unit.stored_ids(plan.streams[unit.stream].index).tolist())


@settings(max_examples=60, deadline=None)
@given(
    shape=orders,
    world=st.integers(2, 5),
    start=st.integers(0, 40),
    rows=st.integers(1, 200),
    bound=st.integers(1, 2),
)
def test_ranks_in_step_never_wait_for_each_others_blocks(
    index: Index, shape: dict[str, Any], world: int, start: int, rows: int, bound: int
) -> None:
    order = order_of(index, shape, world=world, start=start, steps=15)
    pipeline = iter(groups_of(order, rows))
    waiting: list[deque[Group]] = [deque() for _ in range(world)]
    held: list[set[Unit]] = [set() for _ in range(world)]
    coming = next(pipeline, None)
    for step in range(start, start + 15):
        needs = [needed(order, rank, step) for rank in range(world)]
        # every rank has to get through this step before any goes on to the next
        while any(not needs[rank] <= held[rank] for rank in range(world)):
            moved = False
            while coming is not None and len(waiting[coming.rank]) < bound:
                waiting[coming.rank].append(coming)
                coming, moved = next(pipeline, None), True
            for rank in range(world):
                while waiting[rank] and not needs[rank] <= held[rank]:
                    held[rank] |= set(waiting[rank].popleft().units)
                    moved = True
            assert moved, f"no rank gets on at step {step}"


def needed(order: Order, rank: int, step: int) -> set[Unit]:
    """Return the units that a rank needs for one step of an order."""
    return set(order.plan.units(rank, order.world_size, step, step + 1))


def test_an_endless_order_is_taken_lazily(index: Index) -> None:
    plan = plan_order(index, global_batch=24, seed=3)
    order = Order(plan=plan, recipe=ReaderRecipe(), start=0, stop=None, world_size=2)
    groups: Iterator[Group] = merged_groups(order, lambda: 1)
    assert len([next(groups) for _ in range(100)]) == 100
