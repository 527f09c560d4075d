"""Which descriptions and which names count, where a client may lie about its data.

A client whose data have another form than those of most is left out, by name and with the reason.
A class or a category that too few clients name is left out too: whoever can add outputs to the
network alone can make it as large as it likes. All of this needs three clients; of two, nobody can
say which one lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from corefed.base.errors import UserError
from corefed.data.class_names import are_numbers, sort_names, unite
from corefed.data.profile import MOST_CATEGORIES
from corefed.federation.reading.agreement import FEWEST, agree
from corefed.federation.reading.description import Description

Descriptions = Mapping[str, Description]


class Counted(NamedTuple):
    """The descriptions that count."""

    descriptions: dict[str, Description]
    left_out: dict[str, str]  # clients, and why
    classes_left_out: dict[str, list[str]]  # classes, and who has them


def keep_alike(descriptions: Descriptions) -> Counted:
    """Those of the form that more than half of the clients have: arrays or a table, shape, target.

    Where no form has such a majority all are kept, and `agree` says how they differ.
    """
    kept, left_out = _majority(dict(descriptions), _form)
    if kept and "columns" in next(iter(kept.values())):
        names = [column["name"] for column in next(iter(kept.values()))["columns"]]
        for name in names:
            kept, odd = _majority(kept, partial(_kind, name))
            left_out |= odd
    return Counted(kept, left_out, {})


def _majority(
    descriptions: dict[str, Description], of: Callable[[Description], Hashable]
) -> tuple[dict[str, Description], dict[str, str]]:
    """The clients that have what most have, and why the others are left out.

    None fits everything: a column without a value has no kind.
    """
    found = {name: of(each) for name, each in descriptions.items()}
    number = Counter(each for each in found.values() if each is not None)
    if len(descriptions) < FEWEST or len(number) < 2:
        return descriptions, {}
    (most, votes), *_ = number.most_common()
    if 2 * votes <= sum(number.values()):
        return descriptions, {}
    first = next(name for name, each in found.items() if each == most)
    odd = [name for name, each in found.items() if each not in (most, None)]
    kept = {name: each for name, each in descriptions.items() if name not in odd}
    return kept, {name: _difference(descriptions, first, name) for name in odd}


def _difference(descriptions: Descriptions, first: str, other: str) -> str:
    """The sentence of `agree` about two clients."""
    try:
        agree({first: descriptions[first], other: descriptions[other]}, (), "unit")
    except UserError as error:
        return str(error)
    return f"{other} has data of another form than {first}."


def _form(description: Description) -> Hashable:
    target = bool(description["classes"]), description["targets"]
    if "columns" in description:
        return target, tuple(sorted(column["name"] for column in description["columns"]))
    return target, "arrays", tuple(description["shape"])


def _kind(name: str, description: Description) -> str | None:
    (kind,) = (each["kind"] for each in description["columns"] if each["name"] == name)
    return None if kind == "empty" else str(kind)


def keep_known_classes(descriptions: Descriptions, quorum: int, most: int) -> Counted:
    """Descriptions with only those classes that `quorum` clients name, at most `most` of them.

    A client that has none of them is left out. Where classes are numbers, those below the largest
    are outputs of the network in any case, so they stay.
    """
    join = sort_names if any("columns" in each for each in descriptions.values()) else unite
    who: dict[str, list[str]] = {}
    for name, each in descriptions.items():
        for label in each["classes"]:
            who.setdefault(label, []).append(name)
    if not who:
        return Counted(dict(descriptions), {}, {})
    needed = quorum if len(descriptions) >= FEWEST else 1
    known = {label for label in who if len(who[label]) >= needed}
    if not known:
        raise UserError(
            f"No class is named by {needed} clients, as class_quorum asks; name the classes in the "
            f"experiment, for example classes = {_listed(sort_names(who))}."
        )
    agreed = set(join(_most_named(known, who, most)))
    left_out: dict[str, str] = {}
    kept: dict[str, Description] = {}
    for name, each in descriptions.items():
        own = [label for label in each["classes"] if label in agreed]
        if own:
            kept[name] = {**each, "classes": own}
        else:
            left_out[name] = "Too few other clients have any of its classes."
    unknown = {label: names for label, names in who.items() if label not in agreed}
    return Counted(kept, left_out, unknown)


def _most_named(known: set[str], who: Mapping[str, list[str]], most: int) -> list[str]:
    """At most so many: of numbers the smallest, of names those that most clients have."""
    if are_numbers(known):
        return [label for label in known if int(label) < most]
    return sorted(known, key=lambda label: (-len(who[label]), label))[:most]


def keep_known_categories(descriptions: Descriptions, quorum: int) -> dict[str, Description]:
    """Where a column has too many categories, only those that `quorum` clients name.

    Others stay where there is room for them: a category at one site may well be true, and costs the
    network one input. A client's rows with a category that is left out have zeros there.
    """
    if len(descriptions) < FEWEST:
        return dict(descriptions)
    number: dict[str, Counter[str]] = {}
    for each in descriptions.values():
        for column in each.get("columns", ()):
            number.setdefault(column["name"], Counter()).update(column["categories"])
    crowded = {name: found for name, found in number.items() if len(found) > MOST_CATEGORIES}

    def thin(column: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
        found = crowded.get(column["name"])
        if found is None:
            return column
        own = [each for each in column["categories"] if found[each] >= quorum]
        if own or column["kind"] != "category":
            return {**column, "categories": own}
        return {**column, "kind": "empty", "categories": [], "missing": rows}

    return {
        name: {**each, "columns": [thin(column, each["train"]) for column in each["columns"]]}
        if "columns" in each
        else each
        for name, each in descriptions.items()
    }


def class_note(unknown: Mapping[str, list[str]], agreed: Iterable[str]) -> str:
    """For the operator: which classes are left out, and how to add them."""
    some = sorted(unknown.items())[:3]
    shown = ", ".join(f"{label[:30]!r} ({names[0]})" for label, names in some)
    more = f" and {len(unknown) - len(some)} more" if len(unknown) > len(some) else ""
    return (
        f"too few clients name {shown}{more}; points of these classes are left out. To keep them, "
        "start a new run whose experiment names all classes: "
        f"classes = {_listed([*agreed, *sorted(unknown)])}."
    )


def _listed(names: Iterable[str]) -> str:
    """As TOML has it, the first few."""
    shown = [f'"{name[:30]}"' for name in names]
    return f"[{', '.join(shown[:3])}{', ...' if len(shown) > 3 else ''}]"
