"""Language models: optimizers on GPTs of several widths, at a fixed number of steps.

Scripts: `contest` (ours, Muon and others at three batch sizes), `update_page`
(its page of the docs, with plots), `throughput` (tokens per second of every arm), `leads` (what
may put the recipe further ahead?), `tune_roles` (which P, rates and momenta suit each role?),
`tune_recipe` (the recipe's own numbers), `lr_by_width` (does the best learning rate carry over from
narrow networks to wide ones?), `recipe_untuned` (is the recipe as good as peers after tuning?),
`state_precision` (does state in bfloat16 cost anything?).
Helpers: `language_arms` (optimizers by role), `language_variants` (the leads on top of them),
`lead_preconditioners` (their P), `output_preconditioners` (those of the output layer),
`step_wrappers` (what they do around a step), `search_space` (what is tuned), `language_runs` (one
run), `contest_rules` (who takes part, how long, how often), `contest_searches` (the runs that
choose settings), `contest_stages` (those that test them, and all in order), `finalists` (who is
tested), `contest_verdicts` (who is ahead), `contest_tables` (the same in tables and sentences),
`contest_plots`, `contest_state` (how far the contest is, and what its searches say), `recipe_tests`
(who the untuned recipe was tested against), `speed_table` (tokens per second).
"""
