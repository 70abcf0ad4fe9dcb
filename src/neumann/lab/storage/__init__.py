"""The files of a run: how they are written, read, named and locked.

folders        the names of run folders, and their locks
run_files      how a run ended, and whether its files belong together
metrics_lines  what each line of the metrics holds
reading        reading them, also while the run goes on
field_types    checking a file's content against declared types
atomic_files   files that are complete or absent
strict_json    JSON with NaN and infinities
"""
