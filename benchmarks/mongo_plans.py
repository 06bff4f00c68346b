"""How a MongoDB server answers queries: the plan that it chooses, and what MongoDB's own rules say of the indexes there."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pymongo.database import Database

__all__ = ["Judged", "judge", "queries"]


class Judged(NamedTuple):
    """One query. stages: of the plan that the server chooses, outermost first. by: the index that bounds it best,
    or none. order: the fields it is sorted by; ordered: whether an index has its entries in that order."""

    shape: str
    stages: list[str]
    by: str | None
    order: str
    ordered: bool

    def told(self) -> str:
        order = "" if not self.order else ", in its order" if self.ordered else ", sorted in memory"
        return f"{self.shape}\n    {' < '.join(self.stages)}; index {self.by}{order}"


def queries(commands: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """What commands look for, each form once, as (database, a command that every server explains)."""
    asked: dict[str, tuple[str, dict[str, Any]]] = {}
    for database, command in commands:
        for query in _queries(command):
            asked.setdefault(_shape(query), (database, query))
    return list(asked.values())


def judge(database: Database[dict[str, Any]], query: dict[str, Any]) -> Judged:
    """Ask the server, and look at the indexes that it has."""
    filter, order = _filter_and_order(query)
    all_indexes = [dict(one) for one in database[query[next(iter(query))]].list_indexes()]
    indexes = [one for one in all_indexes if _bounds(one, filter)]
    best = max(indexes, key=lambda one: len(_pinned(one, filter)), default=None)
    branches = filter.get("$or") if list(filter) == ["$or"] else None
    if branches is not None and all(any(_bounds(one, branch) for one in all_indexes) for branch in branches):
        best = {"name": "of each branch"}
    ordered = any(_is_in_order(one, filter, order) for one in indexes)
    name = None if best is None else best["name"]
    return Judged(_shape(query), _stages(database, query), name, ", ".join(order), ordered)


def _queries(command: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a command looks for, in a form that every server explains."""
    name = next(iter(command))
    collection = command[name]
    if name == "find":
        yield {key: command[key] for key in ("find", "filter", "sort", "limit", "hint") if key in command}
    elif name == "findAndModify":
        yield {"find": collection, "filter": command["query"], "sort": command.get("sort", {}), "limit": 1}
    elif name in ("update", "delete"):
        for one in command["updates" if name == "update" else "deletes"]:
            yield {"find": collection, "filter": one["q"]}
    elif name in ("count", "distinct"):
        yield {"find": collection, "filter": command.get("query", {})}
    elif name == "aggregate" and not any("$changeStream" in stage for stage in command["pipeline"]):
        yield {"aggregate": collection, "pipeline": command["pipeline"], "cursor": {}}


def _shape(query: dict[str, Any]) -> str:
    """The query without its values: which fields it looks at, and how."""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(one) for key, one in value.items()}
        if isinstance(value, list):
            return [shape(one) for one in value[:1]]
        return "..."

    kind = next(iter(query))
    if kind == "aggregate":
        return f"{query[kind]} aggregate {shape(query['pipeline'][0])}"
    return f"{query[kind]} {shape(query['filter'])} sort {dict(query.get('sort') or {})}"


def _stages(database: Database[dict[str, Any]], query: dict[str, Any]) -> list[str]:
    """The stages of the plan that this server chooses, outermost first."""
    told = database.command({"explain": query, "verbosity": "queryPlanner"})
    plan = told.get("queryPlanner") or told["stages"][0]["$cursor"]["queryPlanner"]
    return list(_names(plan["winningPlan"]))


def _names(plan: dict[str, Any]) -> Iterator[str]:
    plan = plan.get("queryPlan", plan)
    if "stage" in plan:
        yield plan["stage"]
    for inner in (*([plan["inputStage"]] if "inputStage" in plan else []), *plan.get("inputStages", [])):
        yield from _names(inner)


def _filter_and_order(query: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    if "aggregate" in query:
        return query["pipeline"][0]["$match"], {}
    return query["filter"], dict(query.get("sort") or {})


def _bounds(index: dict[str, Any], filter: dict[str, Any]) -> bool:
    """Whether MongoDB can answer the query by reading a part of the index."""
    for field, held in (index.get("partialFilterExpression") or {}).items():
        wanted = filter.get(field)
        least = held.get("$gte") if isinstance(held, dict) else None
        if not (wanted == held if least is None else isinstance(wanted, type(least)) and wanted >= least):
            return False
    return next(iter(index["key"])) in filter


def _is_in_order(index: dict[str, Any], filter: dict[str, Any], order: dict[str, int]) -> bool:
    """Whether the entries of the index that the query reads come in its order: runs of several values are merged."""
    pinned = len([field for field in _pinned(index, filter) if field not in order])
    keys, wanted = list(index["key"].items())[pinned:], list(order.items())
    return keys[: len(wanted)] in (wanted, [(field, -way) for field, way in wanted])


def _pinned(index: dict[str, Any], filter: dict[str, Any]) -> list[str]:
    """The fields that the index begins with, and that the query names the values of."""
    return list(takewhile(lambda field: _is_pinned(filter.get(field)), index["key"]))


def _is_pinned(wanted: Any) -> bool:
    return wanted is not None and (not isinstance(wanted, dict) or list(wanted) == ["$in"])
