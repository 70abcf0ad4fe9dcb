"""The large-batch contest: ten optimizers on CIFAR-10, tuned by the same rules.

Scripts: `large_batch` trains and prints the tables, `update_pages` copies them into the
docs, `draw_figure` draws them; `tune_image_roles` looks for rates and decay by role,
`recipe_variants` compares variants of the recipe over several seeds, `lr_by_network` asks whether
one learning rate suits several networks, `recipe_images` whether the recipe is as good as peers
after tuning, `recipe_comparisons` lists every such comparison, and `demo_rates` chooses the
learning rates of `neumann demo`. Helpers, from the bottom up: `entrants` (who takes part, and what
identifies a run), `tuning` (the rules), `trainer` (one run), `recipe_runs` (one run of the recipe),
`stages` (all runs), `summary` (what they amount to), `image_families` (every comparison on a test
set, and p corrected for all of them), `markdown_tables`, `recipe_overview` (the table of
the start page) and `form_guide` (README's).
"""
