"""Does the paper hold up? From the runs of studies/paper to a verdict on each of its claims.

claims         the 28 claims and how each is judged, fixed before any run
claim_tests    the tests that a claim can have, on the runs of the studies
length_tests   tests on runs of several lengths or batch sizes
settled        claims that a measurement or a proof decides
judging        intervals and p values of a test, and verdicts, pure functions
run_lines      what is kept of a run, in results/paper
verdict_table  the table and the sections of docs/paper.md
run_tables     accuracy at equal epochs and by batch size, epochs needed, ablations
curve_figures  the runs in the form of the paper's figures
run_archives   a study in one file, from which it continues elsewhere
run_sharing    runs that another study has trained

Scripts: `run_studies` trains the studies, `collect_runs` brings finished runs into results/paper,
`draw_figures` draws them, and `judge_claims` prints the table.
"""
