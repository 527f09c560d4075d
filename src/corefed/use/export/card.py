"""The model card; all its numbers come from the files of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from corefed.base.errors import UserError
from corefed.base.shown import code, markdown
from corefed.base.tables import markdown_table
from corefed.data.preparation import Preparation
from corefed.settings.config import to_dict
from corefed.settings.fields import to_flat
from corefed.training import classification, record
from corefed.training.fitted import Fitted
from corefed.use import review, selective
from corefed.use.export import measures
from corefed.use.export.network import ExportedNetwork
from corefed.use.review import PredictionSettings

MOST_CLASSES = 20
"""Of a confusion matrix in a card."""
MOST_CATEGORIES = 20
MOST_FEATURES = 200
"""Listed in the card; all of them are in preparation.json."""
LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Levels of the intervals whose coverage is shown."""
FEW = 100
"""The card warns if there are fewer held-out points."""
SHOWN = ("rounds", "local_steps", "batch_size", "clients", "partition", "hidden", "channels")
"""Settings of a run that are shown, beside those of the method."""


def write(
    model: Fitted,
    kind: str,
    g: int,
    client: str | None,
    preparation: Preparation,
    network: ExportedNetwork,
    about: dict[str, Any],
    *,
    with_program: bool,
) -> str:
    """`client` None: the numbers are those of all clients."""
    whose = "all clients" if client is None else markdown(client)
    sections = [
        (f"Model card: {'shared' if kind == 'global' else 'personal'} model of {whose}",
         [_first(model, kind, about)]),
        ("Data", _data(model, g, client, preparation)),
        ("Method", _method(model, kind, about)),
        ("Results on held-out points", _results(model, kind, g, client)),
        ("Calibration", [*_temperature(about["temperature"], preparation),
                         *_calibration(model, kind, g, client)]),
        ("Uncertainty and review", _review(model, kind, g, client)),
        ("Intended use", _use(preparation, whose)),
        ("Limits", _limits(model, kind, g, client)),
        ("Input", _input(preparation)),
        ("How to run it", _run(network, with_program)),
        ("Versions", _versions(model, about)),
        ("Licence", ["To be filled in by whoever publishes this model."]),
    ]  # fmt: skip
    text = []
    for number, (title, paragraphs) in enumerate(sections):
        text += [f"{'##' if number else '#'} {title}", "", *_spaced(paragraphs)]
    return "\n".join(text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(markdown, names))


def _spaced(paragraphs: Sequence[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in (paragraph, "")]


def _first(model: Fitted, kind: str, about: dict[str, Any]) -> str:
    bayes = (
        "a Gaussian posterior over the weights of a network, whose predictions average "
        f"{about['draws']} draws"
        if model.method.noise[-1]
        else "a network with one set of weights"
    )
    return f"Trained by {about['method']} (corefed): {bayes}. {about['parameters']:,} parameters."


def _data(model: Fitted, g: int, client: str | None, preparation: Preparation) -> list[str]:
    rows = model.clients[g]
    mine = [row for row in rows if client in (None, row["name"])]
    names = (
        f"Clients: {len(rows)}. This card is about {_listed(row['name'] for row in mine[:20])}"
        f"{', ...' if len(mine) > 20 else ''}."
    )
    train, test = (sum(row[key] for row in mine) for key in ("train", "test"))
    words = [
        f"Data set: {markdown(model.experiment.run.data)}. {names}",
        f"Points: {train} to train on, {test} held out.",
    ]
    if preparation.labels:
        counts = np.sum([row["classes"] for row in mine], 0).tolist()
        table = zip(map(markdown, preparation.labels), map(str, counts), strict=True)
        words.append(
            "\n".join(markdown_table(("class", "training points"), [list(r) for r in table]))
        )
    else:
        words.append(f"Targets: {_listed(preparation.targets)}, in their own unit.")
    summary, _ = record.read(model.folder)
    told = summary.get("personalized")
    if told:
        words.append(
            f"{markdown(told['name'])} took no part in training: its model started from the shared "
            f"one of {markdown(told['clients'])} clients (data: {markdown(told['data'])}), with "
            f"{markdown(told['steps'])} steps."
        )
    words += [f"Note: {markdown(note)}" for note in summary["environment"].get("notes", [])]
    return words


def _method(model: Fitted, kind: str, about: dict[str, Any]) -> list[str]:
    values = to_dict(model.experiment)
    convolves = values["model"] in ("cnn", "cnn1d", "resnet")
    run = {name: values[name] for name in SHOWN if name != "channels" or convolves}
    own = {k: v for k, v in values.items() if k in to_flat(model.experiment.settings)}
    rows = [[name, code(value)] for name, value in {**run, **own, "seed": about["seed"]}.items()]
    words = ["\n".join(markdown_table(("setting", "value"), rows))]
    return [f"Method {about['method']}, model kind {kind}.", *words]


def _results(model: Fitted, kind: str, g: int, client: str | None) -> list[str]:
    found = measures.measure(model, kind, g, client)
    if not found["points"]:
        return ["There were no held-out points, so that nothing is known of its accuracy."]
    rows = []
    for name, words in (("accuracy", "accuracy"), ("rmse", "RMSE"), ("nll", "NLL, nats a point"),
                        ("brier", "Brier score"), ("ece", "ECE")):  # fmt: skip
        if name in found:
            interval = found[name].get("interval")
            shown = f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else "-"
            rows.append([words, f"{found[name]['value']:.4f}", shown])
    table = "\n".join(markdown_table(("metric", "value", "95 % interval"), rows))
    return [
        f"On {found['points']} held-out points, which had no part in training.",
        table,
        "The interval of an accuracy is Wilson's; the others are normal approximations. They are "
        "about the draw of these points only.",
        *_by_class(model, kind, g, client),
    ]


def _by_class(model: Fitted, kind: str, g: int, client: str | None) -> list[str]:
    """Each class against all others; empty for a regression."""
    found = classification.of_run(model, kind, g, client)
    if found is None:
        return []
    names = ("auroc", "auprc", "sensitivity", "specificity", "f1")
    rows = [
        [markdown(label), str(each["points"]), *(_with_interval(each[name]) for name in names)]
        for label, each in found["classes"].items()
    ]
    head = ("class", "points", "AUROC", "AUPRC", "sensitivity", "specificity", "F1")
    labels = [markdown(label) for label in model.preparations[g].labels]
    counts = [
        [label, *map(str, row)] for label, row in zip(labels, found["confusion"], strict=True)
    ]
    words = [
        "Each class against all others, with 95 % intervals. "
        + classification.how(found, len(labels)),
        "\n".join(markdown_table(head, rows)),
    ]
    if len(labels) <= MOST_CLASSES:
        words += [
            "Confusion matrix: rows are true classes, columns predicted ones.",
            "\n".join(markdown_table(("", *labels), counts)),
        ]
    return words


def _with_interval(value: dict[str, Any]) -> str:
    if value["value"] is None:
        return "-"
    ends = value["interval"]
    return f"{value['value']:.3f}" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


def _temperature(temperature: float, preparation: Preparation) -> list[str]:
    """How predictions were calibrated, where they were."""
    if temperature == 1:
        return []
    what = (
        f"Probabilities are raised to the power of 1/{temperature:.3f} and normalised"
        if preparation.labels
        else f"The predictive standard deviation is multiplied by {temperature:.3f}"
    )
    return [
        f"Temperature {temperature:.3f}, fitted on validation points, which were neither trained "
        f"on nor are they the held-out points below. {what}. The program does this itself; the "
        "network in mean.safetensors does not."
    ]


def _calibration(model: Fitted, kind: str, g: int, client: str | None) -> list[str]:
    y, mean, total = measures.held_out(model, kind, g, client)
    if not len(y):
        return ["Unknown: there were no held-out points."]
    if model.preparations[g].labels:
        bins = selective.reliability(mean, y)
        rows = [
            [f"{b / len(bins.points):.2f} to {(b + 1) / len(bins.points):.2f}", str(count),
             f"{bins.confidence[b]:.3f}", f"{bins.accuracy[b]:.3f}"]
            for b, count in enumerate(bins.points.tolist()) if count
        ]  # fmt: skip
        head = ("confidence", "points", "mean confidence", "accuracy")
        return [
            f"Expected calibration error {bins.ece:.4f}, over {len(bins.points)} bins of the "
            "largest probability:",
            "\n".join(markdown_table(head, rows)),
        ]
    covered = selective.coverage_curve(
        y.double().flatten(), mean.double().flatten(), total.double().flatten(), LEVELS
    )
    rows = [[f"{100 * a:g} %", f"{100 * b:.1f} %"] for a, b in zip(LEVELS, covered, strict=True)]
    return [
        "How many of the held-out targets lie within the interval of the predictive:",
        "\n".join(markdown_table(("interval", "within"), rows)),
    ]


def _review(model: Fitted, kind: str, g: int, client: str | None) -> list[str]:
    words = [
        "Uncertainty comes in two parts: aleatoric, which more data of the same kind do not lower, "
        "and epistemic, which they do. Total is their sum: the entropy in nats of the predicted "
        "probabilities, or the variance of the predicted target."
    ]
    if not model.method.noise[-1]:
        words.append(
            "A point estimate has no epistemic part: it is 0 here, which is not a finding."
        )
    if client is None or not model.preparations[g].labels:
        return words
    settings = PredictionSettings()
    seed = model.experiment.run.seeds[g]
    try:
        flag = review.flag_for(model, client, settings, seed=seed, kind=kind)
    except (UserError, KeyError):  # no held-out points of this kind of model
        return words
    promise = (
        f"an error of at most {100 * flag.target:g} % among the kept, at "
        f"{100 * settings.confidence:g} % confidence"
    )
    if flag.source == "none":
        return [*words, *map(markdown, flag.notes)]
    t = flag.threshold
    chosen = (
        f"Predictions with a total uncertainty below {t.value:.4f} are kept, the others are for a "
        f"person to review: {promise}. Chosen on {t.points} held-out points: {t.kept} were kept, "
        f"{t.wrong} of these wrong."
    )
    return [*words, chosen, *map(markdown, flag.notes)]


def _use(preparation: Preparation, whose: str) -> list[str]:
    what = (
        f"the class ({_listed(preparation.labels[:20])}"
        f"{', ...' if len(preparation.labels) > 20 else ''})"
        if preparation.labels
        else _listed(preparation.targets)
    )
    return [
        f"To predict {what} of points that come from where the training points of {whose} came "
        "from and are made ready in the same way, with a person deciding on those that are flagged."
    ]


def _limits(model: Fitted, kind: str, g: int, client: str | None) -> list[str]:
    n = len(measures.held_out(model, kind, g, client)[0])
    few = f"; {n} are few, and the intervals above are wide for that reason" if n < FEW else ""
    items = [
        f"All numbers are from {n} held-out points of the same source as the training points{few}.",
        "It was not tested on other sources, on other times, or on inputs made to mislead it.",
        "Where the data drift, accuracy, calibration and the review threshold are no longer those "
        "above; test it again on new points before use, and at intervals after.",
        "Differences between groups of people or devices within the data were not looked at.",
        "It gives a class it knows to every point, also to one of a class that it has never seen; "
        "uncertainty is often, not always, high there."
        if model.preparations[g].labels
        else "Its intervals take errors for Gaussian.",
        "Weights can give away something of the data they were learnt from; hand them on as the "
        "data's owner allows.",
        "It is no medical device, and nobody has approved it for decisions about people.",
    ]
    return ["\n".join(f"* {item}" for item in items)]


def _input(preparation: Preparation) -> list[str]:
    shape = ", ".join(map(str, preparation.shape))
    if preparation.kind == "table":
        columns = preparation.columns
        words = [
            f"float64 [points, {len(columns)}]: the columns below in this order, NaN where a value "
            "is missing. A number goes in as it is, a category as its place in the list, from 0; "
            "-1 is a category that is not in the list. The program encodes and scales them.",
            "The mean network alone takes the features that the program makes of them: a number, "
            "or a 0 or 1 per category, and a 1 for a missing value where training had such.",
        ]
        rows = [
            [str(place), markdown(column.name), _holds(column.categories)]
            for place, column in enumerate(columns[:MOST_FEATURES])
        ]
        words.append("\n".join(markdown_table(("place", "column", "what it holds"), rows)))
        if len(columns) > MOST_FEATURES:
            words.append("The others are in preparation.json.")
        return words
    what = "numbers as they were trained on, before any scaling"
    if preparation.embedding != "none":
        name = markdown(preparation.embedding)
        what = f"features that the frozen network {name} makes of an image"
    elif preparation.levels or preparation.kind == "images":
        what = "levels of pixels between 0 and 1 (bytes divided by 255), before any scaling"
    return [f"float32 [points, {shape}]: {what}."]


def _holds(categories: Sequence[str]) -> str:
    if not categories:
        return "a number"
    named = enumerate(categories[:MOST_CATEGORIES])
    some = ", ".join(f"{code} = {markdown(name)}" for code, name in named)
    return some if len(categories) <= MOST_CATEGORIES else f"{some}, ... (preparation.json)"


def _run(network: ExportedNetwork, with_program: bool) -> list[str]:
    words = []
    if with_program:
        words = [
            "The program needs torch alone, scales its input itself, and takes any number of "
            "points. It gives a dictionary: probabilities (or mean), total, aleatoric, epistemic.",
            "```python\nimport numpy as np\nimport torch\n\n"
            'program = torch.export.load("predictive.pt2").module()\n'
            'x = torch.from_numpy(np.load("example_input.npy"))\n'
            "with torch.no_grad():\n    found = program(x)\n"
            "print({name: value.tolist() for name, value in found.items()})\n```",
            "For the example it prints what is in example_output.json, to rounding. Open programs "
            "only from those you trust: torch.export.load may run code of theirs.",
        ]
    return [
        *words,
        "The posterior's mean as an ordinary network, for points that are scaled already "
        "(preparation.json):",
        f"```python\nfrom safetensors.torch import load_file\n{network.code}\n"
        'network.load_state_dict(load_file("mean.safetensors"))\n```',
        "weights.safetensors has the mean and, of a posterior, the standard deviation of every "
        "parameter: NAME.mean and NAME.std.",
    ]


def _versions(model: Fitted, about: dict[str, Any]) -> list[str]:
    summary, _ = record.read(model.folder)
    there = summary["environment"]
    corefed, torch = markdown(there["corefed"]), markdown(there["torch"])
    trained = f"Trained with corefed {corefed}, torch {torch}"
    return [f"{trained}; exported with corefed {about['corefed']}, torch {about['torch']}."]
