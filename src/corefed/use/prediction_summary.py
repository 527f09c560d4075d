"""What `corefed predict` says about its predictions: as numbers, and in sentences."""

from __future__ import annotations

import math
from typing import Any

from corefed.use.predictions import Predictions
from corefed.use.review import PredictionSettings


def summarise(found: Predictions, settings: PredictionSettings) -> dict[str, Any]:
    """How the review threshold was chosen, and how many points it flagged."""
    if found.flag is None or found.review is None:
        return {}
    threshold, flag = found.flag.threshold, found.flag
    flagged = int(found.review.sum())
    return {
        "review": {
            "by": settings.by,
            "target_error": flag.target,
            "confidence": settings.confidence,
            "tolerance": settings.tolerance,
            "chosen_on": flag.source,
            "threshold": threshold.value if math.isfinite(threshold.value) else None,
            "held_out": threshold.points,
            "held_out_kept": threshold.kept,
            "held_out_wrong": threshold.wrong,
            "kept": len(found.review) - flagged,
            "flagged": flagged,
            "reachable": [
                {"target_error": target, "flagged": count} for target, count in found.at_targets
            ],
        }
    }


def sentences(about: dict[str, Any]) -> list[str]:
    """The summary for the terminal."""
    truth, lines = about.get("truth", {}), []
    for part in about.get("clients", [about]):
        whose = part["client"] or "rows without a client"
        lines.append(f"{part['points']} points by the {part['model']} model of {whose}")
        if part["model"] == "global" and part is not about:
            lines[-1] = f"{part['points']} points of {whose} by the shared model"
        review = part.get("review")
        if review:
            kept = f"kept {review['kept']}, for review {review['flagged']}"
            lines.append(f"{kept}: {_promise(review)}")
            if review["chosen_on"] == "none" and review["reachable"]:
                at = [
                    f"{each['flagged']} at {100 * each['target_error']:g} %"
                    for each in review["reachable"]
                ]
                lines.append(f"for review at targets that can be promised: {', '.join(at)}")
    names = {
        "accuracy": "accuracy",
        "rmse": "RMSE",
        "interval_coverage": "targets in their interval",
        "error": "error",
        "error_kept": "error among kept",
        "error_flagged": "error among those for review",
    }
    known = [
        f"{names[name]} {value:.4g}" if name == "rmse" else f"{names[name]} {100 * value:.2f} %"
        for name, value in truth.items()
        if value is not None
    ]
    if known:
        lines.append("against the truth in the file: " + ", ".join(known))
    if about["out"] is not None:
        lines.append(f"written to {about['out']}")
    return lines


def _promise(review: dict[str, Any]) -> str:
    if review["chosen_on"] == "none":
        return "no threshold can be promised"
    return (
        f"kept below {review['threshold']:.4g} ({review['by']}), for an error of at most "
        f"{100 * review['target_error']:g} % among the kept, as {review['held_out_wrong']} of "
        f"{review['held_out_kept']} held-out points were wrong there"
    )
