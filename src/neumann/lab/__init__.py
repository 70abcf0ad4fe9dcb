"""The lab: train, compare and sweep optimizers on real data (extra `lab`).

config        the settings of a training run; a command's flags are made from them
config_files  the same settings in a TOML or JSON file
metrics       what runs are scored by: accuracy, or the loss of text
contenders    the arms of a study: an optimizer with settings of its own
lengths       parts of a run: shares, epochs, steps
lr_schedules  the learning rate over a run, as --sched names it
user_code     code that the user names, such as a preconditioner of their own
errors        what a user did wrong, in one line

The packages, from the bottom up: `storage` (files), `data`, `models`, `optimizers`,
`training` (one run), `studies` (many runs), `report` (pages from records) and `commands` (the
command line).
"""
