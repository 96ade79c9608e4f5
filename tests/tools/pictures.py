"""Draw docs/screens/kernel_time.svg from the tables of docs/results.md (needs matplotlib).

python3 -m tests.tools.pictures
"""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from common.html.page import COLORS
from common.paths import ROOT

PICTURE = ROOT / "docs" / "screens" / "kernel_time.svg"
PIES = {
    "Where the step goes": "Llama 3.1 8B, FP8, 2 x H200: ms of a step",
    "Where the time goes": "Llama 2 70B LoRA, FP8, H200: ms of a layer",
}
STYLES = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pictures",
    "font.family": "sans-serif",
    "font.size": 8,
}


def table(title: str, text: str) -> dict[str, float]:
    """Return name -> milliseconds of the first table below a bold title."""
    # The pattern does not match the line |---|.
    heads, values = re.findall(r"^\| (.+) \|$", text[text.index(f"**{title}**") :], re.MULTILINE)[
        :2
    ]
    return {
        name: float(value.replace(",", ""))
        for name, value in zip(heads.split(" | "), values.split(" | "), strict=True)
    }


def draw(path: Path) -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    with rc_context(STYLES):
        figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
        for axes, (title, head) in zip(figure.subplots(1, 2), PIES.items(), strict=True):
            parts = table(title, text)
            total = sum(parts.values())
            colors = [
                COLORS[at % len(COLORS)] if at < len(COLORS) else "#b0b0b0"
                for at in range(len(parts))
            ]
            wedges, _ = axes.pie(
                list(parts.values()),
                colors=colors,
                startangle=90,
                counterclock=False,
                wedgeprops={"edgecolor": "white"},
            )
            labels = [f"{name} {value:,g} ({value / total:.1%})" for name, value in parts.items()]
            axes.legend(wedges, labels, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
            axes.set_title(f"{head}, {total:,.4g}", fontsize=9, loc="left")
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(PICTURE)
