"""Draw our runs in the form of the paper's figures, as far as results/paper has them.

python -m benchmarks.paper.draw_figures
python -m benchmarks.paper.judge_claims --update     # brings them into docs/paper.md
"""

import argparse
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg

from benchmarks.paper.curve_figures import DRAWINGS
from benchmarks.paper.run_lines import Results

ROOT = Path(__file__).parents[2]


def draw_all(folder: Path) -> list[Path]:
    """Draw what the results in a folder allow, into the same folder."""
    results, drawn = Results(folder), []
    for drawing in DRAWINGS:
        figure = drawing.draw(results)
        if figure is not None:
            FigureCanvasAgg(figure)
            figure.savefig(folder / drawing.file, dpi=160)
            drawn.append(folder / drawing.file)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results/paper")
    for path in draw_all(parser.parse_args().results):
        print(path)


if __name__ == "__main__":
    main()
