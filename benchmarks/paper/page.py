"""One page of all models: the paper's claims, their figures, and the verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import claims_bands
import claims_candidates
import claims_further
import claims_robustness
import claims_truncation
from claims import RULES, Claim, Verdict, Verdicts, decide
from explanations import explanation
from geometry import geometry_result
from ranges import range_pictures
from reports import Reports

from csprune.analysis.results import Column, Result, Row, Table, Unit
from csprune.files import atomic_file
from csprune.pages.results_page import write_results
from csprune.pages.results_sections import ResultsHeading
from csprune.pages.results_text import shown

CLAIMS: tuple[Claim, ...] = (
    *claims_bands.CLAIMS,
    *claims_candidates.CLAIMS,
    *claims_truncation.CLAIMS,
    *claims_robustness.CLAIMS,
    *claims_bands.FURTHER,
    *claims_further.CLAIMS,
)
SECTIONS = {
    "3.1": "The bottom band at equal length",
    "3.2": "Along the spectrum",
    "3.3": "Other positions and texts",
    "4.1": "The leading pair's share",
    "4.2": "Where the prediction change falls",
    "4.3": "A concentrated prediction",
    "5.1": "Truncations",
    "E.1": "Robustness of the comparison",
    "E.2": "Further consequences",
    "E.3": "Further analyses of the leading candidates",
    "E.4": "Further comparisons of the truncations",
    "G": "The top token under HARP's removal",
}
PAGE, VERDICTS = "paper", "verdicts.json"


def verdicts_of(reports: Sequence[Reports]) -> list[dict[str, Verdict]]:
    """What became of every claim, for each model."""
    return [{claim.key: decide(claim, each) for claim in CLAIMS} for each in reports]


def write_page(directory: Path, reports: Sequence[Reports], verdicts: Sequence[Verdicts]) -> None:
    """Write `paper.html`, `paper.md`, their pictures, and `verdicts.json`.

    The same reports give the same bytes.
    """
    text = json.dumps(described(reports, verdicts), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_results(directory, heading(reports), page_results(reports, verdicts), page=PAGE)
    with atomic_file(directory / VERDICTS) as path:
        path.write_bytes(text.encode())


def page_results(reports: Sequence[Reports], verdicts: Sequence[Verdicts]) -> list[Result]:
    """The page's sections: the counts, how the models differ, and the paper's sections."""
    return [
        summary_result(reports, verdicts),
        geometry_result(reports),
        *(section_result(section, reports, verdicts) for section in SECTIONS),
    ]


def described(reports: Sequence[Reports], verdicts: Sequence[Verdicts]) -> dict[str, Any]:
    """All claims and verdicts as JSON."""
    return {
        "schema": 1,
        "rule": RULES,
        "models": [_model(each) for each in reports],
        "claims": [_described(claim, reports, verdicts) for claim in CLAIMS],
    }


def _model(reports: Reports) -> dict[str, Any]:
    protocol = reports.spectrum["protocol"]
    used = ("position", "documents", "evaluation_documents", "bands", "random_subspaces", "seed")
    return {
        "name": reports.name,
        "width": reports.spectrum["width"],
        "vocabulary": reports.spectrum["vocabulary"],
        "base_loss": reports.spectrum["base_loss"]["mean"],
        "text": protocol["evaluation"]["source"],
        **{key: protocol[key] for key in used},
        "machine": reports.why["machine"],
    }


def heading(reports: Sequence[Reports]) -> ResultsHeading:
    models = [_model(each) for each in reports]
    facts = [
        (
            each["name"],
            f"{each['width']} directions, {each['vocabulary']:,} tokens, base loss {each['base_loss']:.3f} "
            f"nats; token {each['position']} of {each['documents']} + {each['evaluation_documents']} "
            f"documents of {each['text']}, {each['bands']} bands, {each['random_subspaces']} random "
            f"subspaces, seed {each['seed']}",
        )
        for each in models
    ]
    return ResultsHeading(
        "The paper's claims on other models",
        "What the paper says of ten models of the Pythia, Llama and Qwen families (70M to 8B parameters, "
        "OpenWebText), and what comes out for "
        f"{_listed([each.name for each in reports])}. {RULES}",
        facts,
        list(reports[0].spectrum["protocol"]["versions"].items()),
    )


def summary_result(reports: Sequence[Reports], verdicts: Sequence[Verdicts]) -> Result:
    """How many claims of each section are reproduced."""
    rows, findings = [], []
    for section, title in SECTIONS.items():
        keys = [claim.key for claim in CLAIMS if claim.section == section]
        cells = {_key(i): _count([found[key] for key in keys]) for i, found in enumerate(verdicts)}
        rows.append(Row(f"{section} {title}", cells))
    for each, found in zip(reports, verdicts, strict=True):
        differing = sum(v.mark == "differs" for v in found.values())
        findings.append(f"{each.name} {_count(list(found.values()))} ({differing} differ)")
    columns = [Column(_key(i), each.name, "text") for i, each in enumerate(reports)]
    table = Table(
        "sections", "Claims reproduced, of those that apply", columns, rows, head="section of the paper"
    )
    said = f"Claims reproduced, of those that apply: {', '.join(findings)}."
    return Result("summary", "All claims", "", RULES, [said], tables=[table])


def section_result(section: str, reports: Sequence[Reports], verdicts: Sequence[Verdicts]) -> Result:
    """One section's claims: the paper's words, each model's figure and verdict, and why some differ."""
    claims = [claim for claim in CLAIMS if claim.section == section]
    columns = [Column("paper", "the paper", "text")]
    for i, each in enumerate(reports):
        columns += [Column(_key(i), each.name, "text"), Column(f"{_key(i)}_verdict", "verdict", "text")]
    rows = []
    for number, claim in enumerate(claims, 1):
        cells: dict[str, str | None] = {"paper": claim.said}
        for i, found in enumerate(verdicts):
            verdict = found[claim.key]
            cells[_key(i)] = _figure(verdict, claim.unit)
            cells[f"{_key(i)}_verdict"] = _worded(verdict)
        rows.append(Row(f"{number}. {claim.text}", cells))
    tables = [Table("claims", "Claims and figures", columns, rows, head="claim")]
    if differing := _differing(claims, reports, verdicts):
        tables.append(differing)
    return Result(
        _name(section),
        SECTIONS[section],
        f"Appendix {section}" if section == "G" else f"Section {section}",
        "Every figure is read from the model's own reports, which lie beside this page; what the paper says "
        "is as it is printed. Verdicts follow the rule at the top.",
        tables=tables,
        pictures=range_pictures(_name(section), SECTIONS[section], claims, reports, verdicts),
    )


def _differing(
    claims: Sequence[Claim], reports: Sequence[Reports], verdicts: Sequence[Verdicts]
) -> Table | None:
    """What differs and what does not apply, a row for each model and reason."""
    rows = []
    for each, found in zip(reports, verdicts, strict=True):
        reasons: dict[tuple[str, str], list[str]] = {}
        for number, claim in enumerate(claims, 1):
            verdict = found[claim.key]
            if verdict.mark != "reproduced":
                why = verdict.reason if verdict.found is None else explanation(each.name, claim.key)
                reasons.setdefault((verdict.mark, why), []).append(str(number))
        rows += [
            Row(each.name, {"mark": mark, "why": why, "claims": ", ".join(numbers)})
            for (mark, why), numbers in reasons.items()
        ]
    columns = [
        Column("claims", "claims", "text"),
        Column("mark", "verdict", "text"),
        Column("why", "why", "text"),
    ]
    return Table("why", "What differs or does not apply", columns, rows, head="model") if rows else None


def _name(section: str) -> str:
    return f"section-{section.lower().replace('.', '-')}"


def _described(claim: Claim, reports: Sequence[Reports], verdicts: Sequence[Verdicts]) -> dict[str, Any]:
    """A claim and its verdicts as JSON."""
    expects = {"kind": type(claim.expects).__name__.lower(), **vars(claim.expects)}
    models = {}
    for each, found in zip(reports, verdicts, strict=True):
        verdict = found[claim.key]
        models[each.name] = {
            "verdict": verdict.mark,
            "reason": verdict.reason,
            **(verdict.found.estimate if verdict.found else {"value": None, "ci95": None}),
            "explanation": explanation(each.name, claim.key) if verdict.mark == "differs" else None,
        }
    return {
        "key": claim.key,
        "section": claim.section,
        "text": claim.text,
        "said": claim.said,
        "unit": claim.unit,
        "expects": expects,
        "models": models,
    }


def _figure(verdict: Verdict, unit: Unit) -> str | None:
    return str(shown(verdict.found.estimate, unit)) if verdict.found else None


def _worded(verdict: Verdict) -> str:
    return f"differs: {verdict.reason}" if verdict.mark == "differs" else verdict.mark


def _count(verdicts: Sequence[Verdict]) -> str:
    apply = [each for each in verdicts if each.mark != "not applicable"]
    return f"{sum(each.mark == 'reproduced' for each in apply)} of {len(apply)}"


def _key(model: int) -> str:
    return f"model_{model + 1}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
