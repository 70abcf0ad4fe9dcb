"""The commands of `neumann`, each with a line about it, and the help that lists them.

Nothing is imported here that takes long, so that the help comes at once.
"""

SUMMARIES = {
    "train": "train one network with one optimizer",
    "compare": "compare optimizers over the same seeds",
    "sweep": "choose each learning rate, then compare",
    "study": "run a study from a file: arms, axes, tuning, seeds",
    "spectrum": "measure the curvature of a loss",
    "report": "write a page with plots of any of these",
    "demo": "compare five optimizers on digits in a minute",
}


def format_help() -> str:
    """What `neumann --help` prints."""
    width = max(map(len, SUMMARIES))
    commands = "\n".join(f"  {name:{width}}  {line}" for name, line in SUMMARIES.items())
    return (
        "usage: neumann COMMAND [FLAGS]\n\n"
        "Train networks with Neumann and other optimizers, and compare them.\n\n"
        f"{commands}\n\n"
        "neumann help COMMAND, or neumann COMMAND --help, lists the flags of a command.\n"
        "neumann --version prints the version."
    )
