"""What we measure, and how. Run every script from the root of the repository with `python -m`.

step        how long a step takes, what a lower precision costs, whether two versions agree
contest     the large-batch contest between optimizers
ablations   what single choices inside the optimizers are worth
language    optimizers on language models
paper       the paper's claims: collect the runs of its studies, judge them, draw its figures
spectrum    curvature measurements beside other tools and along a training run
common      what the scripts share: provenance, Markdown tables, a ledger of runs, a search

A module is either a script or a helper: no module imports a script. Scripts write their numbers
to `results/` as JSON, together with the command, hardware and versions.
"""
